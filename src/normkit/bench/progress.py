"""A run on its way to a file: each case is written as soon as it is measured, so that a run can be taken up again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from normkit.atomic import replacing
from normkit.bench.case import Result
from normkit.bench.cases import all_cases, case_id
from normkit.bench.runner import Done, Plan, record
from normkit.environment import describe_environment
from normkit.errors import ArgumentError

_MACHINE = ("normkit", "python", "torch", "cpu", "cores", "kernels", "allocator")  # of the environment


@dataclass
class Progress:
    """What is measured so far of a plan, and the file that it goes to, if any."""

    plan: Plan
    out: Path | None = None
    results: list[Result] = field(default_factory=list, init=False)
    _plain: list[dict[str, Any]] = field(default_factory=list, init=False)  # the same results, as they are written

    @property
    def done(self) -> set[Done]:
        """What need not be measured again: not what a contestant could not run in."""
        return {(_id(result), result.threads) for result in self.results if not result.errors}

    def __len__(self) -> int:
        """The number of the plan's cases that are done."""
        done = self.done
        return sum((case_id(case), threads) in done for case in self.plan.cases for threads in self.plan.threads)

    def add(self, result: Result) -> None:
        """Take in a result, in place of an earlier one of the same case, and write everything but the summary down."""
        this = _id(result), result.threads
        kept = [i for i, other in enumerate(self.results) if (_id(other), other.threads) != this]
        self.results = [*(self.results[i] for i in kept), result]
        self._plain = [*(self._plain[i] for i in kept), result.as_json()]
        if self.out is not None and not _is_special(self.out):
            # The next case is being measured already: what can wait for the end is not worked out now.
            self._replace(self.out, json.dumps(self._empty | {"cases": self._plain}))

    def ordered(self) -> list[Result]:
        """The results by number of threads, and in the benchmark's order."""
        order = {case_id(case): place for place, case in enumerate(all_cases())}
        return sorted(self.results, key=lambda r: (r.threads, order.get(_id(r), len(order))))

    def document(self, *, complete: bool) -> dict[str, Any]:
        """Everything about the run, as plain data."""
        return record(self.plan, self.ordered(), complete=complete)

    def write(self, *, complete: bool) -> None:
        """Put the document into the file, whole: whoever is interrupted while writing leaves the one before."""
        if self.out is not None:
            document = json.dumps(self.document(complete=complete), indent=2)
            if _is_special(self.out):
                self.out.write_text(document + "\n")
            else:
                self._replace(self.out, document)

    @staticmethod
    def _replace(path: Path, document: str) -> None:
        with replacing(path) as part:
            part.write_text(document + "\n")

    @cached_property
    def _empty(self) -> dict[str, Any]:
        return record(self.plan, [], complete=False)

    def resume(self) -> None:
        """Take over what the file has, if it was measured in the same way on the same machine."""
        if self.out is None:
            raise ArgumentError("--resume needs the file of the run to go on with; got none. Name it: --out FILE.")
        if not self.out.exists() or self.out.stat().st_size == 0:
            return
        try:
            earlier = json.loads(self.out.read_text())
            results = [Result.from_json(case) for case in earlier["cases"]]
            differences = list(self._differences(earlier))
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"--resume needs a file that `normkit bench --out` wrote; got {str(self.out)!r}: {error!r}. "
                "Name another."
            ) from error
        if differences:
            raise ArgumentError(
                f"--resume needs a run with the same settings on the same machine; {str(self.out)!r} differs in "
                f"{', '.join(differences)}. Name another file, or measure as it was measured."
            )
        self.results, self._plain = results, earlier["cases"]

    def _differences(self, earlier: dict[str, Any]) -> Iterator[str]:
        now = json.loads(json.dumps([self.plan.settings(), describe_environment(self.plan.environ())]))
        for name, value in now[0].items():
            if earlier["settings"][name] != value:
                yield f"{name} ({earlier['settings'][name]}, not {value})"
        for name in _MACHINE:
            if earlier["environment"][name] != now[1][name]:
                yield f"{name} ({earlier['environment'][name]}, not {now[1][name]})"


def _is_special(path: Path) -> bool:
    """Whether it is a device or a pipe, which can be written to, but must not be replaced by a file."""
    return path.exists() and not path.is_file()


def _id(result: Result) -> str:
    return f"{result.family}/{result.name}"
