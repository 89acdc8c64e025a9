"""Layer and RMS norms of other libraries: converted where ours can hold them, named with the reason elsewhere."""

import pytest
import torch
from torch import nn

import normkit as nk
from support.case import randomize_
from support.foreign_norms import picture, randomized, same_picture
from support.look_alikes import LOOK_ALIKES, SIZE, Gated, Gemma, Llama, Maps, OfFunction, Weighted, Weightless

pytestmark = pytest.mark.filterwarnings(
    "ignore::normkit.NormkitWarning"
)  # of norms that are left, which `skipped` names

# By name, part of the reason for which a look-alike is left alone.
LEFT = {
    "lengths": "eps must be positive",
    "sequences": 'no "layer" norm over the channels of 1d inputs',
}
ROUNDING = 32 * torch.finfo(torch.float32).eps  # of a few operations on either side


class Net(nn.Module):
    """The norm between two things that are none."""

    def __init__(self, norm):
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(())), norm

    def forward(self, x):
        return self.norm(x * self.scale).tanh()


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_to_ours_and_back(name):
    case = LOOK_ALIKES[name]
    net, x = randomized(Net(case.build(SIZE))), torch.randn(case.shape)
    before, kind = picture(net), nk.describe(net.norm).kind
    done = nk.convert(net, kind, x, inplace=True)
    if name in LEFT:
        assert not done.changed
        assert LEFT[name] in done.skipped[0].why
    else:
        of_last, of_maps = {"rms": (nk.RMSNorm, nk.RMSNorm2d), "layer": (nk.LayerNorm, nk.LayerNorm2d)}[kind]
        assert type(net.norm) is (of_maps if case.says.get("channels_first") else of_last)
        assert "evaluation is the same" in done.changed[0].why
        assert done.parity.max_rel <= ROUNDING
        assert done.parity.first_layer is None
    assert done.undo() is net
    assert same_picture(before, picture(net))


def test_a_weight_that_one_is_added_to():
    layer = randomize_(Gemma(SIZE))
    layer.weight.requires_grad_(False)
    done = nk.convert(layer, "rms")
    torch.testing.assert_close(done.model.weight, 1 + layer.weight, rtol=0, atol=0)
    assert not done.model.weight.requires_grad
    assert "its weight plus 1 is the new one" in done.changed[0].why
    again = nk.convert(done.model, lambda spec: Gemma(*spec.normalized_shape))
    torch.testing.assert_close(again.model.weight, layer.weight, rtol=0, atol=torch.finfo(torch.float32).eps)


def test_parameters_stay_the_same_objects():
    layer = randomize_(Llama(SIZE))
    weight = layer.weight
    assert nk.convert(layer, "rms", inplace=True).model.weight is weight


def test_a_norm_of_any_size_takes_that_of_the_example():
    assert "pass example=" in nk.convert(Weightless(), "rms").skipped[0].why
    done = nk.convert(Weightless(), "rms", torch.randn(3, 5))
    assert done.model.normalized_shape == (5,)
    assert done.parity.max_rel <= ROUNDING


def test_a_norm_of_any_size_that_gets_several():
    norm = Weightless()

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return self.norm(x).sum() + self.norm(x[:, :3]).sum()

    assert "gets several" in nk.convert(Two(), "rms", torch.randn(3, 5)).skipped[0].why


class GatedNet(nn.Module):
    def __init__(self, is_gated):
        super().__init__()
        self.norm, self.is_gated = randomize_(Gated(SIZE)), is_gated

    def forward(self, x):
        return self.norm(x, gate=2 * x) if self.is_gated else self.norm(x)


def test_a_norm_that_may_be_called_with_more():
    x = torch.randn(3, SIZE)
    assert "may be called with gate too" in nk.convert(GatedNet(True), "rms").skipped[0].why
    assert "is called with more than its input" in nk.convert(GatedNet(True), "rms", x).skipped[0].why
    assert nk.convert(GatedNet(False), "rms", x).parity.max_rel <= ROUNDING


def test_state_that_has_no_place():
    class More(Llama):
        def __init__(self, size):
            super().__init__(size)
            self.unused = nn.Parameter(torch.ones(size))

    assert "state that no other norm has a place for: unused" in nk.convert(More(SIZE), "rms").skipped[0].why


