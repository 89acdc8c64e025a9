"""Gamma and beta of layer and RMS norms move into the layers that read their outputs; the norms stay."""

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.surgery.fold import fold
from support.case import randomize_
from support.fold_checks import agree, double, ready, reason
from support.foreign_norms import picture, randomized, same_picture
from support.look_alikes import LOOK_ALIKES, SIZE, Gemma, Llama, Maps

# A product of double values rounded once more, summed over some inputs.
ROUNDING = 64 * torch.finfo(torch.float64).eps


def moved(model, x, *others, count=1):
    """Fold a model, and find the same function, and norms that have nothing more to give."""
    result = fold(model, x)
    assert len(result.changed) == count, str(result)
    assert all(" moved into " in change.what for change in result.changed)
    assert result.parity.max_rel <= ROUNDING
    agree(model, result.model, x, *others)
    again = fold(result.model, x)
    assert not again.changed
    assert sum("its gamma is one and its beta is zero" in skipped.why for skipped in again.skipped) == count
    return result


NORMS = {
    "layer": (lambda: nn.LayerNorm(SIZE), "gamma and beta moved into 1"),
    "layer of ours": (lambda: nk.LayerNorm(SIZE), "gamma and beta moved into 1"),
    "without beta": (lambda: nn.LayerNorm(SIZE, bias=False), "gamma moved into 1"),
    "rms": (lambda: nn.RMSNorm(SIZE), "gamma moved into 1"),
    "rms of ours": (lambda: nk.RMSNorm(SIZE), "gamma moved into 1"),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_into_a_linear_layer(name, bias):
    build, what = NORMS[name]
    model = ready(nn.Sequential(build(), nn.Linear(SIZE, 4, bias=bias)))
    result = moved(model, double(3, 5, SIZE), double(2, SIZE))
    assert result.changed[0].what == what
    assert type(result.model[0]) is type(model[0])
    assert result.model[0].weight.tolist() == [1.0] * SIZE
    assert (result.model[1].bias is not None) == (bias or getattr(model[0], "bias", None) is not None)


@pytest.mark.parametrize("build", [nk.LayerNorm2d, nk.RMSNorm2d])
def test_of_maps_of_ours_into_a_convolution(build):
    model = ready(nn.Sequential(build(SIZE), nn.Conv2d(SIZE, 4, 3)))
    moved(model, double(2, SIZE, 5, 5), double(1, SIZE, 6, SIZE))
    padded = ready(nn.Sequential(nk.LayerNorm2d(SIZE), nn.Conv2d(SIZE, 4, 3, padding=1)))
    assert "would get its shift too" in reason(padded, double(2, SIZE, 5, 5))


@pytest.mark.parametrize(
    "name", [name for name, case in LOOK_ALIKES.items() if case.says["affine"] and not case.says.get("channels_first")]
)
def test_of_norms_that_others_wrote(name):
    case = LOOK_ALIKES[name]
    model = randomize_(nn.Sequential(case.build(SIZE), nn.Linear(SIZE, 4))).eval()
    if case.says.get("activation"):
        assert "an activation follows inside it" in reason(model, torch.randn(case.shape))
        return
    result = fold(model, torch.randn(case.shape))
    assert len(result.changed) == 1, str(result)
    assert result.parity.max_rel <= 64 * torch.finfo(torch.float32).eps
    gamma = getattr(result.model[0], case.says.get("names", ("weight",))[0])
    assert gamma.tolist() == [1.0 - case.says.get("weight_offset", 0.0)] * SIZE


@pytest.mark.parametrize("build", [lambda: Maps(3), lambda: LOOK_ALIKES["permuted"].build(3)], ids=["maps", "permuted"])
def test_of_maps_into_a_convolution(build):
    model = ready(nn.Sequential(build(), nn.Conv2d(3, 4, 2, stride=2)))
    moved(model, double(2, 3, 6, 6))
    padded = ready(nn.Sequential(build(), nn.Conv2d(3, 4, 3, padding=1)))
    assert "zeros at the borders" in reason(padded, double(2, 3, 6, 6))


class Attention(nn.Module):
    """A norm that several layers read, through views, beside the stream that goes around it."""

    def __init__(self, norm=nn.LayerNorm, *, tied=False):
        super().__init__()
        self.norm, self.last = norm(6), norm(6)
        self.q, self.kv, self.out = nn.Linear(6, 6), nn.Linear(6, 12, bias=False), nn.Linear(6, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.embedding = nn.Embedding(5, 6)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (2, 3)).transpose(1, 2)
        k, v = (part.unflatten(-1, (2, 3)).transpose(1, 2) for part in self.kv(y).chunk(2, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head(self.last(x))


IDS = torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1]])


@pytest.mark.parametrize("norm", [nn.LayerNorm, Llama, Gemma], ids=lambda norm: norm.__name__)
def test_into_several_layers(norm):
    result = fold(model := ready(Attention(norm)), IDS)
    assert [change.layer for change in result.changed] == ["norm", "last"]
    assert result.changed[0].what.endswith("moved into q and kv")
    limit = 64 * torch.finfo(torch.float32 if norm is not nn.LayerNorm else torch.float64).eps  # theirs are in float32
    assert result.parity.max_rel <= limit
    agree(model, result.model, IDS, IDS.flip(0), tolerance=limit)


