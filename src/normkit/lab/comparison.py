"""Two runs side by side: which verdicts agree, and what the runs differ in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from normkit.errors import ArgumentError
from normkit.lab.conclusion import sections_of, summary_of
from normkit.lab.record import read_run
from normkit.lab.report import Section
from normkit.lab.report.provenance import conditions_of, settings_of

Differences = dict[str, tuple[str, str]]  # by name, what the one has and what the other


class ComparedExperiment(NamedTuple):
    """What two runs found about the same claim."""

    name: str
    sections: tuple[Section, Section]
    settings: Differences

    @property
    def agrees(self) -> bool:
        """Whether the verdicts are the same."""
        one, other = self.sections
        return one.findings.outcome == other.findings.outcome


class Comparison(NamedTuple):
    """The experiments that two runs share, those that only one of them has, and what the runs differ in."""

    directories: tuple[Path, Path]
    conditions: Differences
    experiments: list[ComparedExperiment]
    only: tuple[list[str], list[str]]

    @property
    def agrees(self) -> bool:
        """Whether all verdicts on the same claims are the same."""
        return all(experiment.agrees for experiment in self.experiments)

    def summary(self) -> dict[str, Any]:
        """All of it in JSON's types."""
        return {
            "runs": [str(directory) for directory in self.directories],
            "agree": self.agrees,
            "conditions": self.conditions,
            "experiments": [
                {
                    "experiment": each.name,
                    "agree": each.agrees,
                    "settings": each.settings,
                    "found": [summary_of(section) for section in each.sections],
                }
                for each in self.experiments
            ],
            "only": self.only,
        }


def compare_runs(one: str | Path, other: str | Path) -> Comparison:
    """Compare two runs, finished or not, from their records."""
    directories = Path(one), Path(other)
    first, second = ({section.title: section for section in sections_of(each)} for each in directories)
    shared = [name for name in first if name in second]
    if not shared:
        raise ArgumentError(
            f"The runs have no experiment in common: {one} has {', '.join(first)}; {other} has {', '.join(second)}. "
            "Give two runs of the same experiments."
        )
    return Comparison(
        directories,
        _differences(*(conditions_of(read_run(each)) for each in directories)),
        [_compared(name, first[name], second[name]) for name in shared],
        ([name for name in first if name not in second], [name for name in second if name not in first]),
    )


def _compared(name: str, one: Section, other: Section) -> ComparedExperiment:
    return ComparedExperiment(name, (one, other), _differences(settings_of(one.run), settings_of(other.run)))


def _differences(one: Mapping[str, str], other: Mapping[str, str]) -> Differences:
    found = {name: (one.get(name, ""), other.get(name, "")) for name in {**one, **other}}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}
