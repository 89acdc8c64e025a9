"""Conversions that lose nothing, those that cannot keep the function, and those that are refused."""

import copy
import pickle
from contextlib import nullcontext
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import normkit as nk
from normkit.surgery.replace.convert import convert
from normkit.surgery.replace.targets import TARGETS
from support.case import randomize_
from support.depth import thinned
from support.foreign_norms import (
    AbsoluteGamma,
    AnotherEps,
    BatchNormAct2d,
    FrozenBatchNorm2d,
    HiddenActivation,
    InFloat32,
    MeanMagnitudeNorm,
    NeedsMore,
    OnlyARename,
    Scattered,
    picture,
    randomized,
    same_picture,
)
from support.warned import warned

INPUTS = {1: (6, 5, 7), 2: (6, 5, 4, 3), 3: (6, 5, 4, 3, 2)}
BATCH = {
    "torch": {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d},
    "normkit": {1: nk.BatchNorm1d, 2: nk.BatchNorm2d, 3: nk.BatchNorm3d},
}
OPTIONS = [
    {"eps": 0.02, "momentum": 0.3},
    {"eps": 0.5, "momentum": None},
    {"affine": False},
    {"track_running_stats": False},
]
EVALUATE_ALIKE = ["sync", "frozen", "renorm", "ghost", "shuffled", "batch"]


def batch_norm(classes, dimensions, **options):
    return randomized(BATCH[classes][dimensions](5, **options))


def outputs(layer, x):
    """In evaluation, then in training, with the statistics afterwards."""
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        seen = [layer.eval()(x), layer.train()(x)]
    return [*seen, *layer.state_dict().values()]


def assert_same(a, b, **tolerance):
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, **(tolerance or {"rtol": 0, "atol": 0}))


# Without loss


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("classes", ["torch", "normkit"])
def test_to_sync_and_back(classes, dimensions, options):
    """The class, all options, every bit of the state and of the outputs, and the very parameters."""
    layer = batch_norm(classes, dimensions, **options).train(dimensions == 2)
    before, parameters, x = picture(layer), list(layer.parameters()), torch.randn(INPUTS[dimensions])
    expected = outputs(layer, x)
    synced = convert(layer, "sync", classes=classes, inplace=True)
    kind = nn.SyncBatchNorm if classes == "torch" else nk.SyncBatchNorm
    assert type(layer) is kind
    assert synced.changed[0].what == f"{BATCH[classes][dimensions].__name__} -> SyncBatchNorm"
    assert [id(p) for p in layer.parameters()] == [id(p) for p in parameters]
    convert(pickle.loads(pickle.dumps(layer)), "batch", classes=classes)  # what it was is not forgotten on disk
    convert(layer, "batch", classes=classes, inplace=True)
    assert same_picture(picture(layer), before)
    assert_same(outputs(layer, x), expected)


@pytest.mark.parametrize("to", EVALUATE_ALIKE)
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_one_function_in_evaluation(to, options):
    layer = batch_norm("torch", 2, **options)
    x = torch.randn(INPUTS[2])
    result = convert(layer, to, example=x)
    new = result.model
    assert result.parity.max_rel < 1e-6
    assert result.parity.first_layer is None
    assert nk.describe(new).eps == layer.eps
    assert new.momentum == layer.momentum
    assert new.training == layer.training
    assert list(new.state_dict()) == list(layer.state_dict())
    assert all(torch.equal(value, layer.state_dict()[key]) for key, value in new.state_dict().items())
    back = convert(new, "batch", classes="torch").model
    assert same_picture(without_identities(picture(back)), without_identities(picture(layer)))
    assert_same(outputs(back, x), outputs(layer, x))


def without_identities(rows):
    """A picture to compare a copy by, whose tensors are others."""
    return [(row[0], *row[2:]) if isinstance(row[-1], torch.Tensor) else row for row in rows]


