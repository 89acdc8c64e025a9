"""Quantiles of what goes through a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit.errors import ArgumentError
from normkit.instruments.probe import ForwardProbe, Numbers, by_channel, first_tensor, has_weight, is_norm

MOST_VALUES = 65_536  # that a quantile is taken of: evenly spaced ones, where there are more


class ActivationQuantiles(ForwardProbe):
    """Quantiles of a layer's output (Ioffe & Szegedy 2015, figure 1 b and c), as "q15", "q50", "q85".

    Args:
        quantiles: which.
        layers: names or patterns; without it, every norm, linear layer and convolution.
        of: the layer's "output" or its "input".
        unit: one channel, as in the paper's figure; without it, the values of all.
    """

    def __init__(
        self,
        quantiles: Sequence[float] = (0.15, 0.5, 0.85),
        layers: str | Sequence[str] | None = None,
        *,
        of: Literal["output", "input"] = "output",
        unit: int | None = None,
    ) -> None:
        super().__init__(layers)
        if not quantiles or not all(0 <= q <= 1 for q in quantiles):
            raise ArgumentError(f"quantiles must lie between 0 and 1; got {tuple(quantiles)}.")
        if of not in ("output", "input"):
            raise ArgumentError(f'of must be "output" or "input"; got {of!r}.')
        self._keys = {f"q{100 * q:g}": q for q in quantiles}
        self._of, self._unit = of, unit

    def chooses(self, layer: nn.Module) -> bool:
        """Norms, and layers with weights."""
        return is_norm(layer) or has_weight(layer)

    def measure(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Numbers:
        """The quantiles of all values, or of one unit's."""
        values = by_channel(layer, first_tensor(output if self._of == "output" else args))
        if self._unit is not None:
            if self._unit >= len(values):
                raise ArgumentError(f"unit {self._unit} of {name}: it has {len(values)} channels, from 0 on.")
            values = values[self._unit]
        found = torch.quantile(thinned(values), values.new_tensor(list(self._keys.values())))
        return dict(zip(self._keys, found.tolist(), strict=True))


def thinned(values: Tensor) -> Tensor:
    """At most so many of the values, evenly spaced: the same ones for the same shape."""
    flat = values.flatten()
    step = -(-flat.numel() // MOST_VALUES)
    return flat[::step]
