"""The same function in torch's own classes: `convert(model, classes="torch")`."""

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.surgery.replace.convert import convert
from support.case import randomize_
from support.cases import CASES, TWINS
from support.depth import first_of_each
from support.foreign_norms import BatchNormAct2d, FrozenBatchNorm2d, Scattered, picture, randomized, same_picture
from support.refusal import refused_untouched

pytestmark = pytest.mark.filterwarnings("ignore::normkit.NormkitWarning")  # of layers that are left: see the last test


def of_torch(layer):
    return type(layer).__module__.startswith("torch.nn")


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", first_of_each(TWINS, lambda case: case.name), ids=str)
def test_a_layer_that_torch_has(case, training):
    layer = case.layer(torch.float64, training)
    x = case.input(torch.float64)
    done = convert(layer, classes="torch")
    if done.skipped:  # ghost, in training
        assert "in training it has" in done.skipped[0].why
        return
    assert type(done.model).__module__.startswith("torch.nn")
    assert done.model.training == training
    assert list(done.model.state_dict()) == list(layer.state_dict())
    if not isinstance(done.model, nn.SyncBatchNorm) or not training:  # torch's trains on GPUs alone
        torch.testing.assert_close(done.model(x), layer(x), rtol=1e-11, atol=1e-11)
        for name, b in layer.named_buffers():
            torch.testing.assert_close(done.model.get_buffer(name), b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", first_of_each(CASES, lambda case: case.name), ids=str)
def test_every_layer_evaluates_the_same_or_is_skipped_with_a_reason(case):
    layer, x = case.layer(torch.float64, training=False), case.input(torch.float64)
    done = convert(layer, classes="torch", example=x)
    assert len(done.changed) + len(done.skipped) == 1
    if done.changed:
        assert done.parity.max_rel < 1e-11
        assert all(of_torch(module) for module in done.model.modules())
    else:
        assert "torch has no class" in done.skipped[0].why
        assert type(done.model) is type(layer)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nk.BatchRenorm2d(4), "in training it has a correction"),
        (lambda: nk.GhostBatchNorm2d(4), "in training it has statistics for every chunk"),
        (lambda: nk.AccumulatedBatchNorm2d(4, micro_batches=2), "in training it has statistics over several"),
        (lambda: nk.BatchNorm2d(4, nonfinite="raise"), 'in training it has nonfinite="raise"'),
        (lambda: nk.FrozenBatchNorm2d(4), "torch has no class that computes what a FrozenBatchNorm2d does"),
        (lambda: FrozenBatchNorm2d(4), "torch has no class"),
        (lambda: nn.BatchNorm2d(4), "is torch's own already"),
        (lambda: nk.EvoNormS0(4, 2), "torch has no class"),
    ],
)
def test_reasons(make, why):
    model = nn.Sequential(randomize_(make())).train()
    before = picture(model)
    done = convert(model, classes="torch", inplace=True)
    assert done.changed == []
    assert why in done.skipped[0].why
    assert same_picture(picture(model), before)


def test_training_layers_of_ours_evaluate_as_a_batch_norm():
    done = convert(nn.Sequential(randomize_(nk.BatchRenorm2d(4, activation="relu"))).eval(), classes="torch")
    assert "in training it would lose a correction" in done.changed[0].why
    assert [type(m) for m in done.model[0]] == [nn.BatchNorm2d, nn.ReLU]


ACTIVATIONS = [
    ({"activation": "relu"}, nn.ReLU),
    ({"activation": "leaky_relu", "negative_slope": 0.3}, nn.LeakyReLU),
    ({"activation": "gelu_tanh"}, nn.GELU),
    ({"activation": "hardswish"}, nn.Hardswish),
    ({"activation": nn.PReLU(4)}, nn.PReLU),
    ({"activation": torch.sin}, nk.activations.FunctionActivation),
]


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("options", "kind"), ACTIVATIONS, ids=[kind.__name__ for _, kind in ACTIVATIONS])
def test_activations_become_modules(options, kind, training, inplace):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nk.BatchNorm2d(4, affine="scale", **copy.deepcopy(options)))
    randomized(model.double().train(training))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    before, expected, weight = picture(model), copy.deepcopy(model)(x), model[1].weight
    done = convert(model, classes="torch", inplace=inplace)
    assert [type(m) for m in done.model[1]] == [nn.BatchNorm2d, kind]
    assert [m.training for m in done.model.modules()] == [training] * 5
    assert done.model[1][0].bias is None
    assert done.model[1][0].weight.requires_grad == weight.requires_grad
    assert (done.model[1][0].weight is weight) == inplace
    torch.testing.assert_close(copy.deepcopy(done.model)(x), expected, rtol=1e-11, atol=1e-11)
    assert "keys begin with 0" in done.changed[0].why
    assert same_picture(picture(done.undo()), before)