@pytest.mark.parametrize("affine", ["scale", "shift"])
@pytest.mark.parametrize("classes", ["torch", "normkit"])
def test_half_an_affine_stays_half(affine, classes):
    layer = randomize_(nk.BatchNorm2d(5, affine=affine, eps=0.03))
    x = torch.randn(INPUTS[2])
    for to in ("sync", "batch"):
        done = convert(layer, to, x, classes=classes)
        assert nk.describe(done.model).affine == affine
        assert done.parity is None or done.parity.max_rel < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_are_kept(dtype):
    layer = batch_norm("torch", 2).to(dtype)
    for to in ("sync", "frozen", "group", "instance", "filter-response"):
        new = convert(layer, to).model
        assert {t.dtype for t in new.state_dict().values() if t.is_floating_point()} == {dtype}


def test_mixed_types_are_kept():
    layer = batch_norm("torch", 2)
    layer.weight, layer.bias = (nn.Parameter(p.detach().bfloat16()) for p in (layer.weight, layer.bias))
    new = convert(layer, "sync").model
    assert {k: v.dtype for k, v in new.state_dict().items()} == {k: v.dtype for k, v in layer.state_dict().items()}


def test_options_that_only_some_layers_have_come_back():
    """Through classes that have no place for them."""
    layer = randomize_(nk.GhostBatchNorm2d(5, chunk_size=3, nonfinite="raise", activation="silu"))
    frozen = convert(convert(layer, "sync").model, "frozen").model
    assert frozen.activation == "silu"
    back = convert(frozen, "ghost").model
    assert (back.chunk_size, back.nonfinite, back.activation) == (3, "raise", "silu")
    assert convert(frozen, "ghost", chunk_size=4).model.chunk_size == 4


def test_converting_back_and_forth_does_not_make_a_layer_larger():
    """Layers keep records of what they were; pickling shows all that they keep."""
    layer, sizes = batch_norm("torch", 2), []
    for _ in range(5):
        layer = convert(convert(layer, "sync", only="").model, "frozen").model
        sizes.append(len(pickle.dumps(layer)))
    assert sizes[1:] == sizes[1:2] * 4


def test_statistics_switched_off_later_stay_off():
    layer = batch_norm("torch", 2)
    layer.track_running_stats = False
    x = torch.randn(INPUTS[2])
    new = convert(layer, "sync", classes="torch").model
    assert_same(outputs(new, x), outputs(layer, x))


def test_what_users_hung_on_a_layer_stays():
    layer = batch_norm("torch", 2)
    layer.tag = "stem"
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    convert(layer, "group", inplace=True)
    layer(torch.randn(INPUTS[2]))
    assert layer.tag == "stem"
    assert calls == [1]


def test_an_optimizer_goes_on_with_the_model():
    model = nn.Sequential(nn.Conv2d(3, 5, 1), batch_norm("torch", 2).requires_grad_())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model, "sync", inplace=True)
    before = model[1].weight.clone()
    model(torch.randn(4, 3, 5, 5)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, before)


