"""Batch normalization over all processes of a group, on any backend of torch.distributed."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, distributed, nn

from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.checks import NonFinite
from normkit.errors import DistributedError
from normkit.functional import batch_core
from normkit.functional.batch_core import Terms
from normkit.layers.absent_ranks import who_was_absent
from normkit.layers.affine_parts import Affine
from normkit.layers.batch import BatchNorm
from normkit.layers.shared_layers import must_be_shared
from normkit.moments import Moments


class SyncBatchNorm(BatchNorm):
    """Batch normalization of (N, C, ...) with the statistics of the whole batch, wherever its parts are.

    Forward gathers 2C + 1 numbers, backward sums 2C, once each. Ranks may hold unequal parts, or none. In evaluation,
    and where there is no process group or only one process, this is BatchNorm.

    Args, beyond BatchNorm's:
        process_group: the processes that share a batch; None for all. Its time-out bounds the wait for a rank that
            does not come.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: Affine = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
        nonfinite: NonFinite = "propagate",
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            bias=bias,
            activation=activation,
            negative_slope=negative_slope,
            nonfinite=nonfinite,
        )
        self.process_group = process_group

    def _ranks_of(self, input: Tensor) -> Sequence[int]:
        return (max(2, input.dim()),)

    def _normalize_batch(self, input: Tensor, terms: Terms, stored: Moments | None) -> tuple[Tensor, Moments]:
        if not (self.training and self._ranks_sharing() > 1):
            return super()._normalize_batch(input, terms, stored)
        return batch_core.normalize_synced(input, terms, self._gather, self._reduce)

    def _ranks_sharing(self) -> int:
        if not (distributed.is_available() and distributed.is_initialized()):
            return 1
        return distributed.get_world_size(self.process_group)

    def _gather(self, own: Moments) -> Moments:
        """One collective of 2C + 1 numbers, and the merge that everything goes through."""
        channels, shape = own.mean.numel(), own.mean.shape
        if not torch.compiler.is_compiling():
            must_be_shared(self, self._who(), self.process_group)
        count = torch.as_tensor(own.count, device=own.mean.device).flatten()[:1]
        packed = torch.cat([own.mean.flatten(), own.var.flatten(), count.to(own.mean.dtype)])
        every = [torch.empty_like(packed) for _ in range(self._ranks_sharing())]
        self._exchange(lambda: distributed.all_gather(every, packed, group=self.process_group), "forward")
        split = (p.split([channels, channels, 1]) for p in every)
        return reduce(Moments.merge, [Moments(m.view(shape), v.view(shape), n.long()) for m, v, n in split])

    def _reduce(self, sums: Tensor) -> Tensor:
        """One collective of 2C numbers."""
        self._exchange(lambda: distributed.all_reduce(sums, group=self.process_group), "backward")
        return sums

    def _exchange(self, collective: Any, pass_: str) -> None:
        start = time.monotonic()
        try:
            collective()
        except RuntimeError as error:
            absent = who_was_absent(self.process_group, time.monotonic() - start)
            raise DistributedError(
                f"{self._who()} at {_path_of(self)!r} needs all {self._ranks_sharing()} ranks in its {pass_} pass; "
                f"within the group's time-out {absent}. Every rank must run every forward and backward, if need "
                "be with an empty batch; ranks that stop early can be waited for with join() or kept in step by a "
                "sampler that drops the rest."
            ) from error


def _path_of(layer: nn.Module) -> str:
    """The layer's name in the largest model that holds it; looked for only when there is bad news to tell."""
    models = [m for m in gc.get_objects() if isinstance(m, nn.Module)]
    names = [name for m in models for name, child in m.named_modules() if child is layer]
    return max(names, key=len, default="")
