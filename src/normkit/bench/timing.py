"""Time several contestants side by side: in one run, round by round, in rotating order."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

Step = Callable[[], object]

SAMPLE_SECONDS = 5e-3  # a step that takes less is repeated until its sample is this long: a clock is not exact
LONG_SECONDS = 0.25  # a step that takes more goes through far more memory than the caches hold


def prepare(builders: Mapping[str, Callable[[], Step]]) -> tuple[dict[str, Step], dict[str, str]]:
    """Build and warm up every contestant; one that cannot run is left out, with its reason."""
    steps: dict[str, Step] = {}
    errors: dict[str, str] = {}
    for name, build in builders.items():
        try:
            step = build()
            step()  # allocates, and may compile
        except Exception as error:  # whatever it is, it is reported, and the others are still worth measuring
            errors[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        else:
            steps[name] = step
    return steps, errors


def interleave(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of one call of every step, for each round."""
    # The second call of each is warm as well; its time decides how many calls make a sample.
    first = {name: sample(step, 1) for name, step in steps.items()}
    repeats = {name: math.ceil(SAMPLE_SECONDS / once) for name, once in first.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with _no_garbage_collection():
        for turn in range(rounds):
            for name in rotated(list(steps), turn):
                if first[name] < LONG_SECONDS:
                    steps[name]()  # the caches hold what the contestant before left in them
                seconds[name].append(sample(steps[name], repeats[name]))
    return seconds


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the names in order, starting with another one each turn."""
    start = turn % len(names) if names else 0
    return [*names[start:], *names[:start]]


def sample(step: Step, repeats: int) -> float:
    """Return the seconds of one call, on average over `repeats`."""
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep Python from collecting garbage in one contestant's turn that another has left."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
