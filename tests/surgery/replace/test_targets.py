"""The targets that keep statistics in a form of their own, or take the place of more than a norm."""

import copy
from math import sqrt

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.surgery.replace.convert import convert
from normkit.surgery.replace.freeze import freeze
from normkit.surgery.replace.targets import TARGETS
from support.case import randomize_
from support.foreign_norms import BatchNormAct2d, FrozenBatchNorm2d, picture, randomized, same_picture
from support.warned import warned

X = torch.randn(6, 8, 5, 4) * 2 + 1
NEEDED = {"accumulated": {"micro_batches": 2}, "domain": {"num_domains": 3}}


def batch_norm(**options):
    return randomize_(nn.BatchNorm2d(8, eps=0.02, momentum=0.3, **options))


@pytest.mark.parametrize("to", ["accumulated", "split", "shuffled", "domain", "whitened", "position"])
@pytest.mark.parametrize("affine", [True, False])
def test_one_function_in_evaluation(to, affine):
    layer = batch_norm(affine=affine)
    done = convert(nn.Sequential(layer), to, X, **NEEDED.get(to, {}))
    assert done.parity.max_rel < 1e-6
    assert "evaluation is the same" in done.changed[0].why
    new = done.model[0]
    assert (new.eps, new.momentum, new.training) == (0.02, 0.3, layer.training)
    assert (new.num_batches_tracked == layer.num_batches_tracked).all()


def test_accumulated_keeps_the_very_tensors():
    layer = batch_norm()
    parameters = [layer.weight, layer.bias]
    convert(layer, "accumulated", micro_batches=4, inplace=True)
    assert type(layer) is nk.AccumulatedBatchNorm2d
    assert layer.micro_batches == 4
    assert all(a is b for a, b in zip(parameters, layer.parameters(), strict=True))
    assert type(convert(layer, "batch", classes="torch").model) is nn.BatchNorm2d


@pytest.mark.parametrize(("dims", "shape"), [(1, (6, 8)), (2, (6, 8, 3, 2)), (3, (6, 8, 2, 3, 2))])
def test_accumulated_and_domain_norms_of_all_ranks(dims, shape):
    layer = randomize_(getattr(nn, f"BatchNorm{dims}d")(8, eps=0.02))
    x = torch.randn(shape)
    for to, name in (("accumulated", "AccumulatedBatchNorm"), ("domain", "DomainBatchNorm")):
        done = convert(nn.Sequential(layer), to, x, **NEEDED[to])
        assert type(done.model[0]) is getattr(nk, f"{name}{dims}d")
        assert done.parity.max_rel < 1e-6


def test_split_starts_with_copies_of_the_old_norm():
    layer = batch_norm()
    layer.bias.requires_grad_(False)
    before = copy.deepcopy(layer.state_dict())
    model = nn.Sequential(layer)
    done = convert(model, "split", X, num_splits=3, inplace=True)
    assert type(layer) is nk.SplitBatchNorm2d
    assert "every part of a batch starts with the same" in done.changed[0].why
    assert (layer.momentum, layer.aux_bn[1].eps, layer.aux_bn[1].momentum) == (0.3, 0.02, 0.3)
    for part in (layer, *layer.aux_bn):
        assert all(torch.equal(part.state_dict()[name], t) for name, t in before.items())
        assert [p.requires_grad for p in part.parameters(recurse=False)] == [True, False]
    model.train()(X)
    states = [part.running_mean for part in (layer, *layer.aux_bn)]
    assert len({tuple(mean.tolist()) for mean in states}) == 3  # none of them shares memory with another
    done.undo()
    assert type(layer) is nn.BatchNorm2d
    assert list(layer.state_dict()) == list(before)


def test_a_split_norm_becomes_its_first_norm():
    layer = randomize_(nk.SplitBatchNorm2d(8, eps=0.02, activation="relu")).eval()
    model = nn.Sequential(nn.Conv2d(8, 8, 1), layer).eval()
    done = convert(model, "batch", X)
    assert [change.layer for change in done.changed] == ["1"]  # its parts are not layers of their own
    assert "its auxiliary norms dropped" in done.changed[0].why
    assert done.parity.max_rel < 1e-6
    assert torch.equal(done.model[1].running_mean, layer.running_mean)
    assert "is one already" in convert(model, "split", num_splits=2).skipped[0].why
    assert convert(model, "split", X, num_splits=4).model[1].num_splits == 4
    assert nk.fold(model, example=X).parity.max_rel < 1e-5
    assert nk.recalibrate(model, [X, X + 1]).skipped == []


