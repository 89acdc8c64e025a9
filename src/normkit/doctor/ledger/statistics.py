"""A layer's running statistics as they were when last looked at: whether they have moved, and towards what batch."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normkit.moments import Moments
from normkit.snapshot import all_equal
from normkit.spec import NormSpec
from normkit.surgery.norms import stored_moments

_CHANNELS = 64  # of a batch's moments, as many are kept at most: two kinds of batches differ in more than one
_MOVES_BY_MOMENTUM = ("batch", "renorm")  # kinds whose statistics move towards those of one batch, by the momentum


def stores_statistics(layer: nn.Module) -> bool:
    """Whether a layer has running statistics: by torch's names, which ours and other libraries have, too."""
    return any(name.startswith("running_") and buffer is not None for name, buffer in layer._buffers.items())


def running_statistics(layer: nn.Module) -> dict[str, Tensor]:
    """The running statistics of a layer; none before a lazy one has seen its first batch."""
    return {
        name: buffer
        for name, buffer in layer._buffers.items()
        if name.startswith("running_") and buffer is not None and not is_lazy(buffer)
    }


def all_finite(layers: Iterable[nn.Module]) -> bool:
    """Whether the statistics of some layers have no NaN or infinity; a device is waited for once."""
    sums = [tensor.sum().double() for layer in layers for tensor in running_statistics(layer).values()]
    if not sums or math.isfinite(torch.stack([one.to(sums[0].device) for one in sums]).sum().item()):
        return True
    return all(math.isfinite(one.item()) for one in sums)


class Statistics:
    """The running statistics of one layer.

    Operators that write them do not all say so: torch's own leaves the version counters of `running_mean` and
    `running_var` alone. So values are compared. On other devices than CPUs that would wait for each layer; there the
    counter of batches decides, for every class that is known to keep one.
    """

    def __init__(self, layer: nn.Module, spec: NormSpec | None) -> None:
        self.layer = layer
        self._spec = spec
        self._kept: dict[str, Tensor] = {}
        self._count = -1
        self.look()

    @torch.no_grad()
    def look(self) -> None:
        """Keep what they are now."""
        now = running_statistics(self.layer)
        self._count = self._counter_version()
        if all(_is_alike(self._kept.get(name), tensor) for name, tensor in now.items()):
            for name, tensor in now.items():
                self._kept[name].copy_(tensor)
        else:
            self._kept = {name: tensor.detach().clone() for name, tensor in now.items()}

    def has_moved(self) -> bool:
        """Whether something has written them since the last look. To write what was there is not to move."""
        if self._counter_version() != self._count and getattr(self.layer, "momentum", None) != 0:
            return True
        now = running_statistics(self.layer)
        is_counted = self._spec is not None and self._spec.exact and self._count >= 0
        if is_counted and not self.is_on_cpu:
            return False
        return not all(
            _is_alike(self._kept.get(name), tensor) and all_equal(self._kept[name], tensor)
            for name, tensor in now.items()
        )

    @torch.no_grad()
    def batch(self) -> Moments | None:
        """The moments of the batch that has moved them, of some channels; None if the layer moves in another way.

        The move tells them: new = old + momentum (batch - old). So the layer's input is not read a second time. The
        variance is the unbiased one, which is what is stored.
        """
        now, factor = stored_moments(self.layer), self._factor()
        mean, var = self._kept.get("running_mean"), self._kept.get("running_var")
        if now is None or mean is None or var is None or mean.shape != now.mean.shape or not factor:
            return None
        some = slice(None, None, -(-mean.numel() // _CHANNELS))
        old = torch.stack([mean[some], var[some]])
        found = old + (torch.stack([now.mean[some], now.var[some]]) - old) / factor
        return Moments(found[0], found[1], 0)

    @property
    def is_on_cpu(self) -> bool:
        """Whether they can be read without waiting for a device."""
        return all(tensor.is_cpu for tensor in running_statistics(self.layer).values())

    def _factor(self) -> float:
        """The weight that the last batch got; 0 if that is not known."""
        spec = self._spec
        if spec is None or spec.kind not in _MOVES_BY_MOMENTUM or spec.scope == "ghost":
            return 0.0
        momentum = getattr(self.layer, "momentum", 0.0)
        if momentum is not None:
            return float(momentum)
        count = self.layer._buffers.get("num_batches_tracked")
        return 1 / max(1, int(count)) if count is not None and count.is_cpu else 0.0

    def _counter_version(self) -> int:
        """How often the counter of batches was written; -1 if there is none that tells."""
        count = self.layer._buffers.get("num_batches_tracked")
        return -1 if count is None or is_lazy(count) or count.is_inference() else count._version


def _is_alike(kept: Tensor | None, tensor: Tensor) -> bool:
    """Whether a copy of a tensor can be compared with it."""
    return kept is not None and (kept.shape, kept.dtype, kept.device) == (tensor.shape, tensor.dtype, tensor.device)
