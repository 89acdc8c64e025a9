"""What every verb returns: the model, what was changed in it and what was not, the parity, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from normkit.named_layers import display_name


class Change(NamedTuple):
    """A layer, what was done to it or would have been, and why."""

    layer: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{display_name(self.layer)}: {self.what} ({self.why})"


class _Differences(NamedTuple):
    max_abs: float
    max_rel: float
    first_layer: str | None


class Parity(_Differences):
    """How far the outputs on the example are from what they were, in evaluation: (max_abs, max_rel, first_layer).

    Attributes:
        max_abs: the largest difference of two values; infinite where shapes or NaN differ.
        max_rel: the largest difference over the largest magnitude of the output it belongs to.
        first_layer: the first layer, in the order they run, whose output moved by more than rounding explains; None
            if there is no such layer.
        tolerance: how far they may be, relative to the largest, by the coarsest type among outputs and parameters.
    """

    tolerance: float

    def __new__(cls, max_abs: float, max_rel: float, first_layer: str | None, tolerance: float = 1e-4) -> Parity:
        """Make one; the tolerance, by default that of float32, is an attribute and no element of the tuple."""
        made = super().__new__(cls, max_abs, max_rel, first_layer)
        made.tolerance = tolerance
        return made

    @property
    def error(self) -> float:
        """What is compared with the tolerance: `max_rel`."""
        return self.max_rel

    @property
    def ok(self) -> bool:
        """Whether the outputs are as near as their type allows."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        where = "" if self.first_layer is None else f", first at {display_name(self.first_layer)}"
        return f"{self.max_abs:.2g} ({self.max_rel:.2g} relative{where})"


@dataclass(frozen=True)
class Surgery:
    """The result of a verb."""

    model: nn.Module
    changed: Sequence[Change]
    skipped: Sequence[Change]
    parity: Parity | None
    _undo: Callable[[], nn.Module] = field(repr=False)

    def undo(self) -> nn.Module:
        """Give back the model as it was before, bit for bit.

        After surgery on a copy that is the model it was copied from. After surgery in place it is the same model with
        its layers, values, modes, hooks and requires_grad restored.
        """
        return self._undo()

    def __str__(self) -> str:
        lines = [f"changed {len(self.changed)}, skipped {len(self.skipped)}"]
        lines += [f"  {change}" for change in self.changed]
        lines += [f"  skipped {change}" for change in self.skipped]
        if self.parity is not None:
            lines.append(f"outputs moved by {self.parity}")
        return "\n".join(lines)