MAPS, VECTORS = (4, 8, 3, 3), (4, 8)
SOURCES = {
    "batch": (lambda: nn.BatchNorm2d(8, eps=0.02), MAPS),
    "untracked": (lambda: nk.BatchNorm2d(8, track_running_stats=False), MAPS),
    "vectors": (lambda: nn.BatchNorm1d(8, affine=False), VECTORS),
    "sync": (lambda: nn.SyncBatchNorm(8), MAPS),
    "our-sync": (lambda: nk.SyncBatchNorm(8, affine="shift"), VECTORS),
    "frozen": (lambda: nk.FrozenBatchNorm2d(8), MAPS),
    "renorm": (lambda: nk.BatchRenorm2d(8, r_max=2.0), MAPS),
    "ghost": (lambda: nk.GhostBatchNorm2d(8, chunk_size=2), MAPS),
    "accumulated": (lambda: nk.AccumulatedBatchNorm2d(8, micro_batches=2), MAPS),
    "shuffled": (lambda: nk.ShuffledBatchNorm2d(8, chunk_size=2), MAPS),
    "split": (lambda: nk.SplitBatchNorm2d(8), MAPS),
    "group": (lambda: nn.GroupNorm(2, 8), MAPS),
    "our-group": (lambda: nk.GroupNorm(2, 8, affine="scale"), VECTORS),
    "instance": (lambda: nn.InstanceNorm2d(8, affine=True), MAPS),
    "tracked-instance": (lambda: nk.InstanceNorm2d(8, track_running_stats=True, momentum=0.3), MAPS),
    "filter-response": (lambda: nk.FilterResponseNorm2d(8, threshold=False), MAPS),
    "layer": (lambda: nn.LayerNorm(8), VECTORS),
    "layer-without-beta": (lambda: nn.LayerNorm(8, bias=False), VECTORS),
    "rms": (lambda: nn.RMSNorm(8), VECTORS),
    "scale": (lambda: nk.ScaleNorm(8, eps=0.01), VECTORS),
    "domain": (lambda: nk.DomainBatchNorm2d(8, 3, eps=0.02), MAPS),
    "domain-affine": (lambda: nk.DomainBatchNorm2d(8, 3, affine_per_domain=True), MAPS),
    "moving": (lambda: nk.MovingBatchNorm2d(8), MAPS),
    "whitened": (lambda: nk.WhitenedBatchNorm1d(8, group_size=4), VECTORS),
    "switchable": (lambda: nk.SwitchableNorm2d(8), MAPS),
}


WAYS = [(to, "normkit") for to in TARGETS] + [(to, "torch") for to, target in TARGETS.items() if target.torchs]
ORDINARY = {"batch", "untracked", "our-sync", "split", "group", "layer", "domain", "scale", "moving"}
NEEDED = {
    "ghost": {"chunk_size": 2},
    "shuffled": {"chunk_size": 2},
    "accumulated": {"micro_batches": 2},
    "domain": {"num_domains": 2},
}


@pytest.mark.filterwarnings("ignore::normkit.NormkitWarning")  # that a layer cannot be converted
@pytest.mark.parametrize(("to", "classes"), WAYS)
@pytest.mark.parametrize("source", thinned(SOURCES, ORDINARY.__contains__))
def test_any_norm_to_any_norm(source, to, classes):
    """Or a reason; what comes out runs in both modes, with the old gamma, and says truly whether it is the same."""
    build, shape = SOURCES[source]
    layer, x = randomize_(build()), torch.randn(shape) * 2 + 1
    with nk.domain(layer, 1) if source.startswith("domain") else nullcontext():
        done = convert(layer, to, x, classes=classes, only="", **NEEDED.get(to, {}))
    assert len(done.changed) + len(done.skipped) == 1
    if done.changed:
        assert type(done.model).__module__.startswith("torch" if classes == "torch" else "normkit")
        same = "evaluation is the same" in done.changed[0].why
        empty_window = (source, to) == ("untracked", "accumulated")  # as for every first forward
        if done.parity is not None and not empty_window:  # a domain that no batch has updated is not evaluated
            assert same == (done.parity.max_rel < 1e-5)
        for name in ("weight", "bias"):
            old, new = getattr(layer, name, None), getattr(done.model, name, None)
            assert old is None or new is None or old.shape != new.shape or torch.equal(old, new)
        with nk.domain(done.model, 1) if to == "domain" else nullcontext():
            for mode in (True, False):
                assert done.model.train(mode)(x).isfinite().all()


# Where the layers are


