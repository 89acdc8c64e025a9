"""How large gradients are, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from normkit.instruments.loss import length
from normkit.instruments.probe import Probe, Reading, Watched


class GradientNorms(Probe):
    """The norm of the gradient of each layer's own parameters, as the optimizer is about to use it.

    "gradient" and "weight" are norms, "ratio" is the first over the second. A layer without a gradient is left out.

    Args:
        layers: names or patterns; without it, every layer that has parameters of its own.
    """

    def chooses(self, layer: nn.Module) -> bool:
        """Layers with parameters of their own."""
        return any(parameter is not None for parameter in layer._parameters.values())

    def before_update(self, watched: Watched) -> Iterator[Reading]:
        """Read the gradients."""
        for name, layer in self.layers:
            own = [p for p in layer.parameters(recurse=False) if p.grad is not None]
            if own:
                gradient, weight = (
                    length([p.grad for p in own if p.grad is not None]),
                    length([p.detach() for p in own]),
                )
                yield name, {"gradient": gradient, "weight": weight, "ratio": gradient / weight if weight else None}
