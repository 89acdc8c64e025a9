"""Time several contestants side by side: in one run, round by round, in an order drawn anew for each."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

Step = Callable[[], object]

SAMPLE_SECONDS = 10e-3  # a step that takes less is repeated until its sample is this long: a clock is not exact
WARM_SECONDS = 5e-3  # a turn begins with untimed calls that take this long: the first few are slower than all others
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
    once = {name: sample(step, 1) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with _no_garbage_collection():
        for turn in range(rounds):
            for name in shuffled(steps, turn):
                if once[name] < LONG_SECONDS:
                    # The caches hold what the contestant before left in them, and malloc its blocks.
                    sample(steps[name], math.ceil(WARM_SECONDS / once[name]))
                seconds[name].append(sample(steps[name], math.ceil(SAMPLE_SECONDS / once[name])))
    return seconds


def shuffled(names: Iterable[str], turn: int) -> list[str]:
    """Return the names in another order each turn, the same in every run: none always comes after the same other."""
    order = list(names)
    random.Random(turn).shuffle(order)
    return order


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