@pytest.mark.parametrize("to", ["sync", "group"])
@pytest.mark.parametrize("inplace", [False, True])
def test_wherever_the_layers_are(to, inplace):
    model = randomized(Scattered()).eval()
    for layer in model.every_norm():
        layer.eval()  # torch does not reach those in lists
    x = torch.randn(6, 4, 3, 3)
    original = model(x)
    done = convert(model, to, x, inplace=inplace)
    kind = nk.SyncBatchNorm if to == "sync" else nk.GroupNorm
    assert [type(layer) for layer in done.model.every_norm()] == [kind] * 5
    assert done.model.again is done.model.shared
    assert [change.layer for change in done.changed] == [
        "odd name-1/2",
        "shared",
        "blocks[0]",
        "blocks[1][0]",
        "heads['a']",
    ]
    if to == "sync":
        torch.testing.assert_close(done.model(x), original)
    undone = done.undo()
    assert undone is model
    assert [type(layer) for layer in undone.every_norm()] == [nn.BatchNorm2d] * 5
    assert torch.equal(undone(x), original)


@pytest.mark.filterwarnings("ignore::normkit.NormkitWarning")  # there may be no such norm of vectors, or of maps
@pytest.mark.parametrize("to", TARGETS)
def test_undo_gives_back_every_bit(to):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, momentum=0.2), nn.Flatten(), nn.BatchNorm1d(72))
    randomized(model)
    model[1].eval()
    model[1].register_forward_hook(lambda *_: None)
    model(torch.randn(4, 3, 3, 3)).sum().backward()
    before, gradients = picture(model), [p.grad for p in model.parameters()]
    batches = [torch.randn(4, 3, 3, 3) for _ in range(3)]
    done = convert(model, to, batches[0], calibrate=batches, inplace=True, **NEEDED.get(to, {}))
    assert done.changed
    model.train()
    assert done.undo() is model
    assert same_picture(picture(model), before)
    assert all(a is b for a, b in zip(gradients, [p.grad for p in model.parameters()], strict=True))


@pytest.mark.parametrize("inplace", [False, True])
def test_the_root_itself(inplace):
    layer = batch_norm("torch", 2)
    done = convert(layer, "group", torch.randn(INPUTS[2]), inplace=inplace)
    assert type(done.model) is nk.GroupNorm
    assert (done.model is layer) == inplace
    assert done.changed[0].layer == ""
    assert type(done.undo()) is nn.BatchNorm2d


# Ranks


def test_a_sync_batch_norm_needs_an_example_to_become_a_batch_norm():
    model = nn.Sequential(nn.Conv3d(2, 5, 1), randomize_(nn.SyncBatchNorm(5)))
    done = warned(convert, model, "batch")
    assert done.changed == []
    assert "pass example=" in done.skipped[0].why
    x = torch.randn(3, 2, 4, 4, 4)
    done = convert(model, "batch", x, classes="torch")
    assert type(done.model[1]) is nn.BatchNorm3d
    assert done.parity.max_abs == 0


def test_a_subclass_of_it_needs_one_to_be_tried():
    class Renamed(nn.SyncBatchNorm):
        pass

    layer = randomize_(Renamed(5))
    assert warned(convert, layer, "batch").skipped[0].why.endswith("how many dimensions its inputs have; pass example=")
    assert type(convert(layer, "batch", torch.randn(3, 5, 4, 4)).model) is nk.BatchNorm2d


def test_inputs_of_several_ranks_fit_no_one_class():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.SyncBatchNorm(4)

        def forward(self, x):
            return self.bn(x).sum() + self.bn(x[..., None]).sum()

    done = warned(convert, Both(), "batch", torch.randn(2, 4, 3, 3))
    assert done.skipped[0].why == "its inputs have 4 and 5 dimensions; no one class takes them"
    assert type(convert(Both(), "group", torch.randn(2, 4, 3, 3)).model.bn) is nk.GroupNorm


def test_no_ghost_of_volumes():
    done = warned(convert, batch_norm("torch", 3), "ghost")
    assert done.skipped[0].why == 'there is no "ghost" norm for 3d inputs'


