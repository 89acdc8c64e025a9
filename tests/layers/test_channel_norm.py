"""What the layers on ChannelNorm share: residuals, empty batches, and what they refuse."""

import pytest
import torch

import normkit as nk
from support.cases import randomize_
from support.refusal import refused_untouched
from support.rows.mixed import ROWS

ACROSS = [case for case in ROWS if case.name != "EvoNormS0"]


def images(*shape):
    return torch.randn(*(shape or (4, 6, 3, 5)), dtype=torch.float64) * 1.3 + 0.3


@pytest.mark.parametrize("name", ["WhitenedBatchNorm2d", "SwitchableNorm2d", "MovingBatchNorm2d"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_residual(name, training):
    plain = randomize_(getattr(nk, name)(6, dtype=torch.float64)).train(training)
    fused = getattr(nk, name)(6, dtype=torch.float64, activation="relu").train(training)
    fused.load_state_dict(plain.state_dict())
    x, r = images(), images()
    torch.testing.assert_close(fused(x, residual=r), torch.relu(plain(x) + r))


@pytest.mark.parametrize("name", ["WhitenedBatchNorm2d", "SwitchableNorm2d", "MovingBatchNorm2d", "EvoNormB0"])
def test_an_empty_batch_in_evaluation(name):
    layer = getattr(nk, name)(6).eval()
    assert layer(torch.randn(0, 6, 3, 5)).shape == (0, 6, 3, 5)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_bad_input(case, training):
    layer, x, channels = case.layer(training=training), case.input(), case.shape[1]
    who = f"{case.name}({channels}) needs"
    flat, wide = x[0, 0], torch.cat([x, x], 1)
    words = [f"(N, {channels}", f"got {tuple(flat.shape)}", "unsqueeze"]
    refused_untouched(layer, lambda: layer(flat), who, *words)
    refused_untouched(layer, lambda: layer(wide), who, f"got {tuple(wide.shape)}", "number of channels")
    words = ["floating point", "torch.int64", "x.float()"]
    refused_untouched(layer, lambda: layer(x.long()), who, *words, error=TypeError)
    if not case.name.startswith("Evo"):
        refused_untouched(layer, lambda: layer(x, residual=x[:1]), who, "residual", f"{case.shape}", "shortcut")


@pytest.mark.parametrize("case", ACROSS, ids=str)
def test_one_value_per_channel_in_training(case):
    for n in (0, 1):
        x = torch.randn(n, case.shape[1], *[1] * (len(case.shape) - 2))
        words = [f"{case.name}({case.shape[1]}) needs more than 1 value per channel", f"got input {tuple(x.shape)}"]
        layer = case.layer()
        refused_untouched(layer, lambda layer=layer, x=x: layer(x), *words)


@pytest.mark.parametrize("name", sorted({case.name for case in ROWS}))
def test_bad_options(name):
    cls = getattr(nk, name)
    sizes = (6, 3) if name == "EvoNormS0" else (6,)
    for eps in (0.0, -1e-5, float("nan")):
        with pytest.raises(nk.ArgumentError, match=f"eps must be positive.*got {eps}"):
            cls(*sizes, eps=eps)
    with pytest.raises(nk.ArgumentError, match=r"affine must be True.*got 'gamma'"):
        cls(*sizes, affine="gamma")
    if name != "EvoNormS0":
        with pytest.raises(nk.ArgumentError, match=r"momentum must lie in 0\.\.1.*got 1.1"):
            cls(6, momentum=1.1)
    if not name.startswith("Evo"):
        with pytest.raises(nk.ArgumentError, match=r"activation must be one of.*got 'softmax'"):
            cls(6, activation="softmax")
