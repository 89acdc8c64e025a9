"""A BatchNorm that has stopped: stored statistics and fixed gamma and beta, whatever train() and optimizers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.functional import batch_core
from normkit.functional.batch_core import Terms
from normkit.kernels import layer_calls
from normkit.layers.affine_parts import Affine, check_affine
from normkit.layers.norm_layer import NormLayer, name
from normkit.moments import Moments


class FrozenBatchNorm(NormLayer):
    """What the frozen norms share: BatchNorm's state as buffers, which nothing trains and nothing writes.

    Deliberately not one of torch's BatchNorm classes: tools that look for those would train it again.

    Args: BatchNorm's. `momentum` is kept for `unfreeze`; `track_running_stats` can only be true.
    """

    _ranks: ClassVar[Sequence[int]]

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
        bias: bool = True,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        super().__init__()
        checks.options(eps, momentum, activation)
        has_weight, has_bias = check_affine(affine, bias)
        checks.tracked(track_running_stats, type(self).__name__)
        self.num_features, self.eps, self.momentum, self.affine = num_features, eps, momentum, affine
        self._set_activation(activation, negative_slope)
        like = {"device": device, "dtype": dtype}
        # An absent one is not registered: torch.export miscounts buffers that are None.
        self.weight = nn.Buffer(torch.ones(num_features, **like)) if has_weight else None
        self.bias = nn.Buffer(torch.zeros(num_features, **like)) if has_bias else None
        self.register_buffer("running_mean", torch.zeros(num_features, **like))
        self.register_buffer("running_var", torch.ones(num_features, **like))
        self.register_buffer("num_batches_tracked", torch.tensor(0, device=device))

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Become the identity: mean and beta zero, variance and gamma one."""
        for zero in (self.running_mean, self.bias, self.num_batches_tracked):
            if zero is not None:
                zero.zero_()
        for one in (self.running_var, self.weight):
            if one is not None:
                one.fill_(1)

    def forward(self, input: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Apply the stored affine map."""
        return self._run(input, residual)

    def _run_fast(self, input: Tensor) -> Tensor | None:
        kept = self._buffers
        try:
            weight = kept["weight"] if "weight" in kept or self.weight is not None else None
            bias = kept["bias"] if "bias" in kept or self.bias is not None else None
            mean, var = kept["running_mean"], kept["running_var"]
        except KeyError:  # one of them is parametrized, and not in the dictionary
            return None
        assert mean is not None
        assert var is not None
        tensors = weight, bias, mean, var
        return layer_calls.batch_norm_evaluated(input, *tensors, self._ranks, self.eps, self._fused)

    def _compute(self, input: Tensor, *, residual: Tensor | None) -> Tensor:  # type: ignore[override]
        who = name(lambda: f"{type(self).__name__}({self.num_features})")
        checks.batch_input(input, who, (self.num_features,), self._ranks)
        terms = Terms((self.num_features,), self.weight, self.bias, self.eps, self._fused, residual, who=who)
        return batch_core.normalize_stored(input, Moments(self.running_mean, self.running_var, 0), terms)

    def _torch_forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # Frozen norms of other libraries do not count batches.
        state_dict.setdefault(prefix + "num_batches_tracked", self.num_batches_tracked)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """What a BatchNorm shows."""
        parts = [str(self.num_features), f"eps={self.eps}", f"affine={self.affine}", self._activation_repr()]
        return ", ".join(filter(None, parts))


class FrozenBatchNorm1d(FrozenBatchNorm, fast_path=True):
    """A frozen BatchNorm1d, of (N, C) or (N, C, L)."""

    _ranks = (2, 3)
    _torch = nn.BatchNorm1d


class FrozenBatchNorm2d(FrozenBatchNorm, fast_path=True):
    """A frozen BatchNorm2d, of (N, C, H, W)."""

    _ranks = (4,)
    _torch = nn.BatchNorm2d


class FrozenBatchNorm3d(FrozenBatchNorm, fast_path=True):
    """A frozen BatchNorm3d, of (N, C, D, H, W)."""

    _ranks = (5,)
    _torch = nn.BatchNorm3d