def test_a_map_norm_to_norms_that_take_maps():
    norm, x = randomize_(Maps(8)), torch.randn(4, 8, 5, 5)
    done = nk.convert(norm, "group", x)
    assert isinstance(done.model, nk.GroupNorm)
    assert "evaluation differs" in done.changed[0].why
    assert torch.equal(done.model.weight, norm.weight)


@pytest.mark.parametrize("name", ["llama", "gemma", "deberta", "float32 only", "fixed beta"])
def test_another_kind_is_fitted_to_it(name):
    layer, x = randomize_(LOOK_ALIKES[name].build(SIZE)), torch.randn(64, 5, SIZE)
    kind = {"rms": "layer", "layer": "rms"}[nk.describe(layer).kind]
    copied, fitted = (nk.convert(layer, kind, x, calibrate=batches) for batches in (None, [x]))
    assert "of the old output's variance explained" in fitted.changed[0].why
    with torch.no_grad():  # least squares: no gamma and beta are closer
        errors = [(done.model(x) - layer(x)).square().mean() for done in (fitted, copied)]
    assert errors[0] <= errors[1] * (1 + ROUNDING)


def rms_of_maps(norm, x):
    """As timm computes its RmsNorm2d."""
    return norm.weight[:, None, None] * x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)


def test_a_root_mean_square_norm_of_maps():
    layer, x = randomize_(OfFunction(SIZE, rms_of_maps)), torch.randn(2, SIZE, 3, 4)
    done = nk.convert(layer, "rms", x)
    assert type(done.model) is nk.RMSNorm2d
    assert done.parity.max_rel <= ROUNDING


def test_a_map_norm_of_a_class_that_does_not_say_its_dimensions_needs_an_example():
    assert "pass example=" in nk.convert(Maps(SIZE), "layer").skipped[0].why


def test_a_map_norm_keeps_its_activation_and_becomes_the_other_kind():
    layer, x = randomize_(nk.LayerNorm2d(SIZE, 1e-3, activation="silu")), torch.randn(8, SIZE, 5, 6)
    done = nk.convert(layer, "rms", x, calibrate=[x])
    assert (type(done.model), done.model.eps, done.model.activation) == (nk.RMSNorm2d, 1e-3, "silu")
    assert "beta dropped" in done.changed[0].why
    back = nk.convert(done.model, "layer", x)
    assert (type(back.model), back.model.bias) == (nk.LayerNorm2d, None)
    assert "is one already" in nk.convert(layer, "layer").skipped[0].why


@pytest.mark.parametrize("name", ["permuted", "channels first", "maps"])
def test_torch_has_no_class_for_maps(name):
    """Its LayerNorm, which some of them derive from, takes the last dimension."""
    case = LOOK_ALIKES[name]
    layer = randomize_(case.build(SIZE))
    assert "torch has no class" in nk.convert(layer, classes="torch").skipped[0].why
    assert "torch" in nk.convert(layer, "layer", torch.randn(case.shape), classes="torch").skipped[0].why
    assert "torch has no class" in nk.convert(nk.LayerNorm2d(SIZE), classes="torch").skipped[0].why


def test_torchs_classes():
    done = nk.convert(randomize_(Llama(SIZE)), "rms", torch.randn(3, SIZE), classes="torch")
    assert type(done.model) is nn.RMSNorm
    assert done.parity.max_rel <= ROUNDING


def test_freeze_and_recalibrate_name_them():
    model = nn.Sequential(Llama(SIZE), nn.BatchNorm1d(SIZE))
    assert [(s.layer, s.why) for s in nk.freeze(model).skipped] == [("0", "it stores no statistics")]
    skipped = nk.recalibrate(model, [torch.randn(16, SIZE)]).skipped
    assert [s.layer for s in skipped] == ["0"]


class OtherNames(Weighted):
    def __init__(self, size):
        super().__init__(size)
        self.gain, self.offset = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        del self.weight

    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[-1:], self.gain, self.offset, self.variance_epsilon)


def test_gamma_and_beta_of_other_names():
    layer = randomize_(OtherNames(SIZE))
    done = nk.convert(layer, "layer", torch.randn(3, SIZE))
    assert torch.equal(done.model.weight, layer.gain)
    assert torch.equal(done.model.bias, layer.offset)
    assert done.parity.max_rel <= ROUNDING
