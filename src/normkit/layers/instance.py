"""Instance normalization (Ulyanov, Vedaldi & Lempitsky 2016)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.functional import within as functional
from normkit.functional.batch_core import Terms
from normkit.functional.by_example import normalize_stored_with_any
from normkit.kernels import layer_calls
from normkit.layers.affine_parts import Affine, check_affine, keep_parts_, reset_parts_
from normkit.layers.norm_layer import ELSEWHERE, NormLayer
from normkit.moments import Moments
from normkit.tracing import is_recomputing


class InstanceNorm(NormLayer, nn.modules.instancenorm._InstanceNorm):
    """What the instance norms share: torch's arguments, parameters and buffers, with our arithmetic.

    Args:
        num_features: channels of the input, C of (N, C, ...) or, for a single example, (C, ...).
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics; None leaves them alone, as in torch.
        affine: gamma and beta (True), neither (False), or one of them ("scale", "shift").
        track_running_stats: keep running statistics, the average over examples, and normalize with them in
            evaluation; without them every example uses its own.
        device: where the parameters live.
        dtype: the parameters' type.
        bias: False is another spelling of affine="scale".
        activation: applied to the output: a name ("relu", "hardswish" and so on), a module or a function.
        negative_slope: of activation="leaky_relu".

    Call:
        layer(x), layer(x, residual=r) for activation(IN(x) + r), layer(x, mask=m) for statistics over those positions
        only where m, of shape (N, ...) without the channels, is true. layer(x, weight=w, bias=b) takes gamma and beta
        from outside, in place of the layer's own: (C,), or (N, C) for each example its own.
    """

    _rank: ClassVar[int]
    _takes_mask = True

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: Affine = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
    ) -> None:
        checks.options(eps, momentum, activation)
        parts = check_affine(affine, bias)
        super().__init__(num_features, eps, momentum, bool(affine), track_running_stats, device, dtype)  # type: ignore[arg-type]
        keep_parts_(self, affine, *parts)
        self._set_activation(activation, negative_slope)

    def reset_parameters(self) -> None:
        """Set gamma to one and beta to zero, where they are, and forget the running statistics."""
        self.reset_running_stats()
        reset_parts_(self)

    def forward(
        self,
        input: Tensor,
        *,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Normalize with each example's own statistics or, where they are tracked, in evaluation the stored ones."""
        return self._run(input, residual, mask, weight, bias)

    def _run_fast(self, input: Tensor) -> Tensor | None:
        own = self._parameters
        weight, bias = own.get("weight", ELSEWHERE), own.get("bias", ELSEWHERE)
        missing = self._rank - input.dim()
        if weight is ELSEWHERE or bias is ELSEWHERE or self.track_running_stats or missing not in (0, 1):
            return None
        terms = self.num_features, self.num_features, self.eps, self._fused
        if missing == 0:
            return layer_calls.group_norm(input, weight, bias, *terms)
        y = layer_calls.group_norm(input.unsqueeze(0), weight, bias, *terms)
        return None if y is None else y.squeeze(0)

    def _compute(  # type: ignore[override]
        self,
        input: Tensor,
        *,
        residual: Tensor | None,
        mask: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        self._check_input_dim(input)
        parameters = self.weight if weight is None else weight, self.bias if bias is None else bias
        if input.dim() < self._rank:
            batch = [None if t is None else t.unsqueeze(0) for t in (residual, mask)]
            return self._of_batch(input.unsqueeze(0), *parameters, *batch).squeeze(0)
        return self._of_batch(input, *parameters, residual, mask)

    def _of_batch(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        eps, activation = self.eps, self._fused
        stored = None
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            stored = Moments(self.running_mean, self.running_var, 0)
        if stored is not None and not self.training:
            terms = Terms((self.num_features,), weight, bias, eps, activation, residual, mask, who=self._who())
            return normalize_stored_with_any(x, stored, terms)
        y, own = functional.normalize_instances(x, weight, bias, eps, activation, residual, mask, self._who())
        if stored is not None and self.momentum is not None and not is_recomputing():
            functional.update_(stored, own, self.momentum)
        return y

    def _check_input_dim(self, input: Tensor) -> None:
        checks.instance_input(input, self._who(), self.num_features, self._rank)

    def _who(self) -> str:
        return f"{type(self).__name__}({self.num_features})"


class InstanceNorm1d(InstanceNorm, nn.InstanceNorm1d, fast_path=True):
    """Instance normalization of (N, C, L) or (C, L)."""

    _rank = 3
    _torch = nn.InstanceNorm1d


class InstanceNorm2d(InstanceNorm, nn.InstanceNorm2d, fast_path=True):
    """Instance normalization of (N, C, H, W) or (C, H, W)."""

    _rank = 4
    _torch = nn.InstanceNorm2d


class InstanceNorm3d(InstanceNorm, nn.InstanceNorm3d, fast_path=True):
    """Instance normalization of (N, C, D, H, W) or (C, D, H, W)."""

    _rank = 5
    _torch = nn.InstanceNorm3d
