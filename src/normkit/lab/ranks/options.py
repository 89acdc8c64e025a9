"""How a step is taken."""

from __future__ import annotations

from typing import Literal, NamedTuple

from normkit.errors import ArgumentError, did_you_mean

Precision = Literal["float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")


class StepOptions(NamedTuple):
    """What changes memory and time, and the numbers with them."""

    micro_batches: int = 1  # that a rank's part of a batch is taken in; their gradients are added
    precision: str = "float32"  # of forward passes; bfloat16 by torch's autocast

    def check(self) -> None:
        """Refuse what is neither."""
        if self.micro_batches < 1:
            raise ArgumentError(f"--micro-batches needs 1 or more; got {self.micro_batches}.")
        if self.precision not in PRECISIONS:
            raise ArgumentError(
                f"--precision must be one of {', '.join(PRECISIONS)}; got {self.precision!r}."
                f"{did_you_mean(self.precision, PRECISIONS)}"
            )
