"""Figure 5 of Ioffe & Szegedy 2015, and which of its modules a net of another depth takes."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Literal, NamedTuple

from normkit.errors import ArgumentError


class Row(NamedTuple):
    """One module: the channels of its branches; "reduce" are those of the 1x1 convolution before a 3x3."""

    one: int
    three_reduce: int
    three: int
    double_reduce: int
    double: int
    project: int  # 0 in the modules with a stride, which pass the pooled input on
    pool: Literal["avg", "max"] = "avg"

    @property
    def stride(self) -> int:
        """Modules without a projection halve the size."""
        return 1 if self.project else 2

    def outputs(self, inputs: int) -> int:
        """The channels of all branches together."""
        return self.one + self.three + self.double + (self.project or inputs)

    def scaled(self, factor: float) -> Row:
        """The module `factor` times as wide; no branch disappears."""
        sizes = {name: n and max(1, round(n * factor)) for name, n in self._asdict().items() if name != "pool"}
        return self._replace(**sizes)


# 4c and 4d are printed with projections of 128, which make 608 channels instead of the printed 576; 96 makes 576.
FIGURE_5 = {
    "3a": Row(64, 64, 64, 64, 96, 32),
    "3b": Row(64, 64, 96, 64, 96, 64),
    "3c": Row(0, 128, 160, 64, 96, 0, "max"),
    "4a": Row(224, 64, 96, 96, 128, 128),
    "4b": Row(192, 96, 128, 96, 128, 128),
    "4c": Row(160, 128, 160, 128, 160, 96),
    "4d": Row(96, 128, 192, 160, 192, 96),
    "4e": Row(0, 128, 192, 192, 256, 0, "max"),
    "5a": Row(352, 192, 320, 160, 224, 128),
    "5b": Row(352, 192, 320, 192, 224, 128, "max"),
}
STAGES = (("3a", "3b"), ("4a", "4b", "4c", "4d"), ("5a", "5b"))
REDUCTIONS = ("3c", "4e")


def rows(modules: int, width: int) -> dict[str, Row]:
    """The rows of a net of `modules` modules, two of which halve the size, with `width` in place of figure 5's 64.

    The others are shared out as 1 : 2 : 1 over the three stages, and repeat the stage's rows where it needs more.
    10 modules are those of figure 5, one for one.
    """
    if modules < len(REDUCTIONS) or width < 2:
        raise ArgumentError(f"An Inception net needs 2 modules and a width of 2 or more; got {modules} and {width}.")
    ordinary = modules - len(REDUCTIONS)
    outer = ordinary // 4
    found: dict[str, Row] = {}
    for stage, count in enumerate((outer, ordinary - 2 * outer, outer)):
        names = [*_repeated(STAGES[stage], count), *REDUCTIONS[stage : stage + 1]]
        found |= {f"{stage + 3}{_letter(i)}": FIGURE_5[name].scaled(width / 64) for i, name in enumerate(names)}
    return found


def _repeated(names: Sequence[str], count: int) -> list[str]:
    return [names[i % len(names)] for i in range(count)]


def _letter(index: int) -> str:
    """a, b, ... z, then aa, ab, ..."""
    head, tail = divmod(index, len(ascii_lowercase))
    return (_letter(head - 1) if head else "") + ascii_lowercase[tail]
