"""Start the processes that measure, and gather what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import IO, Any, Literal

from normkit.bench.case import Case, Effort, Result
from normkit.bench.cases import case_id
from normkit.bench.summary import summarize
from normkit.environment import describe_environment
from normkit.errors import NormkitError
from normkit.kernels import core

Allocator = Literal["keep", "default"]
InstructionSet = Literal["avx512", "avx2", "baseline"]
Done = tuple[str, int]  # a case's id, and the number of threads

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
    isa: InstructionSet | None = None  # of our loops; None is the machine's best

    def __len__(self) -> int:
        return len(self.cases) * len(self.threads)

    def environ(self) -> dict[str, str]:
        """The environment of the measuring processes."""
        # A compiler that waits in processes of its own would disturb the turns of all contestants.
        isa = {} if self.isa is None else {core.INSTRUCTION_SET: self.isa}
        return {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", **ALLOCATORS[self.allocator], **isa}

    def settings(self) -> dict[str, Any]:
        """What a measurement depends on, beside the machine and the number of threads."""
        allocator = {"name": self.allocator, "environment": ALLOCATORS[self.allocator]}
        return {"allocator": allocator, "isa": self.isa, **asdict(self.effort)}


@contextmanager
def using_instruction_set(name: InstructionSet | None) -> Iterator[None]:
    """Use these loops in this process too: what the machine lacks is refused at once, and the record is right."""
    if name is None:
        yield
        return
    before = None if core.WHY_NOT else core.instruction_set()
    core.use_instruction_set(name)  # without loops it raises
    try:
        yield
    finally:
        if before is not None:
            core.use_instruction_set(before)


def run(plan: Plan, done: Collection[Done] = ()) -> Iterator[Result]:
    """Measure what is not done yet, in a fresh process for each number of threads; results come as they are found."""
    for threads in plan.threads:
        names = [name for case in plan.cases if (name := case_id(case), threads) not in done]
        if names:
            yield from _run_process(plan, names, threads)


def _run_process(plan: Plan, names: list[str], threads: int) -> Iterator[Result]:
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
        "settings": {"threads": list(plan.threads), **plan.settings()},
        "complete": complete,
        "cases": [result.as_json() for result in results],
        "summary": [asdict(row) for row in summarize(results)],
    }
