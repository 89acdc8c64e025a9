"""What norms of channels that are not torch's BatchNorm share: their parameters and their running statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.functional.batch_core import average_factor
from normkit.kernels import reference
from normkit.layers.affine_parts import Affine, check_affine, reset_parts_
from normkit.layers.norm_layer import NormLayer
from normkit.moments import Moments, moved
from normkit.tracing import is_recomputing


class ChannelNorm(NormLayer):
    """Gamma and beta per channel of (N, C, ...), and running statistics that count batches.

    Deliberately not one of torch's BatchNorm classes: tools that fold or convert those would read this as one.
    """

    _ranks: ClassVar[Sequence[int]] = (4,)

    weight: Tensor | None
    bias: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None
    track_running_stats: bool

    def __init__(
        self,
        num_features: int,
        eps: float,
        affine: Affine,
        activation: ActivationLike | None,
        device: Any,
        dtype: Any,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        super().__init__()
        checks.options(eps, None, activation)
        has_weight, has_bias = check_affine(affine)
        self.num_features, self.eps, self.affine = num_features, eps, affine
        self._set_activation(activation, negative_slope)
        self.register_parameter("weight", self._parameter((num_features,), device, dtype) if has_weight else None)
        self.register_parameter("bias", self._parameter((num_features,), device, dtype) if has_bias else None)

    @staticmethod
    def _parameter(shape: Sequence[int], device: Any, dtype: Any) -> nn.Parameter:
        return nn.Parameter(torch.empty(tuple(shape), device=device, dtype=dtype))

    def _track(
        self, momentum: float | None, tracked: bool, shapes: dict[str, tuple[int, ...]], device: Any, dtype: Any
    ) -> None:
        """Register running statistics of these shapes, to be filled by `reset_parameters`; if not tracked, none."""
        checks.options(self.eps, momentum, None)
        self.momentum, self.track_running_stats = momentum, tracked
        if tracked:
            for name, shape in shapes.items():
                self.register_buffer(name, torch.empty(shape, device=device, dtype=dtype))
            self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long, device=device))
            return
        for name in (*shapes, "num_batches_tracked"):
            setattr(self, name, None)  # not as buffers: torch.export miscounts those that are None

    def reset_parameters(self) -> None:
        """Set gamma to one and beta to zero, if the layer has them, and reset the running statistics."""
        reset_parts_(self)
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Set running means to zero and running variances to one, as before the first batch."""
        for name, stored in self.named_buffers(recurse=False):
            stored.fill_(1 if name == "running_var" else 0)

    def _uses_batch(self) -> bool:
        """Whether to normalize with the batch's statistics: in training, and where none are stored."""
        return self.training or self.num_batches_tracked is None

    def _writes(self) -> bool:
        return (
            self.training
            and self.track_running_stats
            and self.num_batches_tracked is not None
            and not is_recomputing()  # a batch counts once
        )

    @torch.no_grad()
    def _update_(self, **batch: Tensor) -> None:
        """Move each running statistic towards the batch's."""
        assert self.num_batches_tracked is not None
        for name, new in batch.items():
            stored: Tensor = getattr(self, name)
            factor = average_factor(Moments(stored, stored, self.num_batches_tracked), self.momentum)
            stored.copy_(moved(stored.to(new.dtype), new, factor))
        self.num_batches_tracked.copy_(self.num_batches_tracked + 1)

    def _check(self, input: Tensor, over: tuple[int, ...] | None, residual: Tensor | None = None) -> None:
        """Check the call, and that the dimensions `over`, if any, hold enough values for a variance."""
        checks.batch_input(input, self._who(), (self.num_features,), self._ranks)
        checks.same_shape(residual, input, self._who())
        if over is not None:
            checks.enough_values(reference.count_values(input, over), input, self._who())

    def _who(self) -> str:
        return f"{type(self).__name__}({self.num_features})"

    def extra_repr(self) -> str:
        """What a BatchNorm shows."""
        parts = [str(self.num_features), f"eps={self.eps}"]
        if hasattr(self, "momentum"):
            parts.append(f"momentum={self.momentum}")
        parts.append(f"affine={self.affine}")
        if hasattr(self, "track_running_stats"):
            parts.append(f"track_running_stats={self.track_running_stats}")
        return ", ".join(filter(None, [*parts, super().extra_repr()]))
