"""EvoNorm (Liu et al. 2020): normalization and activation as one function, found by search."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from normkit import checks
from normkit.kernels import gate, select
from normkit.layers.affine_parts import Affine
from normkit.layers.channel_norm import ChannelNorm
from normkit.moments import Moments, unbiased_var


class EvoNorm(ChannelNorm):
    """What both share: gamma and beta, and a third parameter `v` per channel that bends the function."""

    def __init__(self, num_features: int, eps: float, affine: Affine, device: Any, dtype: Any) -> None:
        super().__init__(num_features, eps, affine, None, device, dtype)
        self.v = self._parameter((num_features,), device, dtype)

    def reset_parameters(self) -> None:
        """Set gamma and v to one and beta to zero, and forget the running statistics."""
        super().reset_parameters()
        nn.init.ones_(self.v)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize and activate."""
        return self._run(input)


class EvoNormB0(EvoNorm):
    """EvoNorm with batch statistics, of (N, C, H, W).

        y = x / max(sqrt(var_batch + eps), v * x + sqrt(var_instance + eps)) * weight + bias

    Args:
        num_features: channels of the input.
        eps: added to the variances.
        momentum: weight of the new batch in the running variance; None averages over all batches.
        affine: gamma and beta (True), neither (False), or one of them ("scale", "shift").
        device: where the parameters live.
        dtype: the parameters' type.
    """

    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: Affine = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, affine, device, dtype)
        self._track(momentum, True, {"running_var": (num_features,)}, device, dtype)
        self.reset_parameters()

    def _compute(self, input: Tensor, *, residual: Tensor | None) -> Tensor:  # type: ignore[override]
        uses_batch = self._uses_batch()
        self._check(input, (0, 2, 3) if uses_batch else None)
        stored = None if uses_batch else self.running_var
        deviations = partial(_of_batch_and_instance, stored, self.eps)
        terms = gate.Terms("largest", self.num_features, True, self.weight, self.bias, self.v, deviations)
        y, instances = select.gated(input, terms)
        if uses_batch and self._writes():
            self._update_(running_var=unbiased_var(instances.pooled(0)))
        return y


def _of_batch_and_instance(stored: Tensor | None, eps: float, instances: Moments) -> tuple[Tensor, Tensor]:
    var = instances.pooled(0).var if stored is None else stored.to(instances.var.dtype)
    return (var + eps).sqrt(), (instances.var + eps).sqrt()


class EvoNormS0(EvoNorm):
    """EvoNorm with the statistics of groups of channels of one example, of (N, C, H, W).

        y = x * sigmoid(v * x) / sqrt(var_group + eps) * weight + bias

    Args:
        num_features: channels of the input.
        groups: of channels; must divide num_features.
        eps: added to the variances.
        affine: gamma and beta (True), neither (False), or one of them ("scale", "shift").
        device: where the parameters live.
        dtype: the parameters' type.
    """

    def __init__(
        self,
        num_features: int,
        groups: int = 32,
        *,
        eps: float = 1e-5,
        affine: Affine = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, affine, device, dtype)
        checks.groups(groups, num_features, type(self).__name__, "groups")
        self.groups = groups
        self.reset_parameters()

    def _compute(self, input: Tensor, *, residual: Tensor | None) -> Tensor:  # type: ignore[override]
        self._check(input, None)
        values = self.num_features // self.groups * input.shape[2] * input.shape[3]
        checks.more_than_one(values, input, self._who(), "group", "Use fewer groups.")
        deviations = partial(_of_groups, self.eps)
        terms = gate.Terms("sigmoid", self.groups, True, self.weight, self.bias, self.v, deviations)
        return select.gated(input, terms)[0]

    def extra_repr(self) -> str:
        """The common line, and the groups."""
        return super().extra_repr() + f", groups={self.groups}"


def _of_groups(eps: float, groups: Moments) -> tuple[Tensor]:
    return ((groups.var + eps).sqrt(),)
