"""Inside nk.masked a padded batch gives what its examples give unpadded, in whole models."""

import copy
import importlib

import pytest
import torch
from torch import nn

import normkit as nk
from support.case import randomize_
from support.sequence_models import Conformer, Wav2Vec, valid_positions
from support.unpadded import assert_as_unpadded

# Of the largest result. In float32: a few thousand roundings, some of them made larger by a norm of few values.
ROUNDING = {torch.float64: 1e-10, torch.float32: 2.0**-24 * 4096}

FRAMES, SAMPLES = torch.tensor([37, 20, 29, 15]), torch.tensor([320, 200, 150, 171])


def randomized(model):
    for layer in model.modules():
        if "Norm" in type(layer).__name__:
            randomize_(layer)
    return model


def assert_model(model, twin, x, real, **given):
    def padded(model, x):
        with nk.masked(model, **given):
            return model(x, real)

    def call(model, one):
        return model(one, torch.tensor([one.shape[1]]))

    examples = [one.unsqueeze(0)[:, :n] for one, n in zip(x, real.tolist(), strict=True)]
    assert_as_unpadded(model, x, examples, padded, twin=twin, call=call, rounding=ROUNDING[x.dtype])


def spectrograms(dtype=torch.float64):
    return torch.randn(4, 37, 9, dtype=dtype) * 2 + 1  # also where nothing is real


def waves(dtype=torch.float64):
    return torch.randn(4, 320, dtype=dtype) * 2 + 1


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("library", [nn, nk], ids=["torch", "normkit"])
def test_conformer(library, training, dtype):
    twin = randomized(Conformer()).to(dtype).train(training)
    model = copy.deepcopy(twin) if library is nn else nk.convert(twin, to="batch").model
    assert type(model.blocks[0].convolution.batch_norm) is library.BatchNorm1d
    assert_model(model, twin, spectrograms(dtype), FRAMES, lengths=FRAMES, dim=-2)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("norm", ["group", "batch", "instance"])
@pytest.mark.parametrize("library", [nn, nk], ids=["torch", "normkit"])
def test_wav2vec(library, norm, training, dtype):
    twin = randomized(Wav2Vec(norm=norm)).to(dtype).train(training)
    model = Wav2Vec(library, norm).to(dtype).train(training)
    model.load_state_dict(twin.state_dict())
    assert_model(model, twin, waves(dtype), SAMPLES, lengths=SAMPLES)


def test_a_mask_says_what_lengths_say():
    twin = randomized(Conformer()).double()
    assert_model(copy.deepcopy(twin), twin, spectrograms(), FRAMES, mask=valid_positions(FRAMES, 37), dim=-2)


@pytest.mark.parametrize("garbage", [1e6, torch.nan, torch.inf], ids=str)
def test_padding_may_hold_anything(garbage):
    twin = randomized(Wav2Vec(norm="batch")).double()
    x = waves().masked_fill(~valid_positions(SAMPLES, 320), garbage)
    assert_model(copy.deepcopy(twin), twin, x, SAMPLES, lengths=SAMPLES)


def test_a_batch_without_padding_gives_what_it_gives():
    model = randomized(Conformer()).double()
    twin, x = copy.deepcopy(model), spectrograms()
    lengths = torch.full((4,), 37)
    with nk.masked(model, lengths=lengths, dim=-2):
        y = model(x, lengths)
    torch.testing.assert_close(y, twin(x, lengths), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(list(model.buffers()), list(twin.buffers()), rtol=1e-10, atol=1e-10)


def test_what_it_is_for():
    """Without it, outputs of the same models move by far more than rounding: the tests above can fail."""
    model, lengths = randomized(Wav2Vec()).double().eval(), SAMPLES
    x = waves()
    alone = model(x[1:2, :200], lengths[1:2])
    assert (model(x, lengths)[1:2, : alone.shape[1]] - alone).abs().max() > 1e-3


# ---- models that others wrote ----------------------------------------------------------------------------------------

_WAV2VEC = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8, 8),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "group",
    "apply_spec_augment": False,
    **dict.fromkeys(("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout"), 0.0),
    "layerdrop": 0.0,
}
_CONFORMER = {**_WAV2VEC, "conv_depthwise_kernel_size": 5, "conformer_conv_dropout": 0.0}

THEIRS = {
    "wav2vec2": ("Wav2Vec2", _WAV2VEC),
    "hubert": ("Hubert", _WAV2VEC),
    "relative": ("Wav2Vec2Conformer", {**_CONFORMER, "position_embeddings_type": "relative"}),
    "rotary": ("Wav2Vec2Conformer", {**_CONFORMER, "position_embeddings_type": "rotary"}),
}


@pytest.mark.deep
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(("name", "options"), THEIRS.values(), ids=THEIRS)
def test_models_of_transformers(name, options, training):
    transformers = importlib.import_module("transformers")
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))
    model = randomized(model).double().train(training)
    mask = valid_positions(SAMPLES, 320).long()

    def padded(model, x):
        with nk.masked(model, mask):
            return model(x, attention_mask=mask).last_hidden_state

    def call(model, one):
        return model(one, attention_mask=torch.ones(one.shape, dtype=torch.long)).last_hidden_state

    x = waves()
    examples = [one.unsqueeze(0)[:, :n] for one, n in zip(x, SAMPLES.tolist(), strict=True)]
    assert_as_unpadded(model, x, examples, padded, call=call)