# Somebody else's subclasses


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (nn.ReLU(inplace=True), "relu"),
        (nn.ReLU6(inplace=True), "relu6"),
        (nn.LeakyReLU(0.3), "leaky_relu"),
        (nn.ELU(0.5), "ELU"),
        (nn.PReLU(8), "PReLU"),
        (nn.Identity(), None),
    ],
)
@pytest.mark.parametrize("to", [*EVALUATE_ALIKE, "group"])
def test_an_activation_inside_is_kept(act, name, to):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), randomize_(BatchNormAct2d(8, act, eps=0.01)))
    x = torch.randn(4, 3, 5, 5)
    done = convert(model, to, x)
    assert done.skipped == []
    assert nk.describe(done.model[1]).activation == name
    if to == "group":
        expected = nk.GroupNorm(4, 8, eps=0.01)
        expected.load_state_dict({k: v for k, v in model[1].state_dict().items() if k in ("weight", "bias")})
        torch.testing.assert_close(done.model(x), model[1].act(expected(model[0](x))))
    else:
        assert done.parity.max_rel < 1e-6


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: BatchNormAct2d(8, nn.ReLU(), nn.Dropout(0.5)), "adds behaviour that is not understood"),
        (lambda: HiddenActivation(8), "HiddenActivation adds behaviour that is not understood: BatchNorm2d gives"),
        (lambda: AbsoluteGamma(8), "adds behaviour"),
        (lambda: AnotherEps(8), "adds behaviour"),
        (lambda: NeedsMore(8), "cannot be tried on its own: TypeError"),
    ],
)
@pytest.mark.parametrize("to", ["sync", "frozen", "group"])
def test_what_is_not_understood_is_refused_by_name(layer, reason, to):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), layer())
    before = picture(model)
    state = torch.get_rng_state()
    done = warned(convert, model, to, inplace=True)
    assert done.changed == []
    assert reason in done.skipped[0].why
    assert same_picture(picture(model), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_subclass_that_adds_nothing_is_understood():
    model = nn.Sequential(randomize_(OnlyARename(8)))
    assert type(convert(model, "batch").model[0]) is nk.BatchNorm2d
    done = convert(randomize_(InFloat32(6, eps=0.01)), "layer", torch.randn(3, 4, 6))
    assert type(done.model) is nk.LayerNorm
    assert done.parity.max_rel < 1e-6


def test_a_patched_forward_is_tried():
    def rectified(layer, x):
        return nn.BatchNorm2d.forward(layer, x).relu()

    def logged(layer, x):
        return nn.BatchNorm2d.forward(layer, x)

    model = nn.Sequential(batch_norm("torch", 2))
    model[0].forward = MethodType(rectified, model[0])
    assert "adds behaviour" in warned(convert, model, "sync").skipped[0].why
    model[0].forward = MethodType(logged, model[0])
    assert type(convert(model, "sync").model[0]) is nk.SyncBatchNorm
    plain = model[0].forward
    model[0].forward = lambda x: plain(x).relu()  # of this very layer, not of a copy
    before = picture(model)
    assert "cannot be tried on its own" in warned(convert, model, "sync", inplace=True).skipped[0].why
    assert same_picture(picture(model), before)


def test_computed_weights_are_refused():
    parametrized = parametrizations.weight_norm(nn.Sequential(nn.BatchNorm2d(4))[0])
    pruned = prune.l1_unstructured(nn.BatchNorm2d(4), "weight", 2)
    for layer in (parametrized, pruned):
        assert warned(convert, layer, "sync", inplace=True).changed == []


@pytest.mark.parametrize("eps", [1e-5, None, 0.3])
def test_frozen_norms_of_others(eps):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), FrozenBatchNorm2d(8, eps))
    x = torch.randn(4, 3, 5, 5)
    for to, kind in (("frozen", nk.FrozenBatchNorm2d), ("batch", nk.BatchNorm2d), ("sync", nk.SyncBatchNorm)):
        done = convert(model, to, x, only="1")
        assert type(done.model[1]) is kind
        assert done.parity.max_rel < 1e-6
        assert done.model[1].weight.requires_grad == (to != "frozen")


