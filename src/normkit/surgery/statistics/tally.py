"""What a layer was given over many batches, as one set of statistics."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor, distributed

from normkit.kernels import select
from normkit.moments import Moments, Population, PopulationMethod
from normkit.surgery.norms import Norm

ALONE = "alone"  # no group at all: torch's None is the group of all processes


class Tally:
    """The population estimate of a layer's input, with the numbers of calls, examples and values it rests on."""

    def __init__(self, method: PopulationMethod = "pooled") -> None:
        self._population = Population(method)
        self._values: int | Tensor = 0
        self.examples = 0

    def add(self, batch: Moments, examples: int) -> None:
        """Count one more call of the layer."""
        self._population.add(batch)
        self._values = self._values + batch.count
        self.examples += examples

    @property
    def calls(self) -> int:
        """The number of calls of the layer."""
        return self._population.batches

    @property
    def values(self) -> int:
        """The number of values per channel; where channels differ, of the one with the fewest."""
        return int(self._values.min()) if isinstance(self._values, Tensor) else self._values

    def population(self) -> Moments:
        """The statistics to store; their variance is unbiased."""
        return self._population.result()


def moments_of(x: Tensor, features: torch.Size, mask: Tensor | None) -> Moments:
    """Mean and biased variance of a layer's input, in float64 where the device has it; of shape `features`."""
    over = (0, *range(1 + len(features), x.dim()))
    wide = x.detach() if x.device.type in ("cpu", "mps") else x.detach().double()  # our CPU kernels sum in float64
    return select.moments(wide, over, mask)


def group_of(norm: Norm) -> Any:
    """The processes that share a synchronized norm's batches; ALONE where there are no others."""
    if norm.spec.scope != "synced" or not (distributed.is_available() and distributed.is_initialized()):
        return ALONE
    group = getattr(norm.layer, "process_group", None)
    return ALONE if distributed.get_world_size(group) == 1 else group


def over_ranks(own: Moments, examples: int, group: Any) -> tuple[Moments, int]:
    """The moments over the batches of all ranks, and the number of their examples. Every rank gets the same bits."""
    size, shape = own.mean.numel(), own.mean.shape
    counts = [torch.as_tensor(count, device=own.mean.device).flatten()[:1] for count in (own.count, examples)]
    packed = torch.cat([own.mean.flatten(), own.var.flatten(), *(count.to(own.mean.dtype) for count in counts)])
    every = [torch.empty_like(packed) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(every, packed, group=group)
    parts = [one.split([size, size, 1, 1]) for one in every]
    merged = reduce(Moments.merge, [Moments(m.view(shape), v.view(shape), n.long()) for m, v, n, _ in parts])
    return merged, sum(int(n) for _, _, _, n in parts)
