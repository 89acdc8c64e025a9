"""Means and deviations of what goes through a layer, and how far they move between recorded steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from normkit.instruments.probe import ForwardProbe, Numbers, by_channel, first_tensor, has_weight, is_norm, rms


class ActivationMoments(ForwardProbe):
    """A layer's output: "mean" and "std" over all values, and the drift of its channels since the last recorded step.

    "mean_drift" is the root mean square over channels of the change of a channel's mean, in its standard deviations at
    the earlier step; "std_drift" that of the logarithm of the ratio of the standard deviations. Both are None at the
    first recorded step.

    Args:
        layers: names or patterns; without it, every norm, linear layer and convolution.
    """

    def __init__(self, layers: str | Sequence[str] | None = None) -> None:
        super().__init__(layers)
        self._before: dict[str, tuple[Tensor, Tensor]] = {}

    def chooses(self, layer: nn.Module) -> bool:
        """Norms, and layers with weights."""
        return is_norm(layer) or has_weight(layer)

    def measure(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Numbers:
        """Moments of all values, and what became of those of each channel."""
        values = by_channel(layer, first_tensor(output)).double()
        mean, std = values.mean(1), values.std(1, correction=0)
        found: Numbers = {"mean": values.mean().item(), "std": values.std(correction=0).item()}
        found |= {"mean_drift": None, "std_drift": None}
        if name in self._before and self._before[name][0].shape == mean.shape:
            old_mean, old_std = self._before[name]
            is_alive = (old_std > 0) & (std > 0)  # of a constant channel there is no deviation to measure in
            found["mean_drift"] = rms(((mean - old_mean) / old_std)[is_alive])
            found["std_drift"] = rms((std / old_std)[is_alive].log())
        self._before[name] = mean, std
        return found

    def state(self) -> dict[str, Any]:
        """The last moments of each layer's channels."""
        return dict(self._before)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._before = {name: (mean, std) for name, (mean, std) in state.items()}
