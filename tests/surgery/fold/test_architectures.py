"""Folding networks that others wrote: parity in float32 and float64, and every norm that can be is folded."""

import importlib

import pytest
import torch

from normkit.surgery.fold import fold
from support.architectures import ARCHITECTURES, wide

QUICK = [architecture for architecture in ARCHITECTURES if architecture.quick]

# Of those that are not folded: their input is a sum that somebody else reads too, and a ReLU follows.
LEFT = {"preresnet20_cifar10": 10}


@pytest.mark.filterwarnings("ignore")  # of theirs
@pytest.mark.parametrize("architecture", QUICK, ids=lambda architecture: architecture.name)
def test_parity(architecture):
    pytest.importorskip(architecture.package)
    model, example = architecture.trained(), architecture.example(seed=9)
    result = fold(model, example)
    assert result.changed
    assert len(result.skipped) == LEFT.get(architecture.name, 0), str(result)
    assert result.parity.max_rel <= 1e-4
    result64 = fold(model.double(), wide(example))
    assert result64.changed == result.changed
    assert result64.parity.max_rel <= 1e-10
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES if a.package == "pytorchcv"], ids=lambda architecture: architecture.name
)
def test_its_package_has_it(architecture):
    """Also those that only the benchmark builds."""
    pytest.importorskip(architecture.package)
    assert hasattr(importlib.import_module(architecture.home), architecture.name)


def test_there_are_enough_of_them():
    assert len({architecture.name for architecture in ARCHITECTURES}) >= 30
