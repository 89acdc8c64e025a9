"""A copy is a twin with memory of its own: deepcopy, pickle, meta device, moves between types."""

import copy
import pickle

import pytest
import torch

from support.cases import CASES
from support.depth import thinned


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_copy_computes_the_same_and_shares_nothing(case, duplicate):
    layer, x = case.layer(), case.input()
    twin = duplicate(layer)
    before = copy.deepcopy(twin.state_dict())
    y = layer(x)
    for name, t in before.items():
        assert torch.equal(twin.state_dict()[name], t), "the original's training step reached the copy"
    assert torch.equal(twin(x), y)
    assert repr(twin) == repr(layer)
    for name, t in layer.state_dict().items():
        assert torch.equal(twin.state_dict()[name], t)


@pytest.mark.parametrize("training", thinned([True, False], bool), ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_meta_device(case, training):
    with torch.device("meta"):
        layer = case.build().train(training)
    assert all(t.is_meta for t in layer.state_dict().values())
    y = layer(case.input().to("meta"))
    assert y.is_meta
    assert y.shape == case.shape
    real = layer.to_empty(device="cpu")
    real.load_state_dict(case.layer().state_dict())
    assert real(case.input()).isfinite().all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_repr_says_what_the_layer_is(case):
    layer = case.build()
    text = repr(layer)
    assert text.startswith(f"{case.name}(")
    if getattr(layer, "activation", None):
        assert f"activation={layer.activation}" in text
