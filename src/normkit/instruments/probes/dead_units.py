"""Units that say nothing: zero for a whole batch, or stuck at a bound."""

from __future__ import annotations

from typing import Any

from torch import nn

from normkit.instruments.probe import ForwardProbe, Numbers, by_channel, first_tensor
from normkit.spec import describe

# The bounds of activations, from below and above.
BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "relu": (0.0, None),
    "relu6": (0.0, 6.0),
    "sigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
}
_MODULES: dict[type[nn.Module], tuple[float | None, float | None]] = {
    nn.ReLU: (0.0, None),
    nn.ReLU6: (0.0, 6.0),
    nn.Sigmoid: (0.0, 1.0),
    nn.Hardsigmoid: (0.0, 1.0),
    nn.Tanh: (-1.0, 1.0),
    nn.Hardtanh: (-1.0, 1.0),
}
NEAR = 0.01  # of the distance between two bounds: what lies so near to one is saturated


class DeadUnits(ForwardProbe):
    """Of activations with bounds, the shares of "dead" units, of "zero" values and of "saturated" values.

    A unit, a channel of the output, is dead where all of its values in a batch are at the lower bound, if that is
    zero, or all are saturated. A value is saturated where it lies within a hundredth of the range from a bound, of
    activations that have two; None elsewhere.

    Args:
        layers: names or patterns; without it, modules such as nn.ReLU, nn.Sigmoid and nn.Tanh, and norms that apply
            such a function themselves (`activation="relu"`). What a forward calls as a function is not seen.
    """

    def chooses(self, layer: nn.Module) -> bool:
        """Activations with bounds."""
        return bounds_of(layer) is not None

    def measure(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Numbers:
        """Shares of units and values."""
        low, high = bounds_of(layer) or (0.0, None)
        values = by_channel(layer, first_tensor(output))
        zero, stuck = values.eq(0), values.eq(0.0 if low is None else low)
        saturated = None
        if low is not None and high is not None:
            near = NEAR * (high - low)
            stuck = (values <= low + near) | (values >= high - near)
            saturated = stuck.double().mean().item()
        return {
            "dead": stuck.all(1).double().mean().item(),
            "zero": zero.double().mean().item(),
            "saturated": saturated,
        }


def bounds_of(layer: nn.Module) -> tuple[float | None, float | None] | None:
    """The bounds of a layer's output, if it is an activation with bounds or a norm that applies one."""
    if isinstance(layer, nn.Hardtanh) and not isinstance(layer, nn.ReLU6):
        return float(layer.min_val), float(layer.max_val)
    for kind, bounds in _MODULES.items():
        if isinstance(layer, kind):
            return bounds
    spec = describe(layer)
    return None if spec is None or spec.activation is None else BOUNDS.get(spec.activation)
