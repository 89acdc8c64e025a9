"""A model's health as an assertion: in a function, and as a fixture in a run of pytest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.doctor.pytest_plugin import assert_healthy
from support.loops import batches, net, sgd, train

SOURCES = str(Path(nk.__file__).parents[1])


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = net()
    train(model, sgd(model), data := batches(60, size=32))
    return model.eval(), data[-4:]


def test_a_healthy_model_passes(trained):
    model, data = trained
    assert assert_healthy(model, data, select="NK101,NK103,NK104").ok


def test_a_sick_one_fails_with_all_that_is_wrong(trained):
    model, data = trained
    sick = nn.Sequential(*model, nn.Identity()).eval()
    before = sick[1].momentum
    sick[1].momentum = sick[4].momentum = 0.99
    with pytest.raises(AssertionError) as error:
        assert_healthy(sick, data, select="NK104")
    assert "Sequential is not healthy:\n  warning: NK104 inverted-momentum: 1: " in str(error.value)
    assert "\n  warning: NK104 inverted-momentum: 4: " in str(error.value)
    assert assert_healthy(sick, data, select="NK104", ignore="NK104").findings == []
    sick[1].momentum = sick[4].momentum = before


def run(*command, **options):
    environment = os.environ | {"PYTHONPATH": SOURCES}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, **options)


def test_the_plugin_imports_nothing_heavy():
    code = "import sys, pytest_normkit; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    names = run("-c", code, check=True).stdout.split()
    assert "pytest_normkit" in names
    assert {"torch", "normkit", "numpy"}.isdisjoint(names)


TESTS = """
import torch
from torch import nn

def test_it(assert_healthy):
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4, momentum={momentum}))
    assert_healthy(model, [torch.randn(16, 3) for _ in range(3)], select="NK104")
"""


@pytest.mark.deep
def test_the_fixture_is_there_in_a_run_of_pytest(tmp_path):
    for name, momentum in (("good", 0.1), ("bad", 0.99)):
        (tmp_path / f"test_{name}.py").write_text(TESTS.format(momentum=momentum))
    done = run("-m", "pytest", "-p", "no:randomly", "-q", str(tmp_path), cwd=tmp_path)
    assert "1 failed, 1 passed" in done.stdout
    assert "AssertionError: Sequential is not healthy:" in done.stdout
    assert "warning: NK104 inverted-momentum: 1: " in done.stdout
    assert "doctor/pytest_plugin.py" not in done.stdout  # the test's own line is shown