def test_a_frozen_split_norm_comes_back_whole():
    model = nn.Sequential(randomize_(nk.SplitBatchNorm2d(8, num_splits=3)))
    before = picture(model)
    frozen = freeze(model, inplace=True)
    assert [change.layer for change in frozen.changed] == ["0"]
    assert type(model[0]) is nk.FrozenBatchNorm2d
    nk.unfreeze(model, inplace=True)
    assert type(model[0]) is nk.SplitBatchNorm2d
    assert same_picture(picture(model), before)


def test_each_domain_may_have_a_gamma_and_beta_of_its_own():
    layer = batch_norm()
    layer.bias.requires_grad_(False)
    done = convert(nn.Sequential(layer), "domain", X, num_domains=3, affine_per_domain=True)
    new = done.model[0]
    assert done.parity.max_rel < 1e-6
    assert new.weight.shape == new.bias.shape == (3, 8)
    assert (new.weight == layer.weight).all()
    assert (new.weight.requires_grad, new.bias.requires_grad) == (True, False)
    randomize_(new)
    with nk.domain(done.model, 2):
        back = convert(done.model, "batch", X)
        assert back.parity.max_rel < 1e-6
    assert torch.equal(back.model[0].weight, new.weight[2])
    assert [p.requires_grad for p in back.model.parameters()] == [True, False]
    assert not any(back.model[0].weight is p for p in done.model.parameters())


def test_every_domain_starts_with_the_old_statistics():
    layer = batch_norm()
    model = convert(nn.Sequential(layer), "domain", num_domains=3).model
    expected = layer.eval()(X)
    for k in range(3):
        with nk.domain(model, k):
            torch.testing.assert_close(model.eval()(X), expected)
    with nk.domain(model, 1):
        model.train()(X + 5)
    moved = [not torch.equal(mean, layer.running_mean) for mean in model[0].running_mean]
    assert moved == [False, True, False]


def test_a_domain_norm_becomes_a_batch_norm_of_the_domain_that_is_set():
    layer = randomize_(nk.DomainBatchNorm2d(8, 3, eps=0.02, activation="silu", nonfinite="raise"))
    model = nn.Sequential(layer)
    assert "statistics of 3 domains; choose one" in warned(convert, model, "batch").skipped[0].why
    for k in range(3):
        with nk.domain(model, k):
            done = convert(model, "batch", X)
        new = done.model[0]
        assert type(new) is nk.BatchNorm2d
        assert (new.activation, new.nonfinite, new.eps) == ("silu", "raise", 0.02)
        assert torch.equal(new.running_var, layer.running_var[k])
        assert new.num_batches_tracked == layer.num_batches_tracked[k]
        assert done.parity.max_rel < 1e-6
        assert done.undo() is model
    with nk.domain(model, 2):
        assert type(convert(model, "frozen").model[0]) is nk.FrozenBatchNorm2d
        assert (convert(model, "domain", num_domains=2).model[0].running_mean == layer.running_mean[2]).all()
    layer.domain = 7
    assert "domains 0 to 2, and is set to 7" in warned(convert, model, "batch").skipped[0].why
    assert "is one already" in convert(model, "domain", num_domains=3).skipped[0].why


def test_a_norm_that_no_batch_has_updated_becomes_a_domain_norm_that_says_so():
    """Its domains refuse to be evaluated, as they always do before the first batch."""
    done = convert(nn.Sequential(nn.BatchNorm2d(8)), "domain", X, num_domains=2)
    assert done.parity is None
    assert "no batch has ever updated its statistics" in done.changed[0].why
    frozen = convert(nn.Sequential(FrozenBatchNorm2d(8)), "domain", X, num_domains=2)
    assert frozen.parity.max_rel < 1e-6  # statistics that nobody counted


def test_moving_stores_the_mean_square():
    layer = batch_norm()
    new = convert(layer, "moving", buffer_size=4, warmup=2).model
    square = layer.running_var + layer.running_mean.square()
    torch.testing.assert_close(new.running_var, square)
    assert (new.buffer_size, new.warmup, new.num_batches_tracked) == (4, 2, 0)
    scale = layer.weight / (square + 0.02).sqrt()
    expected = X * scale.view(-1, 1, 1) + layer.bias.view(-1, 1, 1)
    torch.testing.assert_close(new.eval()(X), expected)


