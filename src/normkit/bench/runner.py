"""Start the processes that measure, and gather what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import IO, Any, Literal

from normkit.bench.case import Case, Effort, Result
from normkit.bench.cases import case_id
from normkit.bench.summary import summarize
from normkit.environment import describe_environment
from normkit.errors import NormkitError

Allocator = Literal["keep", "default"]

# malloc gives large blocks back to the system at once, and the next tensor's pages are mapped and zeroed anew: for some
# megabytes that takes longer than the loops, ours or torch's. In training the heap soon stays; so it does here.
ALLOCATORS: dict[Allocator, dict[str, str]] = {
    "keep": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)},
    "default": {},
}


class BenchmarkError(NormkitError, RuntimeError):
    """A measuring process that ended before it was done."""


@dataclass(frozen=True)
class Plan:
    """What to measure, and how: every case with every number of threads."""

    cases: Sequence[Case]
    threads: Sequence[int]
    effort: Effort
    allocator: Allocator = "keep"

    def __len__(self) -> int:
        return len(self.cases) * len(self.threads)

    def environ(self) -> dict[str, str]:
        """The environment of the measuring processes."""
        # A compiler that waits in processes of its own would disturb the turns of all contestants.
        return {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", **ALLOCATORS[self.allocator]}


def run(plan: Plan) -> Iterator[Result]:
    """Measure in a fresh process for each number of threads; results come as they are found."""
    for threads in plan.threads:
        yield from _run_process(plan, threads)


def _run_process(plan: Plan, threads: int) -> Iterator[Result]:
    names = [case_id(case) for case in plan.cases]
    job = json.dumps({"threads": threads, "cases": names, "effort": asdict(plan.effort)})
    # -P: a file of the user's that is called as a module of ours must not be taken for it.
    command = [sys.executable, "-P", "-m", "normkit.bench.worker", job]
    with (
        tempfile.TemporaryFile("w+") as talk,
        # In a session of its own, Ctrl-C reaches the parent alone, which then ends the child without a traceback.
        subprocess.Popen(
            command, env=plan.environ(), stdout=subprocess.PIPE, stderr=talk, text=True, start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        done = 0
        try:
            for done, line in enumerate(process.stdout, start=1):  # noqa: B007 - counted for the message below
                yield Result.from_json(json.loads(line))
        except BaseException:
            process.kill()
            raise
        if process.wait() != 0 or done < len(names):
            raise BenchmarkError(_why_it_ended(process.returncode, names, done, threads, talk))


def _why_it_ended(code: int, names: list[str], done: int, threads: int, talk: IO[str]) -> str:
    talk.seek(0)
    last = [line for line in talk.read().splitlines() if line.strip()][-1:]
    at = f"in {names[done]!r}" if done < len(names) else "after the last case"
    return (
        f"The process that measures with {threads} threads should have gone through {len(names)} cases; it ended {at}, "
        f"with code {code}{''.join(f': {line}' for line in last)}. Try that case with --only."
    )


def record(plan: Plan, results: Sequence[Result], *, complete: bool) -> dict[str, Any]:
    """Return everything about a run as plain data: where, with what, each case, and what they add up to."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": describe_environment(plan.environ()),
        "settings": {
            "threads": list(plan.threads),
            "allocator": {"name": plan.allocator, "environment": ALLOCATORS[plan.allocator]},
            **asdict(plan.effort),
        },
        "complete": complete,
        "cases": [result.as_json() for result in results],
        "summary": [asdict(row) for row in summarize(results)],
    }
