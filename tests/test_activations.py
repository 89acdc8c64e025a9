"""What `activation=` takes, and what is read off the norms of others."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from normkit.activations import (
    ACTIVATIONS,
    MODULES,
    activation_of,
    activation_options,
    as_module,
    label,
    name_of,
    parted,
)
from support.foreign_norms import BatchNormAct2d
from support.refusal import refused

AFTER = sorted(set(MODULES) - set(ACTIVATIONS))


@pytest.mark.parametrize("name", MODULES)
def test_a_name_means_torchs_module(name):
    z = torch.randn(1000, dtype=torch.float64) * 4
    torch.testing.assert_close(parted(name).apply(z), MODULES[name]()(z), rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", MODULES)
def test_the_kernels_fuse_the_six_and_nothing_else(name):
    found = parted(name)
    assert found.fused == (None if name in AFTER else name)
    assert (found.after is None) == (name in ACTIVATIONS)


def test_a_slope_of_its_own_runs_after_the_kernels():
    z = torch.randn(100, dtype=torch.float64)
    found = parted("leaky_relu", 0.3)
    assert found.fused is None
    assert torch.equal(found.finish(z), F.leaky_relu(z, 0.3))
    assert parted("leaky_relu", 0.01) == ("leaky_relu", None)


def test_modules_and_functions_are_themselves():
    prelu = nn.PReLU()
    assert parted(prelu) == (None, prelu)
    assert parted(torch.sin) == (None, torch.sin)
    assert parted(None) == (None, None)


@pytest.mark.parametrize(
    ("activation", "words"),
    [
        ("hardswich", ["one of", '"relu"', '"gelu_tanh"', "a module, a function or None", "Did you mean", "hardswish"]),
        ("softmax", ["got 'softmax'."]),
        (nn.ReLU, ["got the class ReLU", "activation=ReLU()"]),
        (3, ["a name, a module or a function; got 3"]),
    ],
)
def test_what_is_no_activation_is_refused(activation, words):
    refused(lambda: parted(activation), "activation must be", *words)
    refused(lambda: nk.BatchNorm2d(3, activation=activation), "activation must be", *words)
    refused(lambda: nk.functional.layer_norm(torch.ones(2, 3), 3, activation=activation), "activation must be", *words)


@pytest.mark.parametrize("slope", [torch.nan, torch.inf, "steep", None])
def test_a_slope_that_is_no_number_is_refused(slope):
    refused(lambda: nk.GroupNorm(1, 3, activation="leaky_relu", negative_slope=slope), "negative_slope must be", "got")


@pytest.mark.parametrize("activation", [None, "relu", nn.LeakyReLU(), torch.sin], ids=label)
def test_a_slope_without_a_leaky_relu_is_refused(activation):
    words = 'that of activation="leaky_relu"; got 0.2 with'
    refused(lambda: nk.LayerNorm(3, activation=activation, negative_slope=0.2), words, "Leave it out")
    refused(lambda: nk.functional.rms_norm(torch.ones(2, 3), 3, activation=activation, negative_slope=0.2), words)


def test_labels():
    assert [label(a) for a in (None, "mish", nn.PReLU(), nn.Hardswish(), nn.LeakyReLU(0.3), torch.sin)] == [
        *(None, "mish", "PReLU", "hardswish", "leaky_relu", "sin"),
    ]


@pytest.mark.parametrize("name", MODULES)
def test_torchs_modules_have_our_names(name):
    assert name_of(as_module(name)) == name
    if "inplace" in vars(MODULES[name]()):
        assert name_of(MODULES[name](inplace=True)) == name


@pytest.mark.parametrize("module", [nn.ELU(0.5), nn.Softplus(beta=2.0), nn.PReLU(), nn.Hardtanh(), nn.Threshold(0, 1)])
def test_others_have_none(module):
    assert name_of(module) is None


def test_a_class_of_the_same_name_is_not_torchs():
    class ReLU(nn.Module):
        def forward(self, x):
            return x.abs()

    assert repr(ReLU()) == repr(nn.ReLU())
    assert name_of(ReLU()) is None


class InPlaceABN(nn.BatchNorm2d):
    """As inplace_abn writes it: a name, and its parameter."""

    def __init__(self, num_features, activation, activation_param=0.01):
        super().__init__(num_features)
        self.activation, self.activation_param = activation, activation_param


KEPT = [
    (lambda: nk.BatchNorm2d(4), {}),
    (lambda: nk.GroupNorm(2, 4, activation="gelu"), {"activation": "gelu"}),
    (
        lambda: nk.LayerNorm(4, activation="leaky_relu", negative_slope=0.3),
        {"activation": "leaky_relu", "negative_slope": 0.3},
    ),
    (lambda: nk.BatchNorm2d(4, activation=torch.sin), {"activation": torch.sin}),
    (lambda: nk.BatchNorm2d(4, activation=nn.ReLU6()), {"activation": "relu6"}),
    (lambda: nn.BatchNorm2d(4), {}),
    (lambda: BatchNormAct2d(4, nn.Identity()), {}),
    (lambda: BatchNormAct2d(4, nn.Hardswish()), {"activation": "hardswish"}),
    (lambda: BatchNormAct2d(4, nn.LeakyReLU(0.2)), {"activation": "leaky_relu", "negative_slope": 0.2}),
    (lambda: BatchNormAct2d(4, nn.SiLU(), nn.Dropout(0.1)), {"activation": "silu"}),
    (lambda: InPlaceABN(4, "identity"), {}),
    (lambda: InPlaceABN(4, "leaky_relu"), {"activation": "leaky_relu"}),
    (lambda: InPlaceABN(4, "leaky_relu", 0.2), {"activation": "leaky_relu", "negative_slope": 0.2}),
]


@pytest.mark.parametrize(("make", "options"), KEPT)
def test_options_that_make_the_same_activation(make, options):
    norm = make()
    assert activation_options(norm) == options
    single = activation_of(norm)
    if "negative_slope" in options:
        assert repr(single) == repr(nn.LeakyReLU(options["negative_slope"]))
    else:
        assert single == options.get("activation")
    assert nk.describe(norm).activation == label(options.get("activation"))


def test_a_module_without_a_name_is_passed_on_itself():
    act = nn.PReLU(4)
    assert activation_of(BatchNormAct2d(4, act)) is act
    assert activation_of(nk.BatchNorm2d(4, activation=act)) is act
    assert repr(activation_of(InPlaceABN(4, "elu", 0.5))) == repr(nn.ELU(0.5))
