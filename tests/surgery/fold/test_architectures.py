"""Folding networks of other libraries: parity in float32 and float64, and every norm that can be is folded."""

import importlib
import importlib.util

import pytest
import torch

from normkit.surgery.fold import fold
from support.architectures import ARCHITECTURES, OF_OTHER_NORMS, wide

QUICK = [architecture for architecture in ARCHITECTURES if architecture.quick]

# Norms that are not folded: their input is a sum that other layers read too, and a ReLU follows.
LEFT = {"preresnet20_cifar10": 10}


@pytest.mark.filterwarnings("ignore")  # of these libraries
@pytest.mark.parametrize("architecture", QUICK, ids=lambda architecture: architecture.name)
def test_folded_networks_compute_the_same(architecture):
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


def test_every_network_is_in_its_package_under_a_name_of_its_own():
    """Also those that only the benchmark builds, and whose absence it would report after hours."""
    every = [*ARCHITECTURES, *OF_OTHER_NORMS]
    names = [architecture.name for architecture in every]
    assert sorted(set(names)) == sorted(names)
    installed = [a for a in every if importlib.util.find_spec(a.package) is not None]
    if not installed:
        pytest.skip("none of the packages is installed")
    assert [a.name for a in installed if not hasattr(importlib.import_module(a.home), a.name)] == []