def test_norms_that_are_not_known_are_named():
    model = nn.Sequential(MeanMagnitudeNorm(4), nn.LocalResponseNorm(2), nk.PositionBatchNorm2d(4, 2, 2))
    done = warned(convert, model, "rms")
    assert [(s.layer, s.what) for s in done.skipped] == [
        ("1", "LocalResponseNorm"),
        ("2", "PositionBatchNorm2d"),
        ("0", "MeanMagnitudeNorm"),
    ]
    assert done.skipped[2].why == "is not a norm we know"


def test_torchs_own_conversion_gives_the_same():
    model = randomized(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, eps=0.01, momentum=None)))
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    ours = convert(model, "sync", classes="torch").model
    x = torch.randn(4, 3, 5, 5)
    assert_same(outputs(ours, x), outputs(theirs, x))
    assert (ours[1].eps, ours[1].momentum) == (theirs[1].eps, theirs[1].momentum)


def test_a_layer_without_a_size_yet():
    model = nn.Sequential(nn.LazyBatchNorm2d())
    assert "run the model once" in warned(convert, model, "sync", inplace=True).skipped[0].why


# Other functions


@pytest.mark.parametrize(
    ("channels", "groups", "shape", "expected"),
    [
        (64, None, None, 32),
        (32, None, None, 16),  # never a channel to a group, unless that is requested
        (32, None, (2, 32, 9, 9), 16),
        (32, 32, (2, 32, 9, 9), 32),
        (32, 32, None, 16),
        (32, 32, (2, 32, 1, 1), 16),
        (64, None, (2, 64, 1, 1), 8),  # of two values to a group, only the order would be left
        (48, 32, None, 24),
        (48, 7, None, 6),
        (7, None, None, 1),
        (1, None, None, 1),
    ],
)
def test_groups_are_never_degenerate(channels, groups, shape, expected):
    layer = randomize_(nn.BatchNorm2d(channels))
    options = {} if groups is None else {"groups": groups}
    done = convert(layer, "group", None if shape is None else torch.randn(shape), **options)
    assert done.model.num_groups == expected
    assert done.changed[0].what == f"BatchNorm2d -> GroupNorm({expected}, {channels})"
    assert done.changed[0].why == f"{channels} channels in groups of {channels // expected}; evaluation differs"
    assert torch.equal(done.model.weight, layer.weight)
    assert torch.equal(done.model.bias, layer.bias)


def test_a_single_value_is_refused():
    one = nn.BatchNorm2d(1)
    for to in ("group", "layer", "instance", "filter-response"):
        done = warned(convert, one, to, torch.randn(4, 1, 1, 1))
        assert done.changed == []
    assert "single value" in warned(convert, nn.BatchNorm1d(1), "group").skipped[0].why
    assert "pass example=" in warned(convert, nn.BatchNorm1d(6), "instance").skipped[0].why
    assert warned(convert, nn.BatchNorm1d(6), "instance", torch.randn(3, 6)).changed == []
    assert type(convert(nn.BatchNorm1d(6), "instance", torch.randn(3, 6, 4)).model) is nk.InstanceNorm1d


def test_layer_norm_of_maps_and_of_vectors():
    maps, vectors = randomize_(nn.BatchNorm2d(6)), randomize_(nn.BatchNorm1d(6))
    x = torch.randn(4, 6, 3, 3)
    of_maps = convert(maps, "layer", classes="torch").model
    assert type(of_maps) is nn.GroupNorm
    expected = nn.functional.layer_norm(x, x.shape[1:], eps=maps.eps) * maps.weight.view(-1, 1, 1)
    torch.testing.assert_close(of_maps(x), expected + maps.bias.view(-1, 1, 1))
    assert type(convert(vectors, "layer", torch.randn(4, 6)).model) is nk.LayerNorm
    assert type(convert(vectors, "layer", torch.randn(4, 6, 3)).model) is nk.GroupNorm
    assert convert(of_maps, "layer", x, classes="torch").skipped[0].why == "is one already"


