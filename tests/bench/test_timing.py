import gc
import math

import pytest

from normkit.bench import timing


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when a step moves it."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: Clock.now)
    return Clock


def test_the_order_is_drawn_anew_each_turn():
    orders = [timing.shuffled("abc", turn) for turn in range(60)]
    assert {"".join(order) for order in orders} == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert orders == [timing.shuffled("abc", turn) for turn in range(60)]
    assert timing.shuffled([], 3) == []


def test_contestants_are_interleaved_and_each_gets_its_own_times(clock):
    calls = []

    def step(name, seconds):
        calls.append(name)
        clock.now += seconds

    steps = {"a": lambda: step("a", 0.125), "b": lambda: step("b", 0.0625)}
    assert timing.interleave(steps, rounds=3) == {"a": [0.125] * 3, "b": [0.0625] * 3}
    # Each turn is a call that is not timed and one that is.
    turns = ["".join(2 * name for name in timing.shuffled("ab", turn)) for turn in range(3)]
    assert "".join(calls) == "ab" + "".join(turns)


def test_a_long_step_needs_no_call_to_warm_the_caches(clock):
    calls = []

    def step(name, seconds):
        calls.append(name)
        clock.now += seconds

    steps = {"long": lambda: step("l", 2 * timing.LONG_SECONDS), "short": lambda: step("s", timing.LONG_SECONDS / 2)}
    seconds = timing.interleave(steps, rounds=2)
    assert seconds == {"long": [2 * timing.LONG_SECONDS] * 2, "short": [timing.LONG_SECONDS / 2] * 2}
    turns = ["".join({"long": "l", "short": "ss"}[name] for name in timing.shuffled(steps, turn)) for turn in range(2)]
    assert "".join(calls) == "ls" + "".join(turns)


def test_a_short_step_is_repeated_until_a_clock_can_tell(clock):
    calls = []

    def step():
        calls.append(None)
        clock.now += timing.SAMPLE_SECONDS / 10

    seconds = timing.interleave({"short": step}, rounds=2)["short"]
    assert seconds == pytest.approx([timing.SAMPLE_SECONDS / 10] * 2)
    # Ten or, by rounding, eleven a round, as many before them as warm the caches, and one that tells how long it takes.
    warm = math.ceil(10 * timing.WARM_SECONDS / timing.SAMPLE_SECONDS)
    assert 1 + 2 * (10 + warm) <= len(calls) <= 1 + 2 * (11 + warm + 1)


def test_garbage_is_collected_before_and_after_only():
    seen = []
    timing.interleave({"a": lambda: seen.append(gc.isenabled())}, rounds=2)
    assert not any(seen[1:])
    assert gc.isenabled()


def test_who_cannot_run_is_left_out_with_the_reason():
    def build():
        raise TypeError("no such thing\nand a long story")

    steps, errors = timing.prepare({"fine": lambda: list, "broken": build})
    assert steps == {"fine": list}
    assert errors == {"broken": "TypeError: no such thing"}
