"""The C++ core: its instruction set, the machine's best or the one that the environment names, and what it refuses."""

import os
import subprocess
import sys

import pytest
import torch

import normkit as nk
from normkit.kernels import core, native, plans
from normkit.kernels.reference import Recipe
from support import instruction_sets

needs_core = pytest.mark.skipif(core.WHY_NOT is not None, reason=str(core.WHY_NOT))


def started_with(name):
    code = "from normkit.kernels import select; print(select.status()['instruction set'])"
    environment = os.environ | {core.INSTRUCTION_SET: name}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@needs_core
def test_the_environment_names_the_instruction_set():
    assert started_with("baseline").stdout == "baseline\n"


@pytest.mark.deep
@needs_core
def test_an_instruction_set_that_does_not_exist_is_an_error_that_says_which_there_are():
    assert "must be avx512, avx2 or baseline" in started_with("sse9").stderr


@needs_core
@pytest.mark.parametrize("name", instruction_sets.NAMES)
def test_an_instruction_set_runs_or_is_refused(name):
    before = core.instruction_set()
    try:
        core.use_instruction_set(name)
    except nk.ArgumentError as error:
        assert f"does not run {name}" in str(error)  # noqa: PT017
    else:
        assert core.instruction_set() == name
    finally:
        core.use_instruction_set(before)


def test_without_a_core_there_is_no_instruction_set_to_choose(monkeypatch):
    monkeypatch.setattr(core, "WHY_NOT", "it was not built")
    with pytest.raises(nk.BackendError, match="it was not built"):
        core.use_instruction_set("baseline")


@needs_core
@pytest.mark.parametrize("spare", [-8, 8])
def test_memory_of_another_size_than_that_of_the_statistics_is_refused(spare):
    x = torch.randn(4, 3, 5)
    plan = plans.plan(x, Recipe((0, 2), 1e-5))
    assert plan.moments(bytearray(3 * 16)).mean.shape == (3,)
    with pytest.raises(ValueError, match="a double for each mean and each variance"):
        core.loops.moments(*plan.arguments(x, None, None, bytearray(3 * 16 + spare)), 0)
    y = torch.empty_like(x)
    memory, outcome = native.forward(x, None, None, None, y, plan)
    assert (len(memory), outcome) == (3 * 16, native.DONE)
    torch.testing.assert_close(plan.moments(memory).mean, x.double().mean((0, 2)))
