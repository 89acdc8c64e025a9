"""The gammas of language models that others wrote, moved into their linear layers."""

import copy

import pytest
import torch

import normkit as nk
from normkit.batches import feed, tensors_in
from normkit.surgery.fold import fold
from support.foreign_norms import picture, same_picture
from support.language_models import LANGUAGE_MODELS

pytestmark = [
    pytest.mark.deep,
    pytest.mark.filterwarnings("ignore"),  # of transformers
    pytest.mark.parametrize("case", LANGUAGE_MODELS, ids=lambda case: case.name),
]


@pytest.fixture(autouse=True)
def _transformers():
    pytest.importorskip("transformers")


def limit(case, dtype):
    """How far rounding may move outputs, over the largest. Gemma's norms end in float32 whatever the model's type."""
    is_wide = dtype == torch.float64 and not case.name.startswith("Gemma")
    return 1e-12 if is_wide else 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_outputs_stay_and_every_norm_is_accounted_for(case, dtype):
    model, example = case.build().to(dtype), case.example()
    result = fold(model, example)
    assert (len(result.changed), len(result.skipped)) == (case.moved, case.left), str(result)
    assert result.parity.max_rel <= limit(case, dtype)
    if not (case.name.startswith("Gemma") and dtype == torch.float64):
        assert result.parity.first_layer is None
    others = {name: ids.flip(0) for name, ids in example.items()}
    with torch.no_grad():
        pairs = zip(tensors_in(feed(model, others)), tensors_in(feed(result.model, others)), strict=True)
        assert all((a - b).abs().max() <= limit(case, dtype) * a.abs().max() for a, b in pairs)


def test_undo_gives_back_every_bit(case):
    model = case.build()
    before, kept = picture(model), copy.deepcopy(model.state_dict())
    result = fold(model, case.example(), inplace=True)
    assert result.changed
    assert result.undo() is model
    assert same_picture(before, picture(model))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


def test_norms_become_ours_and_come_back(case):
    model, example = case.build(), case.example()
    before = picture(model)
    kinds = {nk.describe(layer).kind for layer in model.modules() if nk.describe(layer) is not None}
    assert kinds == {"layer" if case.name.startswith("GPT2") else "rms"}
    result = nk.convert(model, kinds.pop(), example, inplace=True)
    assert len(result.changed) == case.moved + case.left, str(result)
    assert not result.skipped
    assert result.parity.max_rel <= 1e-5
    assert result.undo() is model
    assert same_picture(before, picture(model))
