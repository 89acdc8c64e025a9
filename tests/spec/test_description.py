import dataclasses
import inspect
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import normkit as nk
from normkit.spec import Kind
from support.cases import CASES, randomize_
from support.foreign_norms import FrozenBatchNorm2d


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm writes it: dropout and activation are children, forward is its own."""

    def __init__(self, num_features, drop, act, **options):
        super().__init__(num_features, **options)
        self.drop = drop
        self.act = act

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class InPlaceABN(nn.BatchNorm2d):
    """As inplace_abn writes it: the activation is a name."""

    def __init__(self, num_features, activation):
        super().__init__(num_features)
        self.activation = activation


BATCH = nk.NormSpec(
    kind="batch",
    over=("N", "S"),
    uses="batch",
    scope="local",
    updates="ema",
    affine=True,
    eps=0.02,
    momentum=0.3,
    num_features=5,
    num_groups=None,
    activation=None,
    exact=True,
)

BATCH_NORMS = [nk.BatchNorm1d, nk.BatchNorm2d, nk.BatchNorm3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]


def ident(cls):
    return f"{cls.__module__.split('.')[0]}.{cls.__name__}"


def changed(**fields):
    return dataclasses.replace(BATCH, **fields)


@pytest.mark.parametrize("cls", BATCH_NORMS, ids=ident)
class TestBatchNorm:
    def test_in_training(self, cls):
        assert nk.describe(cls(5, eps=0.02, momentum=0.3)) == BATCH

    def test_in_evaluation(self, cls):
        assert nk.describe(cls(5, eps=0.02, momentum=0.3).eval()) == changed(uses="stored")

    def test_without_affine(self, cls):
        assert nk.describe(cls(5, eps=0.02, momentum=0.3, affine=False)) == changed(affine=False)

    def test_without_bias(self, cls):
        if "bias" not in inspect.signature(cls).parameters:
            pytest.skip(f"torch {torch.__version__} has no bias=False for its batch norms; 2.12 has")
        assert nk.describe(cls(5, eps=0.02, momentum=0.3, bias=False)) == changed(affine="scale")

    def test_without_momentum(self, cls):
        assert nk.describe(cls(5, eps=0.02, momentum=None)) == changed(updates="cumulative", momentum=None)

    @pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
    def test_without_running_statistics(self, cls, training):
        spec = nk.describe(cls(5, eps=0.02, momentum=0.3, track_running_stats=False).train(training))
        assert dataclasses.replace(spec, momentum=None) == changed(updates="never", momentum=None)


@pytest.mark.parametrize("cls", BATCH_NORMS[:3], ids=ident)
@pytest.mark.parametrize("affine", [True, False, "scale", "shift"])
@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu", "silu", "gelu", "sigmoid", "tanh"])
def test_our_options(cls, affine, activation):
    layer = cls(5, eps=0.02, momentum=0.3, affine=affine, activation=activation)
    assert nk.describe(layer) == changed(affine=affine, activation=activation)


def test_position_batch_norm_shares_statistics_over_examples_alone():
    layer = nk.PositionBatchNorm2d(5, 3, 4, eps=0.02, momentum=0.3, affine="shift", activation="tanh")
    assert nk.describe(layer) == changed(over=("N",), affine="shift", activation="tanh")
    assert nk.describe(layer.eval()).uses == "stored"


@pytest.mark.parametrize("dim", [-1, 2, -2])
def test_the_dimension_of_the_channels(dim):
    for cls in BATCH_NORMS[1:3]:
        spec = nk.describe(cls(5, eps=0.02, momentum=0.3, dim=dim))
        assert spec == changed(channel_dim=dim)
        assert spec.channels_in(5) == dim % 5
    assert nk.describe(nn.LayerNorm(6)).channels_in(3) == 2
    assert nk.describe(nk.LayerNorm2d(6)).channels_in(4) == nk.describe(nn.BatchNorm2d(6)).channels_in(4) == 1


@pytest.mark.parametrize("affine", [True, False, "scale", "shift"])
def test_norms_of_the_channels_of_maps(affine):
    expected = nk.NormSpec(
        kind="layer", over=("C",), uses="batch", affine=affine, eps=0.02, num_features=6, channels_first=True
    )
    assert nk.describe(nk.LayerNorm2d(6, 0.02, affine)) == expected
    scales = dataclasses.replace(expected, kind="rms", affine="scale" if affine else False, activation="silu")
    assert nk.describe(nk.RMSNorm2d(6, 0.02, bool(affine), activation="silu")) == scales


@pytest.mark.parametrize(("cls", "kind"), [(nk.DynamicTanh, "dyt"), (nk.Derf, "derf")])
def test_functions_of_single_values(cls, kind):
    expected = nk.NormSpec(kind=kind, over=(), uses="batch", affine=True, eps=None, normalized_shape=(3, 6))
    assert nk.describe(cls((3, 6))) == expected
    second = dataclasses.replace(expected, normalized_shape=None, num_features=6, channels_first=True)
    assert nk.describe(cls(6, False)) == second


def test_sync_batch_norm_is_synced():
    layer = nn.SyncBatchNorm(5, eps=0.02, momentum=0.3)
    assert nk.describe(layer) == changed(scope="synced")
    assert nk.describe(layer.eval()) == changed(scope="synced", uses="stored")


@pytest.mark.parametrize("cls", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d], ids=ident)
@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm(cls, affine):
    expected = nk.NormSpec(kind="instance", over=("S",), uses="batch", affine=affine, eps=0.02, num_features=5)
    plain = cls(5, eps=0.02, momentum=0.3, affine=affine)
    assert nk.describe(plain) == nk.describe(plain.eval()) == expected
    tracked = cls(5, eps=0.02, momentum=0.3, affine=affine, track_running_stats=True)
    assert nk.describe(tracked) == dataclasses.replace(expected, updates="ema", momentum=0.3)
    assert nk.describe(tracked.eval()) == dataclasses.replace(expected, uses="stored", updates="ema", momentum=0.3)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (
            nn.GroupNorm(2, 6, eps=0.02),
            nk.NormSpec(
                kind="group", over=("G", "S"), uses="batch", affine=True, eps=0.02, num_features=6, num_groups=2
            ),
        ),
        (
            nn.GroupNorm(3, 6, eps=0.02, affine=False),
            nk.NormSpec(
                kind="group", over=("G", "S"), uses="batch", affine=False, eps=0.02, num_features=6, num_groups=3
            ),
        ),
        (
            nn.LayerNorm(6, eps=0.02),
            nk.NormSpec(kind="layer", over=("C",), uses="batch", affine=True, eps=0.02, normalized_shape=(6,)),
        ),
        (
            nn.LayerNorm(6, eps=0.02, bias=False),
            nk.NormSpec(kind="layer", over=("C",), uses="batch", affine="scale", eps=0.02, normalized_shape=(6,)),
        ),
        (
            nn.LayerNorm(6, eps=0.02, elementwise_affine=False),
            nk.NormSpec(kind="layer", over=("C",), uses="batch", affine=False, eps=0.02, normalized_shape=(6,)),
        ),
        (
            nn.RMSNorm(6, eps=0.02),
            nk.NormSpec(kind="rms", over=("C",), uses="batch", affine="scale", eps=0.02, normalized_shape=(6,)),
        ),
        (
            nn.RMSNorm(6, elementwise_affine=False),  # its eps is then the type's, which it does not say
            nk.NormSpec(kind="rms", over=("C",), uses="batch", affine=False, eps=None, normalized_shape=(6,)),
        ),
        (
            nn.LocalResponseNorm(3),
            nk.NormSpec(kind="local-response", over=("G",), uses="batch", affine=False, eps=None),
        ),
        (
            nn.CrossMapLRN2d(3),
            nk.NormSpec(kind="local-response", over=("G",), uses="batch", affine=False, eps=None),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, nn.Module) else "",
)
def test_torchs_norms_within_an_example(module, expected, training):
    assert nk.describe(module.train(training)) == expected


@pytest.mark.parametrize("cls", [nn.BatchNorm2d, nk.BatchNorm2d, nn.InstanceNorm2d], ids=ident)
def test_a_momentum_that_weights_nothing_is_none(cls):
    assert nk.describe(cls(5, momentum=0.3, track_running_stats=False)).momentum is None


# What a spec says, against what the module does.
BEHAVING = {
    **{
        f"{ident(cls)}-{name}": lambda cls=cls, options=options: cls(5, **options)
        for cls in (nk.BatchNorm2d, nn.BatchNorm2d, nn.InstanceNorm2d)
        for name, options in {
            "tracked": {"track_running_stats": True},
            "no-momentum": {"track_running_stats": True, "momentum": None},
            "untracked": {"track_running_stats": False},
        }.items()
    },
    "position": lambda: nk.PositionBatchNorm2d(5, 6, 7),
    "group": lambda: nn.GroupNorm(1, 5),
    "layer": lambda: nn.LayerNorm((5, 6, 7)),
    "foreign": lambda: BatchNormAct2d(5, nn.Identity(), nn.Identity()),
}


@pytest.mark.parametrize("name", BEHAVING)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_uses_tells_whether_the_statistics_are_the_inputs_own(name, training):
    module = randomize_(BEHAVING[name]()).double().train(training)
    x = torch.randn(8, 5, 6, 7, dtype=torch.float64)
    # Only statistics of its own take scale and shift out of the input; eps leaves a trace of the order of 1e-5.
    same = torch.allclose(module(x), module(4 * x + 3), rtol=0, atol=1e-2)
    assert same == (nk.describe(module).uses == "batch")


@pytest.mark.parametrize("name", [name for name, build in BEHAVING.items() if hasattr(build(), "running_mean")])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_updates_tells_whether_training_moves_the_statistics(name, training):
    module = randomize_(BEHAVING[name]()).train(training)
    if module.running_mean is None:
        assert nk.describe(module).updates == "never"
        return
    before = module.running_mean.clone()
    module(torch.randn(8, 5, 6, 7) + 2)
    moved = not torch.allclose(module.running_mean, before, atol=1e-5)
    assert moved == (training and nk.describe(module).updates != "never")


OUR_CHILDREN = [
    (nn.ReLU(inplace=True), "relu"),
    (nn.LeakyReLU(), "leaky_relu"),
    (nn.SiLU(), "silu"),
    (nn.GELU(), "gelu"),
    (nn.Sigmoid(), "sigmoid"),
    (nn.Tanh(), "tanh"),
    (nn.ReLU6(), "relu6"),
    (nn.Hardswish(), "hardswish"),
    (nn.LeakyReLU(0.2), "leaky_relu"),
    (nn.GELU(approximate="tanh"), "gelu_tanh"),
]
# Each differs from ours of a like name, in a parameter or in formula.
FOREIGN_CHILDREN = [
    (nn.PReLU(), "PReLU"),
    (nn.ELU(0.5), "ELU"),
    (nn.Softplus(beta=2.0), "Softplus"),
]


class TestForeignSubclass:
    @pytest.mark.parametrize(("act", "name"), OUR_CHILDREN + FOREIGN_CHILDREN, ids=str)
    def test_carries_the_activation_among_its_children(self, act, name):
        layer = BatchNormAct2d(5, nn.Identity(), act, eps=0.02, momentum=0.3)
        assert nk.describe(layer) == changed(activation=name, exact=False)
        assert nk.describe(layer.eval()) == changed(activation=name, exact=False, uses="stored")

    @pytest.mark.parametrize("drop", [nn.Dropout(0.2), nn.Dropout2d(0.2)], ids=str)
    def test_takes_no_dropout_for_an_activation(self, drop):
        layer = BatchNormAct2d(5, drop, nn.ReLU(), eps=0.02, momentum=0.3)
        assert nk.describe(layer) == changed(activation="relu", exact=False)

    def test_may_have_none(self):
        layer = BatchNormAct2d(5, nn.Identity(), nn.Identity(), eps=0.02, momentum=0.3, affine=False)
        assert nk.describe(layer) == changed(activation=None, affine=False, exact=False)

    @pytest.mark.parametrize(("kept", "described"), [("leaky_relu", "leaky_relu"), ("identity", None), (None, None)])
    def test_may_keep_its_activation_as_a_name(self, kept, described):
        spec = nk.describe(InPlaceABN(5, kept))
        assert (spec.kind, spec.activation, spec.exact) == ("batch", described, False)

    def test_of_ours_keeps_our_activation(self):
        class Mine(nk.BatchNorm2d):
            pass

        assert nk.describe(Mine(5, eps=0.02, momentum=0.3, activation="gelu")) == changed(
            activation="gelu", exact=False
        )

    def test_of_other_norms_is_not_exact(self):
        class LayerNorm2d(nn.LayerNorm):
            pass

        expected = nk.NormSpec(
            kind="layer", over=("C",), uses="batch", affine=True, eps=0.02, normalized_shape=(6,), exact=False
        )
        assert nk.describe(LayerNorm2d(6, eps=0.02)) == expected


def test_a_parametrization_is_no_activation():
    layer = nn.BatchNorm2d(5)
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    assert nk.describe(layer).activation is None


class TestFrozen:
    EXPECTED = changed(uses="stored", updates="never", momentum=None, eps=0.02, exact=False)

    @pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
    def test_is_known_by_its_buffers(self, training):
        assert nk.describe(FrozenBatchNorm2d(5, eps=0.02).train(training)) == self.EXPECTED

    def test_may_not_say_its_eps(self):
        assert nk.describe(FrozenBatchNorm2d(5, eps=None)) == dataclasses.replace(self.EXPECTED, eps=None)

    def test_may_count_batches(self):
        layer = FrozenBatchNorm2d(5, eps=0.02)
        layer.register_buffer("num_batches_tracked", torch.tensor(7))
        assert nk.describe(layer) == self.EXPECTED

    def test_may_carry_an_activation(self):
        layer = FrozenBatchNorm2d(5, eps=0.02)
        layer.act = nn.ReLU()
        assert nk.describe(layer) == dataclasses.replace(self.EXPECTED, activation="relu")

    def test_needs_all_four_buffers(self):
        for name in ("weight", "bias", "running_mean", "running_var"):
            layer = FrozenBatchNorm2d(5)
            delattr(layer, name)
            assert nk.describe(layer) is None, name

    def test_has_no_other_buffer(self):
        layer = FrozenBatchNorm2d(5)
        layer.register_buffer("running_max", torch.rand(5))
        assert nk.describe(layer) is None

    def test_has_nothing_to_train(self):
        layer = FrozenBatchNorm2d(5)
        layer.gain = nn.Parameter(torch.rand(5))
        assert nk.describe(layer) is None

    def test_has_nothing_to_train_in_its_children(self):
        layer = FrozenBatchNorm2d(5)
        layer.project = nn.Linear(5, 5)
        assert nk.describe(layer) is None

    def test_has_no_weight_to_train(self):
        layer = FrozenBatchNorm2d(5)
        del layer.weight
        layer.weight = nn.Parameter(torch.rand(5))
        assert nk.describe(layer) is None


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(5, 5),
        nn.Conv2d(5, 5, 3),
        nn.Dropout(0.3),
        nn.Identity(),
        nn.ReLU(),
        nn.Sequential(nn.BatchNorm2d(5)),  # holds a norm, is none
        nn.ModuleList([nk.BatchNorm2d(5)]),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_modules_are_not_norms(module):
    assert nk.describe(module) is None


def test_a_spec_cannot_be_changed():
    spec = nk.describe(nk.BatchNorm2d(5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.eps = 1e-3
    assert hash(spec) == hash(nk.describe(nk.BatchNorm2d(5)))


def test_describing_a_layer_changes_nothing():
    layer = randomize_(nk.BatchNorm2d(5))
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    nk.describe(layer)
    assert layer.training
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


# By property, the kinds that have it; every other kind has it not.
PROPERTIES = {
    "evaluates_as_batch_norm": {"batch", "renorm", "accumulated", "split"},
    "can_fold": {"batch", "renorm", "accumulated", "split", "moving", "instance"},
    "stores_batch_moments": {"batch", "renorm", "accumulated", "split", "switchable", "evo-b0"},
    "stores_instead": {"whitened", "moving", "domain", "instance"},
    "subtracts_mean": {
        *("batch", "renorm", "accumulated", "split", "domain", "whitened", "switchable", "group", "instance", "layer"),
        "weight-standardized",
    },
    "is_over_last": {"layer", "rms", "scale", "dyt", "derf"},
    "moves_affine": {"layer", "rms"},
    "is_replaceable": {
        *("batch", "renorm", "accumulated", "split", "domain", "moving", "whitened", "switchable"),
        *("group", "instance", "filter-response", "layer", "rms", "scale", "dyt", "derf"),
    },
    "statistics_per_example": {"group", "instance", "layer"},
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_kind_allows(case):
    spec = nk.describe(case.build())
    expected = {name: spec.kind in kinds for name, kinds in PROPERTIES.items()}
    if spec.over == ("N",):  # statistics of its own for every position, for which no other norm has room
        expected["is_replaceable"] = False
    if spec.channels_first:  # statistics of its own for every position, however many it is given
        expected["is_over_last"] = expected["statistics_per_example"] = False
    assert {name: bool(getattr(spec, name)) for name in PROPERTIES} == expected
    assert spec.has_gamma is (spec.kind not in {"weight-standardized", "skip-init"})


def test_every_kind_is_that_of_a_layer():
    assert {nk.describe(case.build()).kind for case in CASES} == set(get_args(Kind))


def is_foldable(case):
    spec = nk.describe(case.build().eval())
    return spec.can_fold and spec.uses == "stored" and spec.activation is None and spec.over != ("N",)


@pytest.mark.parametrize("case", [case for case in CASES if is_foldable(case)], ids=str)
def test_what_can_be_folded_is_one_scale_and_shift_for_each_channel(case):
    layer = case.layer(torch.float64, training=False)
    x, step = case.input(torch.float64), torch.zeros(case.shape, dtype=torch.float64)
    step[:, 0] = 1.0
    y, moved, moved_twice = layer(x), layer(x + step), layer(x + 2 * step)
    assert torch.equal(y[:, 1:], moved[:, 1:])
    rounding = 8 * torch.finfo(y.dtype).eps * max(y.abs().max(), moved_twice.abs().max()).item()
    torch.testing.assert_close(moved_twice - moved, moved - y, rtol=0, atol=rounding)


def test_statistics_per_example_are_counted():
    assert nk.describe(nn.GroupNorm(2, 6)).statistics_per_example == 2
    assert nk.describe(nn.InstanceNorm2d(6)).statistics_per_example == 6
    assert nk.describe(nn.LayerNorm(6)).statistics_per_example == 1
