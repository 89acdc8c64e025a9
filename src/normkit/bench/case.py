"""What a case of the benchmark is, how much effort is spent on it, and what comes out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from normkit.bench.spread import Spread, ratio

OURS = "ours"
EAGER = "eager"  # torch's own layer, or what one writes with torch's operators where a layer has an option less
PUBLISHED = "published"  # the plain-torch code of a norm's authors, or of a library that has it, where torch has none
OUR_BATCH_NORM = "our BatchNorm"
UNMASKED = "our unmasked call"


@dataclass(frozen=True)
class Effort:
    """How long to measure, and whether torch.compile takes part, which costs most of the time."""

    rounds: int
    model_rounds: int
    compiles: bool


FULL = Effort(rounds=25, model_rounds=9, compiles=True)
QUICK = Effort(rounds=9, model_rounds=3, compiles=False)


class Case(Protocol):
    """Something to measure, for every contestant."""

    @property
    def family(self) -> str:
        """The part of the benchmark it belongs to."""

    @property
    def name(self) -> str:
        """What it is called in its family."""

    @property
    def quick(self) -> bool:
        """Whether it is part of the quick benchmark."""

    def measure(self, effort: Effort) -> Result:
        """Measure it with the threads that torch has now."""


@dataclass(frozen=True)
class Result:
    """What was measured of one case with one number of threads, by contestant."""

    family: str
    name: str
    threads: int
    facts: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0
    seconds: dict[str, Spread] = field(default_factory=dict)  # of one step
    ratios: dict[str, Spread] = field(default_factory=dict)  # their seconds over ours
    multiples: dict[str, Spread] = field(default_factory=dict)  # seconds over the memory limit's
    bytes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # why a contestant could not run
    neighbours: float | None = None  # cores that other processes kept busy meanwhile, if the system reports it

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        """Return what `as_json` was made from."""
        spreads = {
            key: {name: Spread(**spread) for name, spread in data[key].items()}
            for key in ("seconds", "ratios", "multiples")
        }
        return cls(**data | spreads)


def over_ours(seconds: dict[str, list[float]]) -> dict[str, Spread]:
    """Return every other contestant's time over ours, if ours ran."""
    if OURS not in seconds:
        return {}
    return {name: ratio(theirs, seconds[OURS]) for name, theirs in seconds.items() if name != OURS}
