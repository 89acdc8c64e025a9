"""The layout of saved weights is for ever: as in tests/golden, and as torch's where torch has the layer."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.cases import CASES, TWINS

GOLDEN = Path(__file__).parents[1] / "golden" / "state_dict.json"


def layout(layer):
    return {name: [str(t.dtype)[6:], list(t.shape)] for name, t in layer.state_dict().items()}


def test_layout_is_that_of_the_golden_file():
    assert {str(case): layout(case.build()) for case in CASES} == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("case", TWINS, ids=str)
def test_state_goes_both_ways_between_torch_and_us(case):
    ours, theirs = case.layer(), case.twin()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    back = case.build()
    back.load_state_dict(theirs.state_dict(), strict=True)
    for name, t in ours.state_dict().items():
        assert torch.equal(back.state_dict()[name], t)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_travel_without_a_pickle(case, tmp_path):
    layer, other = case.layer(), case.layer()
    save_file(layer.state_dict(), tmp_path / "weights.safetensors")
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    torch.save(layer.state_dict(), tmp_path / "weights.pt")
    safely = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name, t in layer.state_dict().items():
        assert torch.equal(other.state_dict()[name], t)
        assert torch.equal(safely[name], t)


@pytest.mark.parametrize("case", [case for case in CASES if case.build().state_dict()], ids=str)
def test_reset_parameters_gives_a_new_layers_state(case):
    layer = case.layer()
    torch.manual_seed(0)  # some draw their weights
    new = case.build()
    torch.manual_seed(0)
    layer.reset_parameters()
    for name, t in new.state_dict().items():
        assert torch.equal(layer.state_dict()[name], t), name
