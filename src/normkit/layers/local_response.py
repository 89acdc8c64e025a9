"""Local response normalization (Krizhevsky, Sutskever & Hinton 2012)."""

from __future__ import annotations

from torch import Tensor, nn

from normkit.errors import ArgumentError
from normkit.functional import within as functional
from normkit.layers.norm_layer import NormLayer


class LocalResponseNorm(NormLayer, nn.LocalResponseNorm):
    """Divide each value by a power of the mean square of its neighbours in the channels, at the same position.

        x / (k + alpha * mean(x^2 over `size` channels)) ** beta

    Args:
        size: channels in the neighbourhood, the value's own in the middle; outside of the input they are zero.
        alpha: weight of the mean square.
        beta: the power.
        k: added, so that nothing is divided by zero.
    """

    _torch = nn.LocalResponseNorm

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> None:
        if size < 1:
            raise ArgumentError(f"LocalResponseNorm needs a size of 1 or more channels; got {size}. The paper's is 5.")
        super().__init__(size, alpha, beta, k)

    def forward(self, input: Tensor) -> Tensor:
        """Divide each value by what its neighbours in the channels amount to."""
        return self._run(input)

    def _compute(self, input: Tensor, *, residual: Tensor | None) -> Tensor:  # type: ignore[override]
        return functional.local_response_norm(input, self.size, self.alpha, self.beta, self.k)
