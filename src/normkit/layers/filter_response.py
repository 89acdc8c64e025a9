"""Filter response normalization and the thresholded linear unit (Singh & Krishnan 2020)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normkit import checks
from normkit.kernels import gate, select
from normkit.kernels.reference import Recipe
from normkit.layers.norm_layer import NormLayer
from normkit.moments import Moments


class FilterResponseNorm2d(NormLayer):
    """Divide each channel of each example by its root mean square, and cut it off at a learned threshold.

        max(weight * x / sqrt(mean(x^2) + |eps|) + bias, tau)

    Args:
        num_features: channels of the input, C of (N, C, H, W).
        eps: added to the mean square over the positions.
        learnable_eps: learn one eps per channel, beginning with this one; for maps of 1 x 1, where eps decides.
        threshold: False leaves out tau: only the normalization.
        device: where the parameters live.
        dtype: the parameters' type.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    tau: nn.Parameter | None
    eps: float | nn.Parameter

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-6,
        *,
        learnable_eps: bool = False,
        threshold: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        checks.options(eps, None, None)
        super().__init__()
        self.num_features, self._initial_eps = num_features, eps
        for name in ["weight", "bias", *(["tau"] if threshold else []), *(["eps"] if learnable_eps else [])]:
            self.register_parameter(name, nn.Parameter(torch.empty(num_features, device=device, dtype=dtype)))
        if not threshold:
            self.register_parameter("tau", None)
        if not learnable_eps:
            self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set gamma to one, beta and tau to zero, and a learned eps to its first value."""
        first = {"weight": 1.0, "bias": 0.0, "tau": 0.0, "eps": self._initial_eps}
        for name, p in self.named_parameters():
            nn.init.constant_(p, first[name])

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel of each example, and cut it off below."""
        return self._run(input)

    def _compute(self, input: Tensor, *, residual: Tensor | None) -> Tensor:  # type: ignore[override]
        checks.batch_input(input, f"{type(self).__name__}({self.num_features})", (self.num_features,), (4,))
        learned, eps = ((self.eps,), 0.0) if isinstance(self.eps, Tensor) else ((), self.eps)
        recipe = Recipe((2, 3), eps, None, False, (1, self.num_features, 1, 1))
        if self.tau is None and not learned:
            return select.normalized(input, recipe, weight=self.weight, bias=self.bias)
        deviations = partial(_root_mean_square, eps)
        terms = gate.Terms("cut off", self.num_features, False, self.weight, self.bias, self.tau, deviations, learned)
        return select.gated(input, terms)[0]

    def extra_repr(self) -> str:
        """Channels, the first eps, and what is left out or learned."""
        return (
            f"{self.num_features}, eps={self._initial_eps}, learnable_eps={isinstance(self.eps, Tensor)}, "
            f"threshold={self.tau is not None}"
        )


def _root_mean_square(eps: float, instances: Moments, *learned: Tensor) -> tuple[Tensor]:
    square = instances.var
    for e in learned:
        square = square + e.to(square.dtype).abs()
    return ((square + eps).sqrt(),)