def test_layer_and_rms_norm_of_sequences():
    layer = randomize_(nn.LayerNorm(6, eps=0.01))
    x = torch.randn(4, 5, 6)
    done = convert(nn.Sequential(layer), "rms", x, classes="torch")
    assert type(done.model[0]) is nn.RMSNorm
    assert "beta dropped" in done.changed[0].why
    torch.testing.assert_close(done.model(x), nn.functional.rms_norm(x, (6,), layer.weight, 0.01))
    back = convert(done.model, "layer", x).model[0]
    torch.testing.assert_close(back(x), nn.functional.layer_norm(x, (6,), layer.weight, None, 0.01))
    for to in ("batch", "group"):
        assert "channels last" in warned(convert, nn.Sequential(layer), to, x).skipped[0].why
        assert "pass example=" in warned(convert, nn.Sequential(layer), to).skipped[0].why
    assert "last dimension" in warned(convert, nn.BatchNorm2d(4), "rms").skipped[0].why


def test_groups_and_instances_that_are_the_same_function():
    x = torch.randn(4, 6, 3, 3)
    for layer, to in ((nn.GroupNorm(6, 6), "instance"), (nn.InstanceNorm2d(6, affine=True), "group")):
        done = convert(randomize_(layer), to, x, **({"groups": 6} if to == "group" else {}))
        assert done.parity.max_rel < 1e-5
        assert "evaluation is the same" in done.changed[0].why
    tracked = randomize_(nn.InstanceNorm2d(6, affine=True, track_running_stats=True))
    done = convert(tracked, "batch", x)
    assert done.parity.max_rel < 1e-6


def test_filter_response_keeps_a_relu_as_its_threshold():
    x = torch.randn(4, 6, 3, 3)
    bare = convert(randomize_(nn.BatchNorm2d(6)), "filter-response").model
    assert bare.tau is None
    thresholded = convert(randomize_(nk.BatchNorm2d(6, activation="relu")), "filter-response").model
    assert thresholded(x).min() >= 0
    assert warned(convert, nk.BatchNorm2d(6, activation="silu"), "filter-response").changed == []
    assert "threshold" in warned(convert, thresholded, "group", x).skipped[0].why
    assert convert(thresholded, "filter-response").skipped[0].why == "is one already"
    learned = convert(randomize_(nn.BatchNorm2d(6)), "filter-response", learnable_eps=True).model
    assert "its learned eps dropped" in convert(learned, "group").changed[0].why


def test_a_model_of_batch_and_other_norms_comes_back_from_sync_as_it_was():
    model = randomized(nn.Sequential(nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.BatchNorm2d(4)))
    before = picture(model)
    convert(model, "sync", classes="torch", inplace=True)
    done = convert(model, "batch", torch.randn(2, 4, 3, 3), classes="torch", inplace=True)
    assert same_picture(picture(model), before)
    assert "no statistics" in done.skipped[0].why
    alone = convert(nn.Sequential(nn.GroupNorm(2, 4)), "batch", torch.randn(2, 4, 3, 3))
    assert type(alone.model[0]) is nk.BatchNorm2d
    assert "of no batch" in alone.changed[0].why


# A function


def test_a_function_chooses():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(8), nn.Identity())
    randomized(model)
    done = convert(model, lambda spec: nn.GroupNorm(2, spec.num_features) if spec.num_features > 4 else None)
    assert type(done.model[1]) is nn.GroupNorm
    assert torch.equal(done.model[1].weight, model[1].weight)
    assert done.skipped == [("0", "BatchNorm2d", "the function returned None")]
    assert type(convert(model, lambda spec: nn.Identity()).model[0]) is nn.Identity