def test_tied_weights_are_left_alone():
    model = ready(Attention(tied=True))
    result = fold(model, IDS)
    assert [change.layer for change in result.changed] == ["norm"]
    assert "head shares its parameters with embedding" in result.skipped[0].why
    assert result.model.head.weight is result.model.embedding.weight


@pytest.mark.parametrize("norm", [nn.LayerNorm, Gemma], ids=lambda norm: norm.__name__)
def test_undo_in_place(norm):
    model = randomized(Attention(norm)).eval()
    before = picture(model)
    result = fold(model, IDS, inplace=True)
    assert result.model is model
    assert len(result.changed) == 2
    assert result.undo() is model
    assert same_picture(before, picture(model))


def test_the_original_is_left_alone():
    model = randomized(Attention()).eval()
    before = picture(model)
    result = fold(model, IDS)
    assert same_picture(before, picture(model))
    assert result.undo() is model


def test_beside_a_batch_norm():
    layers = nn.BatchNorm1d(6), nn.LayerNorm(6), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)
    result = fold(model := ready(nn.Sequential(*layers)), x := double(4, 6))
    assert [(change.layer, change.what) for change in result.changed] == [
        ("1", "gamma and beta moved into 2"),
        ("3", "folded into 2"),
    ]
    assert [skipped.layer for skipped in result.skipped] == ["0"]
    agree(model, result.model, x, double(7, 6))


def test_a_norm_that_runs_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.b(self.norm(self.a(self.norm(x))))

    moved(ready(Twice()), double(3, 6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype):
    model = ready(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)), dtype)
    result = fold(model, torch.randn(3, 16, dtype=dtype))
    assert len(result.changed) == 1
    assert result.parity.max_rel <= 16 * torch.finfo(dtype).eps
    assert result.model[1].weight.dtype == dtype


class Net(nn.Module):
    def __init__(self, run, norm=None):
        super().__init__()
        self.norm, self.linear = norm or nn.LayerNorm(6), nn.Linear(6, 6)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def _kept(net, x):
    net.features = net.norm(x)
    return net.linear(net.features)


REASONS = {
    "used elsewhere": (lambda net, x: net.linear(y := net.norm(x)) + y, "its output goes to add"),
    "returned": (lambda net, x: (net.linear(y := net.norm(x)), y), "part of the model's output"),
    "kept": (_kept, "kept by the model itself"),
    "nonlinear after": (lambda net, x: net.linear(net.norm(x).relu()), "its output goes to relu"),
    "scaled after": (lambda net, x: net.linear(net.norm(x) * 2), "its output goes to mul"),
    "never run": (lambda net, x: net.linear(x), "does not run"),
    "layer used alone too": (lambda net, x: net.linear(net.norm(x)) + net.linear(x), "runs more than once"),
    "gamma used elsewhere": (lambda net, x: net.linear(net.norm(x)) + net.norm.weight, "is also used by add"),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name):
    run, words = REASONS[name]
    result = fold(ready(Net(run)), double(3, 6))
    assert result.parity.max_abs == 0
    why = result.skipped[0].why
    assert words in why
    assert "LayerNorm is not one scale and shift" in why
    assert "its gamma and beta stay: " in why


WITHOUT = {
    "no affine": (nn.LayerNorm(6, elementwise_affine=False), "it has no gamma and no beta"),
    "two dimensions": (nn.LayerNorm((3, 6)), "more than one dimension"),
    "activation": (nk.LayerNorm(6, activation="relu"), "an activation follows inside it"),
    "computed": (nn.utils.parametrizations.weight_norm(nn.LayerNorm(6), dim=None), "computed from something else"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_norms_with_nothing_to_give(name):
    norm, words = WITHOUT[name]
    assert words in reason(ready(Net(lambda net, x: net.linear(net.norm(x)), copy.deepcopy(norm))), double(2, 3, 6))


def test_a_gamma_of_one_is_not_moved():
    model = Net(lambda net, x: net.linear(net.norm(x))).double().eval()
    assert "its gamma is one and its beta is zero" in reason(model, double(3, 6))


def test_a_gamma_that_is_not_finite():
    model = ready(Net(lambda net, x: net.linear(net.norm(x))))
    with torch.no_grad():
        model.norm.weight[2] = torch.nan
    (skipped,) = fold(model, double(3, 6)).skipped
    assert "not finite" in skipped.why


def test_a_gamma_that_two_norms_share():
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    result = fold(ready(model), double(3, 6))
    assert not result.changed
    assert "it shares its parameters with 2" in result.skipped[0].why


def test_a_layer_without_a_place_for_a_bias():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.norm = nn.Parameter(torch.zeros(6, 4)), nn.LayerNorm(6)

        def forward(self, x):
            return self.norm(x) @ self.weight

    model = ready(Bare())
    assert "no bias, and no place for one" in reason(model, double(3, 6))
    with torch.no_grad():
        model.norm.bias.zero_()
    moved(model, double(3, 6))


def test_an_error_leaves_everything_as_it_was():
    model = randomized(Attention()).eval()
    before = picture(model)
    with pytest.raises(nk.NormkitError, match="does not run on the example"):
        fold(model, torch.randn(2, 3), inplace=True)
    assert same_picture(before, picture(model))
