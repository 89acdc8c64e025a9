"""What a layer was given over many batches, as one set of statistics."""

from __future__ import annotations

from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from normkit.kernels import select
from normkit.moments import Moments, ema
from normkit.surgery.norms import Norm

Method = Literal["pooled", "paper"]
ALONE = "alone"  # no group: None is the group of all


class Tally:
    """The moments of all batches so far, in float64, as `population` would have them: nothing else is kept."""

    def __init__(self, method: Method = "pooled") -> None:
        self._method = method
        self._seen: Moments | None = None
        self.calls = 0
        self.examples = 0

    def add(self, batch: Moments, examples: int) -> None:
        """Count one more call of the layer."""
        self.calls += 1
        self.examples += examples
        if self._method == "paper":
            batch = batch._replace(var=batch.unbiased_var)
        if self._seen is None:
            self._seen = batch
        elif self._method == "pooled":
            self._seen = self._seen.merge(batch)
        else:
            count = self._seen.count + batch.count
            self._seen = ema(self._seen, batch, 1 / self.calls)._replace(count=count)

    @property
    def values(self) -> int:
        """How many values a channel has had; of channels that differ, the one with the fewest."""
        if self._seen is None:
            return 0
        return int(self._seen.count.min()) if isinstance(self._seen.count, Tensor) else self._seen.count

    def population(self) -> Moments:
        """The statistics to store: their variance is unbiased."""
        assert self._seen is not None
        return self._seen if self._method == "paper" else self._seen._replace(var=self._seen.unbiased_var)


def moments_of(x: Tensor, features: torch.Size, mask: Tensor | None) -> Moments:
    """Mean and biased variance of a layer's input, in float64 where the device has it; of shape `features`."""
    over = (0, *range(1 + len(features), x.dim()))
    wide = x.detach() if x.device.type in ("cpu", "mps") else x.detach().double()  # our kernels do so on CPUs
    return select.moments(wide, over, mask)


def group_of(norm: Norm) -> Any:
    """The processes that share a synchronized norm's batches; "alone" where there are no others."""
    if norm.spec.scope != "synced" or not (distributed.is_available() and distributed.is_initialized()):
        return ALONE
    group = getattr(norm.layer, "process_group", None)
    return ALONE if distributed.get_world_size(group) == 1 else group


def over_ranks(own: Moments, examples: int, group: Any) -> tuple[Moments, int]:
    """The moments of what all ranks were given, and how many examples that was. Every rank gets the same bits."""
    size, shape = own.mean.numel(), own.mean.shape
    counts = [torch.as_tensor(count, device=own.mean.device).flatten()[:1] for count in (own.count, examples)]
    packed = torch.cat([own.mean.flatten(), own.var.flatten(), *(count.to(own.mean.dtype) for count in counts)])
    every = [torch.empty_like(packed) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(every, packed, group=group)
    parts = [one.split([size, size, 1, 1]) for one in every]
    merged = reduce(Moments.merge, [Moments(m.view(shape), v.view(shape), n.long()) for m, v, n, _ in parts])
    return merged, sum(int(n) for _, _, _, n in parts)