@pytest.mark.parametrize(("asked", "size"), [(None, 8), (8, 8), (5, 4), (3, 2), (100, 8)])
def test_channels_are_whitened_in_groups_that_divide_them(asked, size):
    layer = batch_norm()
    options = {} if asked is None else {"group_size": asked}
    done = convert(layer, "whitened", X, method="zca", **options)
    assert (done.model.group_size, done.model.method) == (size, "zca")
    assert done.parity.max_rel < 1e-6
    assert convert(done.model, "whitened", X, **options).skipped[0].why == "is one already"


def test_a_whitened_norm_trains_away_from_the_diagonal():
    model = convert(nn.Sequential(batch_norm()), "whitened").model.train()
    mixed = X + X.roll(1, 1)
    model(mixed)
    whitener = model[0].running_whitener[0]
    assert (whitener - whitener.diag().diag()).abs().max() > 1e-3


def test_switchable_takes_the_batch_part():
    layer = batch_norm()
    new = convert(layer, "switchable").model
    twin = nk.SwitchableNorm2d(8, eps=0.02)
    twin.load_state_dict(twin.state_dict() | layer.state_dict())
    torch.testing.assert_close(new.eval()(X), twin.eval()(X))


def test_positions_start_alike_and_learn_apart():
    layer = batch_norm()
    layer.bias.requires_grad_(False)
    new = convert(layer, "position", X).model
    assert new.weight.shape == (8, 5, 4)
    assert (new.weight.requires_grad, new.bias.requires_grad) == (True, False)
    torch.testing.assert_close(new.eval()(X), layer.eval()(X))
    new.train()(X).square().mul(torch.randn(X.shape)).sum().backward()
    assert (new.weight.grad.flatten(1).std(1) > 0).all()

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = batch_norm()

        def forward(self, x):
            return self.bn(x).sum() + self.bn(x[..., 1:]).sum()

    done = warned(convert, Both(), "position", X)
    assert (
        "maps of one size, to have parameters for each position; the example shows 5x3 and 5x4" in done.skipped[0].why
    )


def test_scale_norm_has_gammas_length():
    layer = randomize_(nn.LayerNorm(8, eps=0.01))
    x = torch.randn(3, 5, 8)
    done = convert(nn.Sequential(layer), "scale", x)
    new = done.model[0]
    torch.testing.assert_close(new.weight, layer.weight.norm().reshape(1))
    assert "beta dropped" in done.changed[0].why
    root = (x.square().mean(-1, keepdim=True) + 0.01).sqrt()
    torch.testing.assert_close(new(x), x / root * layer.weight.norm() / sqrt(8))
    back = convert(done.model, "rms", x)
    assert back.parity.max_rel < 1e-6
    assert "evaluation is the same" in back.changed[0].why
    assert "over several" in warned(convert, nn.Sequential(nn.LayerNorm((5, 8))), "scale", x).skipped[0].why
    assert "the last dimension" in warned(convert, nn.BatchNorm2d(8), "scale").skipped[0].why


SOURCES = {
    "layer": (lambda: nn.LayerNorm(8), (3, 5, 8), True),
    "rows": (lambda: nk.RMSNorm(8, activation="silu"), (6, 8), True),
    "several": (lambda: nn.LayerNorm((5, 8)), (3, 5, 8), True),
    "batch": (lambda: nn.BatchNorm2d(8), (3, 8, 5, 4), False),
    "maps": (lambda: nk.LayerNorm2d(8), (3, 8, 5, 4), False),
    "sequences": (lambda: nn.InstanceNorm1d(8, affine=True), (3, 8, 5), False),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("to", "function"), [("dyt", torch.tanh), ("derf", torch.erf)])