def test_a_function_does_not_drop_an_activation():
    model = nn.Sequential(BatchNormAct2d(4, nn.ReLU()))
    assert "would become None" in warned(convert, model, lambda spec: nn.GroupNorm(2, 4)).skipped[0].why
    done = convert(model, lambda spec: nk.GroupNorm(2, 4, activation=spec.activation))
    assert done.model[0].activation == "relu"


def test_what_a_function_may_not_return():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    one = nn.GroupNorm(2, 4)
    with pytest.raises(nk.ArgumentError, match="one module for two layers"):
        convert(model, lambda spec: one)
    with pytest.raises(nk.ArgumentError, match=r"must return a torch.nn.Module or None; got a int"):
        convert(model, lambda spec: 3)
    with pytest.raises(nk.ArgumentError, match="got the options eps as well"):
        convert(model, lambda spec: None, eps=1e-3)


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "grup"}, r'got \'grup\'. Did you mean "group"'),
        ({"to": 3}, "or a function of a NormSpec; got 3"),
        ({"to": "sync", "classes": "tensorflow"}, 'classes must be "normkit" or "torch"'),
        ({"to": "frozen", "classes": "torch"}, 'torch has no class for "frozen", only for "batch", "sync"'),
        (
            {"to": "ghost", "chunksize": 3},
            "takes the options eps, momentum, chunk_size, nonfinite; got chunksize=3. Did",
        ),
        ({"to": "batch", "classes": "torch", "nonfinite": "raise"}, "takes the options eps, momentum; got"),
        ({"to": "group", "groups": 0}, "groups must be a number from 1 on"),
        ({"to": "renorm", "r_max": 0.5}, "r_max must be at least 1"),
        ({"to": "batch", "eps": -1.0}, "eps must be positive"),
        ({"to": "group", "calibrate": []}, "there are no batches"),
        ({"to": "group", "calibrate": torch.ones(2)}, "must be an iterable of batches"),
    ],
)
def test_bad_arguments(arguments, message):
    model = nn.Sequential(batch_norm("torch", 2))
    before = picture(model)
    with pytest.raises(nk.ArgumentError, match=message):
        convert(model, **arguments, inplace=True)
    assert same_picture(picture(model), before)


def test_failures_leave_the_model_alone():
    model = nn.Sequential(nn.Conv2d(3, 5, 1), batch_norm("torch", 2))
    before = picture(model)
    good = torch.randn(2, 3, 4, 4)
    with pytest.raises(nk.NormkitError, match=r"does not run on the example \(\(2, 7, 4, 4\)\)"):
        convert(model, "group", torch.randn(2, 7, 4, 4), inplace=True)
    with pytest.raises(nk.NormkitError, match="does not run"):
        convert(model, "group", good, calibrate=[good, torch.randn(2, 7, 4, 4)], inplace=True)
    with pytest.raises(nk.ArgumentError, match=r"model must be a torch.nn.Module; got a int"):
        convert(3, "group")
    assert same_picture(picture(model), before)


def test_options_of_the_old_layer_that_ours_refuse_are_a_reason():
    model = nn.Sequential(nn.BatchNorm2d(4, eps=0.0), nn.BatchNorm2d(4))
    done = warned(convert, model, "sync")
    assert "eps must be positive" in done.skipped[0].why
    assert len(done.changed) == 1


def test_already_what_is_asked_for():
    model = nn.Sequential(nk.BatchNorm2d(4), nn.BatchNorm2d(4))
    done = convert(model, "batch")
    assert [s.why for s in done.skipped] == ["is one already"]
    assert done.changed[0].what == "torch BatchNorm2d -> normkit BatchNorm2d"
    changed = convert(model, "batch", momentum=0.4).model
    assert [layer.momentum for layer in changed] == [0.4, 0.4]
    assert convert(nn.GroupNorm(2, 8), "group", classes="torch").skipped[0].why == "is one already"
    assert convert(nn.GroupNorm(2, 8), "group", classes="torch", groups=4).model.num_groups == 4
