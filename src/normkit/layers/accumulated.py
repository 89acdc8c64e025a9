"""Batch normalization under gradient accumulation: micro-batches, with one large batch's worth of statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.checks import NonFinite
from normkit.errors import ArgumentError
from normkit.functional import batch_core
from normkit.functional.batch_core import Terms
from normkit.kernels.reference import working_dtype
from normkit.layers.affine_parts import Affine
from normkit.layers.batch import BatchNorm
from normkit.moments import Moments
from normkit.tracing import is_exporting, is_recomputing, is_transformed


class AccumulatedBatchNorm(BatchNorm):
    """What the accumulated norms share: `micro_batches` forwards in a row make one batch.

    Each micro-batch is normalized with the merged moments of itself and the micro_batches - 1 before it; gradients flow
    through its own. The running statistics move once every `micro_batches` forwards, exactly as the large batch would
    have moved them.

    The window is not part of the state_dict: a reloaded model begins a new one.

    Args, beyond BatchNorm's:
        micro_batches: forwards between two steps of the optimizer.
    """

    _beyond = "statistics over several micro-batches"

    window_mean: Tensor
    window_var: Tensor
    window_count: Tensor
    micro_step: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: Affine = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        micro_batches: int,
        bias: bool = True,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
        nonfinite: NonFinite = "propagate",
        inplace: bool = False,
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
            inplace=inplace,
        )
        if micro_batches < 1:
            raise ArgumentError(f"micro_batches must be at least 1; got {micro_batches}.")
        self.micro_batches = micro_batches
        means = torch.zeros(micro_batches, num_features, device=device)
        self.register_buffer("window_mean", means, persistent=False)
        self.register_buffer("window_var", means.clone(), persistent=False)
        counts = torch.zeros(micro_batches, 1, dtype=torch.long, device=device)
        self.register_buffer("window_count", counts, persistent=False)
        self.register_buffer("micro_step", torch.tensor(0, device=device), persistent=False)

    def _normalize_batch(self, input: Tensor, terms: Terms, stored: Moments | None) -> tuple[Tensor, Moments]:
        # A forward repeated by activation checkpointing stands where it stood before: its own slot is left out.
        slot = (self.micro_step - int(is_recomputing())) % self.micro_batches
        y, own, merged = batch_core.normalize_among(input, self._others(slot), terms)
        if not is_recomputing():
            self._remember_(slot, own)
        return y, merged

    def _is_known(self) -> bool:
        """Whether numbers of the window can be read without waiting for them, or changing what is computed."""
        step = self.micro_step
        return step.is_cpu and not torch.compiler.is_compiling() and not is_exporting() and not is_transformed(step)

    def _others(self, slot: Tensor) -> Moments:
        """The moments of the window but for the micro-batch in this slot; a count of zero takes it out."""
        if self._is_known():
            counts, own = self.window_count.flatten().tolist(), int(slot)
            others = [i for i, n in enumerate(counts) if i != own and n]
            if len({counts[i] for i in others}) == 1:  # as usual; numbers are then all that there is to weigh by
                wide, n = working_dtype(self.window_mean), counts[others[0]]
                return Moments(self.window_mean[others].to(wide), self.window_var[others].to(wide), n).pooled(0)
        index = torch.arange(self.micro_batches, device=slot.device)
        count = torch.where((index == slot)[:, None], 0, self.window_count)
        wide = working_dtype(self.window_mean)
        return Moments(self.window_mean.to(wide), self.window_var.to(wide), count).pooled(0)

    @torch.no_grad()
    def _remember_(self, slot: Tensor, own: Moments) -> None:
        count = torch.as_tensor(own.count, device=slot.device).flatten()[:1]
        if self.nonfinite == "skip-update":
            count = count * (own.mean.isfinite() & own.var.isfinite()).all()
        where = slot.reshape(1)
        self.window_mean.index_copy_(0, where, own.mean.to(self.window_mean.dtype)[None])
        self.window_var.index_copy_(0, where, own.var.to(self.window_var.dtype)[None])
        self.window_count.index_copy_(0, where, count[None])
        self.micro_step.add_(1)

    def _update_(self, stored: Moments, batch: Moments) -> None:
        if self._is_known() and int(self.micro_step) % self.micro_batches:
            return
        factor = batch_core.average_factor(stored, self.momentum)
        new = batch_core.next_stored(stored, batch, factor, self.nonfinite)
        # A window without any values has nothing to store.
        complete = (self.micro_step % self.micro_batches == 0) & torch.as_tensor(batch.count > 0).all()
        kept = (
            torch.where(complete, torch.as_tensor(n), torch.as_tensor(old)) for n, old in zip(new, stored, strict=True)
        )
        batch_core.write_(stored, Moments(*kept))

    def reset_running_stats(self) -> None:
        """Forget the running statistics, and the window with them."""
        super().reset_running_stats()
        if hasattr(self, "micro_step"):  # torch's constructor calls before there is one
            self._forget_window_()

    def _forget_window_(self) -> None:
        for name in ("window_mean", "window_var", "window_count", "micro_step"):
            self.get_buffer(name).zero_()

    def _load_from_state_dict(self, *args: Any) -> None:
        # What the window holds was computed with other weights or, after to_empty, is uninitialized.
        super()._load_from_state_dict(*args)
        self._forget_window_()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # A move to half precision takes the parameters along; statistics are never kept in less than float32.
        super()._apply(fn, recurse)
        for name in ("window_mean", "window_var"):
            t = self.get_buffer(name)
            setattr(self, name, t.to(torch.promote_types(t.dtype, torch.float32)))
        return self

    def _is_torchs(self, **extras: Any) -> bool:
        return not self.training and super()._is_torchs(**extras)

    def extra_repr(self) -> str:
        """BatchNorm's line, and the window."""
        return super().extra_repr() + f", micro_batches={self.micro_batches}"


class AccumulatedBatchNorm1d(AccumulatedBatchNorm, nn.BatchNorm1d):
    """Batch normalization over micro-batches, of (N, C) or (N, C, L)."""

    _ranks = (2, 3)
    _torch = nn.BatchNorm1d


class AccumulatedBatchNorm2d(AccumulatedBatchNorm, nn.BatchNorm2d):
    """Batch normalization over micro-batches, of (N, C, H, W)."""

    _ranks = (4,)
    _torch = nn.BatchNorm2d


class AccumulatedBatchNorm3d(AccumulatedBatchNorm, nn.BatchNorm3d):
    """Batch normalization over micro-batches, of (N, C, D, H, W)."""

    _ranks = (5,)
    _torch = nn.BatchNorm3d
