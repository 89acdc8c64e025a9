"""Ghost batch normalization (Hoffer, Hubara & Soudry 2017): a large batch, normalized as several small ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.checks import NonFinite
from normkit.errors import ArgumentError
from normkit.functional import batch_core
from normkit.functional.batch_core import Terms
from normkit.layers.affine_parts import Affine
from normkit.layers.batch import BatchNorm
from normkit.moments import Moments


class GhostBatchNorm(BatchNorm):
    """What the ghost norms share: in training, every chunk of the batch has statistics of its own.

    The running statistics move towards each chunk in turn, as if it had been a batch, and count it as one.

    Args, beyond BatchNorm's:
        chunk_size: examples per chunk; the last chunk takes what is left, and joins the one before it if that is a
            single value per channel.
    """

    _beyond = "statistics for every chunk of a batch"

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
        chunk_size: int = 128,
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
        if chunk_size < 1:
            raise ArgumentError(f"chunk_size must be at least 1 example; got {chunk_size}.")
        self.chunk_size = chunk_size

    def _normalize_batch(self, input: Tensor, terms: Terms, stored: Moments | None) -> tuple[Tensor, Moments]:
        if batch_core.has_no_values(input):
            return super()._normalize_batch(input, terms, stored)
        return batch_core.normalize_chunks(input, self._sizes(input), terms)

    def _normalize_and_store_(self, input: Tensor, terms: Terms, stored: Moments) -> Tensor:
        sizes = self._sizes(input)
        y = None
        if len(set(sizes)) == 1 and not batch_core.has_no_values(input):
            y = batch_core.normalize_chunks_and_store_(input, len(sizes), terms, stored, self.momentum)
        if y is None:
            y, batch = self._normalize_batch(input, terms, stored)
            self._update_(stored, batch)
        return y

    def _update_(self, stored: Moments, batch: Moments) -> None:
        if not isinstance(batch.count, Tensor):
            super()._update_(stored, batch)  # of no values, and so not cut into chunks
            return
        for mean, var, count in zip(batch.mean, batch.var, batch.count, strict=True):
            super()._update_(stored, Moments(mean, var, count))

    def _sizes(self, input: Tensor) -> list[int]:
        examples, rest = input.shape[0], input.shape[0] % self.chunk_size
        sizes = [self.chunk_size] * (examples // self.chunk_size) + ([rest] if rest else [])
        alone = rest == 1 and input[0, 0].numel() == 1
        if len(sizes) > 1 and alone:
            sizes[-2:] = [self.chunk_size + 1]
        return sizes or [0]

    def _is_torchs(self, **extras: Any) -> bool:
        return not self.training and super()._is_torchs(**extras)

    def extra_repr(self) -> str:
        """BatchNorm's line, and the chunk."""
        return super().extra_repr() + f", chunk_size={self.chunk_size}"


class GhostBatchNorm1d(GhostBatchNorm, nn.BatchNorm1d, one_step=True):
    """Ghost batch normalization of (N, C) or (N, C, L)."""

    _ranks = (2, 3)
    _torch = nn.BatchNorm1d


class GhostBatchNorm2d(GhostBatchNorm, nn.BatchNorm2d, one_step=True):
    """Ghost batch normalization of (N, C, H, W)."""

    _ranks = (4,)
    _torch = nn.BatchNorm2d