def test_functions_of_single_values(to, function, source):
    build, shape, is_last = SOURCES[source]
    model, x = randomized(nn.Sequential(build(), nn.Identity())), torch.randn(shape)
    before, (gamma, activation) = picture(model), (model[0].weight, nk.describe(model[0]).activation)
    beta = getattr(model[0], "bias", None)
    done = convert(model, to, x, inplace=True, alpha_init_value=0.7)
    new = model[0]
    assert (new.channels_last, new.alpha.item(), nk.describe(new).activation) == (
        is_last,
        pytest.approx(0.7),
        activation,
    )
    assert new.weight is gamma
    assert beta is None or new.bias is beta
    assert "evaluation differs" in done.changed[0].why
    view = (-1,) if is_last and gamma.dim() == 1 else gamma.shape if is_last else (1, 8, *[1] * (len(shape) - 2))
    expected = function(0.7 * x) * gamma.reshape(view)
    expected = expected if beta is None else expected + beta.reshape(view)
    expected = expected if activation is None else torch.nn.functional.silu(expected)
    torch.testing.assert_close(new(x), expected, rtol=1e-5, atol=1e-5)
    assert done.undo() is model
    assert same_picture(before, picture(model))


def test_fitted_functions_of_single_values_are_the_nearest_there_are():
    layer, x = randomize_(nn.LayerNorm(8)), torch.randn(64, 8) * 2
    copied, fitted = (convert(nn.Sequential(layer), "dyt", x, calibrate=batches) for batches in (None, [x]))
    with torch.no_grad():
        errors = [(done.model(x) - layer(x)).square().mean() for done in (fitted, copied)]
    assert errors[0] < errors[1]
    assert "variance explained" in fitted.changed[0].why


def test_the_way_back_drops_alpha():
    layer, x = randomize_(nk.Derf(8, False, activation="relu")), torch.randn(3, 8, 5, 4)
    done = convert(nn.Sequential(layer), "layer", x)
    assert type(done.model[0]) is nk.LayerNorm2d
    assert "its alpha and its shift dropped" in done.changed[0].why
    assert torch.equal(done.model[0].weight, layer.weight)
    assert type(convert(nk.DynamicTanh(8), "rms").model) is nk.RMSNorm
    other = convert(nk.DynamicTanh(8, alpha_init_value=0.9), "derf").model
    assert (type(other), other.alpha_init_value) == (nk.Derf, 0.9)
    assert "is one already" in convert(nk.DynamicTanh(8), "dyt").skipped[0].why


def test_evo_norms_are_their_own_activation():
    plain, active = batch_norm(), randomize_(BatchNormAct2d(8, nn.SiLU(), eps=0.02))
    for to in ("evo-b0", "evo-s0"):
        done = convert(nn.Sequential(plain, active), to, X)
        assert "take out the one that follows" in done.changed[0].why
        assert "in place of silu too" in done.changed[1].why
        for old, new in zip((plain, active), done.model, strict=True):
            assert type(new) is (nk.EvoNormB0 if to == "evo-b0" else nk.EvoNormS0)
            assert torch.equal(old.weight, new.weight)
            assert not hasattr(new, "act")
            if to == "evo-b0":
                assert torch.equal(new.running_var, old.running_var)
        assert "its own activation" in warned(convert, done.model, "batch").skipped[0].why
    assert convert(batch_norm(), "evo-s0", X, groups=3).model.groups == 2


def test_calibrated_evo_norms_come_close_to_norm_and_activation():
    layer = randomize_(nk.BatchNorm2d(8, activation="relu")).double()
    x = X.double()
    copied = convert(layer, "evo-s0", x)
    fitted = convert(layer, "evo-s0", x, calibrate=[x[:2], x[2:]])
    gap = [(done.model(x) - layer.eval()(x)).square().mean() for done in (copied, fitted)]
    assert gap[1] < gap[0]


@pytest.mark.parametrize(
    "to", ["accumulated", "split", "domain", "whitened", "position", "moving", "switchable", "evo-b0"]
)
def test_statistics_for_norms_that_had_none(to):
    layer = randomize_(nn.GroupNorm(2, 8)).double()
    batches = [X[:4].double(), X[4:].double()]
    done = convert(nn.Sequential(layer), to, batches[0], calibrate=batches, **NEEDED.get(to, {}))
    values = X.double().transpose(0, 1).flatten(1)
    new = done.model[0]
    if to == "moving":
        torch.testing.assert_close(new.running_var, values.var(1) + values.mean(1).square())
    elif to == "whitened":
        torch.testing.assert_close(new.running_mean, values.mean(1))
    else:
        kept = {"domain": lambda t: t[1], "position": lambda t: t[:, 2, 3]}.get(to, lambda t: t)(new.running_var)
        torch.testing.assert_close(kept, values.var(1))
    assert ("fitted" in done.changed[0].why) == (to in ("accumulated", "split", "domain", "whitened", "position"))
    if to == "split":
        assert torch.equal(new.aux_bn[0].weight, new.weight)
        assert torch.equal(new.aux_bn[0].running_var, new.running_var)
    alone = convert(nn.Sequential(layer), to, batches[0], **NEEDED.get(to, {}))
    assert "of no batch" in alone.changed[0].why