def test_another_librarys_norm_with_an_activation():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), randomize_(BatchNormAct2d(4, nn.PReLU(4)))).eval()
    x = torch.randn(2, 3, 8, 8)
    done = convert(model, classes="torch", example=x)
    assert [type(m) for m in done.model[1]] == [nn.BatchNorm2d, nn.PReLU]
    assert done.parity.max_rel < 1e-6


def test_norms_in_unusual_places():
    model = randomized(convert(Scattered(), "batch").model).eval()
    x = torch.randn(3, 4, 5, 5)
    done = convert(model, classes="torch", example=x)
    assert len(done.changed) == 5
    assert all(type(norm) is nn.BatchNorm2d for norm in done.model.every_norm())
    assert done.model.shared is done.model.again
    assert done.parity.max_rel < 1e-5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.join, self.plain = nn.Conv2d(4, 4, 1), nk.BatchNorm2d(4, activation="relu"), nk.BatchNorm2d(4)

    def forward(self, x):
        return self.plain(self.join(self.conv(x), residual=x))


def test_a_call_with_more_than_an_input_is_seen_on_the_example():
    model = randomize_(Block()).eval()
    done = convert(model, classes="torch", example=torch.randn(2, 4, 5, 5))
    assert [change.layer for change in done.changed] == ["plain"]
    assert done.skipped == [
        ("join", "BatchNorm2d", "it is called with residual=, which torch's layers do not take"),
    ]
    assert done.parity.max_rel < 1e-6


def test_with_a_target_activations_follow_as_modules_too():
    model = nn.Sequential(randomize_(nk.SyncBatchNorm(4, activation="mish"))).eval()
    x = torch.randn(3, 4, 5, 5)
    done = convert(model, "batch", x, classes="torch")
    assert [type(m) for m in done.model[0]] == [nn.BatchNorm2d, nn.Mish]
    assert done.parity.max_rel < 1e-6
    assert "mish kept, as a module after it" in done.changed[0].why


def test_bad_requests():
    model = nn.Sequential(nk.BatchNorm2d(4))
    refused_untouched(model, lambda: convert(model, inplace=True), "convert needs to=", 'classes="torch"')
    refused_untouched(model, lambda: convert(model, classes="jax", inplace=True), "convert needs to=", "'jax'")
    words = 'convert(model, classes="torch") keeps', "got eps."
    refused_untouched(model, lambda: convert(model, classes="torch", eps=0.1, inplace=True), *words)
    refused_untouched(
        model, lambda: convert(model, classes="torch", calibrate=[torch.ones(2, 4, 3, 3)]), "got calibrate."
    )


def test_an_error_half_way_leaves_the_model_as_it_was(monkeypatch):
    model = nn.Sequential(nk.BatchNorm2d(4), nk.BatchNorm2d(4, activation="relu"))
    before = picture(model)
    monkeypatch.setattr("normkit.surgery.replace.torch_classes.module_after", lambda site: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(model, classes="torch", inplace=True)
    assert same_picture(picture(model), before)


@pytest.mark.filterwarnings("error")
def test_layers_that_stay_ours_are_named_in_a_warning():
    model = nn.Sequential(nn.BatchNorm2d(4), nk.BatchNorm2d(4), nk.FrozenBatchNorm2d(4), nk.EvoNormS0(4, 2))
    with pytest.warns(nk.NormkitWarning, match="torch has no class") as caught:
        done = convert(model, classes="torch")
    assert caught[0].filename == __file__
    assert [change.layer for change in done.changed] == ["1"]
    assert convert(model, classes="torch", skip=["2", "3"]).changed == done.changed  # and nothing is said
    with pytest.warns(nk.NormkitWarning, match="2"):
        assert convert(model, classes="torch", only="2").changed == []