def test_one_length_is_fitted_for_all_channels():
    layer = randomize_(nn.LayerNorm(8)).double()
    x = torch.randn(7, 5, 8).double()
    done = convert(nn.Sequential(layer), "scale", calibrate=[x[:3], x[3:]])
    unit = nn.functional.normalize(x, dim=-1)
    y = layer(x).detach()
    torch.testing.assert_close(
        done.model[0].weight.detach()[0], (unit * y).sum() / unit.square().sum(), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("source", [nk.MovingBatchNorm2d, nk.WhitenedBatchNorm2d, nk.SwitchableNorm2d])
def test_what_other_norms_have_no_place_for_is_dropped_and_said(source):
    layer = randomize_(source(8, eps=0.02))
    done = convert(layer, "group", X)
    assert type(done.model) is nk.GroupNorm
    assert torch.equal(done.model.weight, layer.weight)
    assert " dropped" in done.changed[0].why

    class Other(source):
        pass

    assert "has state that no other norm has a place for" in warned(convert, Other(8), "group", X).skipped[0].why


def test_a_switchable_norm_is_not_frozen_at_its_statistics_alone():
    layer = randomize_(nk.SwitchableNorm2d(8))
    assert "more than the statistics" in warned(convert, layer, "frozen", X).skipped[0].why
    assert type(convert(layer, "batch", X).model) is nk.BatchNorm2d
    assert "only batch norms freeze" in warned(freeze, layer).skipped[0].why


# Which layers are meant


def mixed():
    return randomized(
        nn.Sequential(
            nn.BatchNorm2d(8), nn.GroupNorm(2, 8), FrozenBatchNorm2d(8), nk.BatchRenorm2d(8), nk.GroupNorm(1, 8)
        )
    )


@pytest.mark.parametrize(("to", "expected"), [("sync", ["0", "3"]), ("frozen", ["0", "2", "3"])])
def test_sync_and_frozen_take_layers_with_batch_statistics(to, expected):
    """Without a warning: of the others nothing was asked."""
    done = convert(mixed(), to, X)
    assert [change.layer for change in done.changed] == expected
    assert done.parity.max_rel < 1e-6
    assert done.skipped[0] == (
        "1",
        "GroupNorm(2, 8)",
        f'"{to}" is for layers with batch statistics; only= may name others',
    )
    without = randomized(nn.Sequential(nn.GroupNorm(2, 8), nn.LayerNorm(4)))
    before = picture(without)
    assert convert(without, to, X, inplace=True).changed == []
    assert same_picture(picture(without), before)


def test_others_are_taken_when_they_are_named():
    done = convert(mixed(), "sync", X, only=["1", "2"])
    assert [type(layer) for layer in done.model][1:3] == [nk.SyncBatchNorm] * 2
    assert "was frozen, and trains from now on" in done.changed[1].why
    block = nn.ModuleDict({"a": mixed()[:2], "b": mixed()[1:2]})
    assert [change.layer for change in convert(block, "sync", only="a").changed] == ["a.0"]
    assert [change.layer for change in convert(block, "sync", only="a.*").changed] == ["a.0", "a.1"]
    assert [change.layer for change in convert(block, "sync", only="b").changed] == ["b.1"]  # nothing else can be meant
    with pytest.warns(nk.NormkitWarning, match=r"1: it stores no statistics to freeze"):
        convert(mixed(), "frozen", only="1")


def test_what_was_asked_for_and_left_is_said():
    model = nn.Sequential(nn.BatchNorm2d(8), nn.LayerNorm(4), nk.ScaledStdConv2d(8, 8, 1), nk.BatchNorm2d(8))
    with pytest.warns(nk.NormkitWarning, match=r"A layer that .*\n  1: it normalizes the last dimension") as caught:
        convert(model, "group")
    assert len(caught) == 1  # of the convolution, which is no norm to replace, nothing is said
    assert convert(model, "group", skip="1").changed
    assert convert(model, "batch").skipped[0].why.startswith("it stores no statistics, unlike the batch norms")


def test_many_layers_with_one_reason_are_one_line():
    with pytest.warns(nk.NormkitWarning) as caught:
        convert(nn.Sequential(*[nn.LayerNorm(4) for _ in range(9)]), "group")
    lines = str(caught[0].message).splitlines()
    assert lines[0].startswith("9 layers that were asked for are left as before")
    assert lines[1].startswith("  0, 1, 2, 3, 4, 5 and 3 more: it normalizes")
    assert len(lines) == 2


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "accumulated"}, r'convert to "accumulated" needs micro_batches=, the forwards between'),
        ({"to": "accumulated", "micro_batches": 0}, "micro_batches must be at least 1; got 0"),
        ({"to": "accumulated", "micro_batches": "two"}, "cannot make a layer with micro_batches='two'"),
        ({"to": "domain"}, "needs num_domains=, the number of domains; got none"),
        ({"to": "domain", "num_domains": 0}, "num_domains must be at least 1; got 0"),
        ({"to": "domain", "num_domains": 2.5}, r"cannot make a layer with num_domains=2\.5"),
        (
            {"to": "domain", "domains": 2},
            r"takes the options .*num_domains.*got domains=2. Did you mean \"num_domains\"\?",
        ),
        ({"to": "domain", "num_domains": 2, "affine_per_domian": True}, r"Did you mean \"affine_per_domain\"\?"),
        ({"to": "split", "num_splits": 1}, "num_splits must be a number of parts, 2 or more; got 1"),
        ({"to": "split", "splits": 2}, r"Did you mean \"num_splits\"\?"),
        ({"to": "shuffled", "chunk_size": 0}, "chunk_size must be at least 1"),
        ({"to": "renorm", "warmup_steps": -1}, "warmup_steps must be a number of batches"),
        pytest.param(
            {"to": "renorm", "warmup_steps": 2, "schedule": nk.renorm_schedule(9)},
            "both set the first limits",
            id="two first limits",  # a function's address is another in every process
        ),
        ({"to": "moving", "buffer_size": 0}, "buffer_size must be at least 1"),
        ({"to": "moving", "warmup": -1}, "warmup must be a number of batches"),
        ({"to": "whitened", "method": "pca"}, "method must be .*; got 'pca'"),
        ({"to": "whitened", "group_size": 0}, "group_size must be a number from 1 on, the most channels"),
        ({"to": "whitened", "iterations": 0}, "iterations must be at least 1"),
        ({"to": "switchable", "groups": 2}, "takes the options eps, momentum; got groups=2"),
        ({"to": "position"}, r'"position" needs example=, to see the height and width'),
        ({"to": "position", "height": 3}, "takes the options eps, momentum, nonfinite; got height=3"),
        ({"to": "scale", "momentum": 0.1}, "takes the options eps; got momentum"),
        ({"to": "dyt", "eps": 1e-5}, "takes the options alpha_init_value; got eps"),
        ({"to": "derf", "shift_init_value": float("nan")}, "shift_init_value must be a finite number; got nan"),
        ({"to": "dyt", "classes": "torch"}, 'torch has no class for "dyt"'),
        ({"to": "evo-b0", "eps": 0.0}, "eps must be positive"),
        ({"to": "evo-s0", "groups": 1.5}, "groups must be a number from 1 on"),
        ({"to": "evo"}, r"Did you mean \"evo-..\"\?"),
        ({"to": "domain", "num_domains": 2, "classes": "torch"}, 'torch has no class for "domain"'),
    ],
    ids=str,
)
def test_bad_arguments(arguments, message):
    model = nn.Sequential(batch_norm())
    before = picture(model)
    with pytest.raises(nk.ArgumentError, match=message):
        convert(model, **arguments, inplace=True)
    assert same_picture(picture(model), before)


@pytest.mark.parametrize("to", TARGETS)
def test_copies_of_what_was_converted(to):
    """Hooks, pickles and deep copies find a whole layer, whose parameters get gradients."""
    layer = nn.LayerNorm(8) if to in ("rms", "scale") else batch_norm()
    x = torch.randn(4, 8) if to in ("rms", "scale") else X
    model = convert(nn.Sequential(layer), to, x, **NEEDED.get(to, {})).model
    twin = copy.deepcopy(model).train()
    if to == "domain":
        twin[0].domain = 0
    y = twin(x)
    assert y.shape == x.shape
    if to != "frozen":
        y.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in twin.parameters())
