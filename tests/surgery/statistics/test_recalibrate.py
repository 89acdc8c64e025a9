"""Stored statistics become the population's, whatever the batches and the model; and nothing else changes."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import normkit as nk
from normkit.surgery.statistics.collect import BatchError
from normkit.surgery.statistics.recalibrate import recalibrate
from support.case import randomize_
from support.model_state import assert_same, everything
from support.population_baselines import distance, errors, float64_population, uneven_batches
from support.warned import warned


def net():
    """Norms of several kinds, with all state random; dropout, which must be off."""
    layers = [
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6, eps=1e-3, momentum=0.3),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(6, 8, 3),
        nk.BatchNorm2d(8, activation="relu", momentum=None),
        nk.GhostBatchNorm2d(8, chunk_size=64),
        nn.Conv2d(8, 5, 1),
        nk.BatchRenorm2d(5, eps=1e-4),
        nk.AccumulatedBatchNorm2d(5, micro_batches=3),
        nn.Flatten(),
        nn.Linear(80, 4),
        nk.SyncBatchNorm(4),
        nn.SyncBatchNorm(4),
        nk.BatchNorm1d(4, affine=False),
    ]
    return randomize_(nn.Sequential(*layers))


def plain_net():
    """Torch's layers alone, which every contestant knows."""
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, eps=1e-3, momentum=0.3), nn.ReLU(), nn.Dropout(0.5)]
    layers += [nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Flatten()]
    layers += [nn.Linear(128, 4), nn.BatchNorm1d(4)]
    return randomize_(nn.Sequential(*layers))


def statistics(model):
    return {key: value.clone() for key, value in model.state_dict().items() if "running" in key or "tracked" in key}


def pooled(batches, dims=(0, 2, 3)):
    whole = torch.cat([x.double() for x in batches])
    return whole.mean(dims), whole.var(dims, unbiased=True)


# ---- what is stored


@pytest.mark.parametrize("moving", [0.0, 1.0])
def test_recalibrate_has_the_population_and_the_usual_ways_do_not(moving):
    found = errors(plain_net(), uneven_batches(moving=moving))
    assert max(found["recalibrate"].values()) < 1e-5
    for name in ("update_bn", "PreciseBN, equal weights"):
        assert min(found[name].values()) > 1e-4
        assert max(found[name].values()) > 1e-2


def plain_twin(model):
    """Torch's BatchNorm with the same gamma and beta for every norm, followed by the activation that it has."""
    twin = nn.Sequential()
    for layer in copy.deepcopy(model):
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            twin.append(layer)
            continue
        is_flat = isinstance(layer, nn.BatchNorm1d) or "Sync" in type(layer).__name__
        bn = (nn.BatchNorm1d if is_flat else nn.BatchNorm2d)(layer.num_features, eps=layer.eps)
        if layer.weight is not None:
            bn.weight.data, bn.bias.data = layer.weight.data, layer.bias.data
        twin.append(nn.Sequential(bn, nn.ReLU()) if getattr(layer, "activation", None) else bn)
    return twin


def test_every_norm_of_the_family_has_the_population_of_plain_batch_statistics():
    model, batches = net(), uneven_batches()
    found = recalibrate(model, batches)
    assert len(found.changed) == 8
    assert found.skipped == []
    expected = float64_population(plain_twin(model), batches)
    for name, layer in found.model.named_children():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            reference = expected.get(name) or expected[f"{name}.0"]
            assert distance(layer, *reference) < 1e-5, name
            assert int(layer.num_batches_tracked) == len(batches)


def test_exact_gives_each_norm_the_population_of_what_it_will_be_given():
    model, batches = net(), uneven_batches()
    done = recalibrate(model, batches, exact=True).model.double().eval()
    given = {}
    for name, layer in done.named_children():
        layer.register_forward_pre_hook(lambda _, x, name=name: given.setdefault(name, []).append(x[0]))
    for x in batches:
        done(x.double())
    norms = [(name, m) for name, m in done.named_children() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 8
    for name, layer in norms:
        dims = (0, *range(2, given[name][0].dim()))
        assert distance(layer, *pooled(given[name], dims)) < 1e-5, name
    one_pass = recalibrate(model, batches).model.double()
    last = norms[-1][0]
    assert distance(one_pass.get_submodule(last), *pooled(given[last], (0,))) > 1e-3  # which is why there is exact


def test_paper_is_the_plain_average_of_batches():
    batches = uneven_batches()
    layer = recalibrate(nn.BatchNorm2d(3), batches, method="paper").model
    means = torch.stack([x.double().mean((0, 2, 3)) for x in batches]).mean(0)
    variances = torch.stack([x.double().var((0, 2, 3), unbiased=True) for x in batches]).mean(0)
    torch.testing.assert_close(layer.running_mean.double(), means, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.running_var.double(), variances, rtol=1e-6, atol=1e-6)


def test_offset_input_loses_nothing():
    batches = [x + 1e4 for x in uneven_batches()]
    layer = recalibrate(nn.BatchNorm2d(3), batches).model
    mean, var = pooled(batches)
    torch.testing.assert_close(layer.running_var.double(), var, rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.running_mean.double(), mean, rtol=1e-7, atol=0)


def test_statistics_that_were_nan_are_replaced():
    model, batches = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3)), uneven_batches()
    model[0].running_mean[1] = torch.nan
    model[1].running_var[0] = -3.0
    found = recalibrate(model, batches)
    assert distance(found.model[0], *pooled(batches)) < 1e-6
    assert all("the old ones were not finite, or a variance was negative" in change.why for change in found.changed)


def test_positions_switches_and_evo_store_moments_too():
    batches = uneven_batches()
    position = recalibrate(randomize_(nk.PositionBatchNorm2d(3, 8, 8)), batches).model
    torch.testing.assert_close(position.running_mean.double(), torch.cat(batches).double().mean(0), rtol=0, atol=1e-6)
    mean, var = pooled(batches)
    switched = recalibrate(randomize_(nk.SwitchableNorm2d(3)), batches).model
    assert distance(switched, mean, var) < 1e-6
    evolved = recalibrate(randomize_(nk.EvoNormB0(3)), batches).model
    torch.testing.assert_close(evolved.running_var.double(), var, rtol=1e-6, atol=0)


def test_what_is_masked_is_not_counted():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = randomize_(nk.BatchNorm1d(4))

        def forward(self, x, mask):
            return self.bn(x, mask=mask)

    batches = [{"x": torch.randn(n, 4, 9) * 2 + n, "mask": torch.rand(n, 9) < 0.6} for n in (3, 8)]
    for batch in batches:
        batch["x"].transpose(1, 2)[~batch["mask"]] = torch.nan
    found = recalibrate(Masked(), batches)
    kept = torch.cat([b["x"].transpose(1, 2)[b["mask"]] for b in batches]).double()
    torch.testing.assert_close(found.model.bn.running_mean.double(), kept.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.model.bn.running_var.double(), kept.var(0), rtol=1e-6, atol=1e-6)
    assert f"{len(kept):,} per channel" in found.changed[0].why


def test_a_mask_of_a_foreign_norm_is_refused():
    class Theirs(nn.BatchNorm1d):
        def forward(self, x, mask=None):
            return super().forward(x)

    batch = {"x": torch.randn(3, 4), "mask": torch.ones(3, dtype=torch.bool)}
    with pytest.raises(nk.ArgumentError, match="called with a mask"):
        recalibrate(nn.Sequential(Theirs(4)), [batch], lambda model, batch: model[0](**batch))


@pytest.mark.parametrize("exact", [False, True])
def test_a_shared_norm_has_all_that_it_is_given(exact):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = randomize_(nn.BatchNorm1d(3))

        def forward(self, x):
            return self.bn(x), self.bn(5 * x + 1)

    batches = [torch.randn(n, 3) for n in (4, 10)]
    found = recalibrate(Twice(), batches, exact=exact)
    mean, var = pooled([part for x in batches for part in (x, 5 * x + 1)], (0,))
    assert distance(found.model.bn, mean, var) < 1e-6
    assert int(found.model.bn.num_batches_tracked) == 2


# ---- what is skipped


class TheirNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("running_scale", torch.ones(3))


def test_what_is_skipped_says_why():
    model = nn.ModuleDict(
        {
            "none": nn.BatchNorm2d(3, track_running_stats=False),
            "layer": nn.GroupNorm(1, 3),
            "frozen": nk.FrozenBatchNorm2d(3),
            "whitened": nk.WhitenedBatchNorm2d(3),
            "moving": nk.MovingBatchNorm2d(3),
            "domain": nk.DomainBatchNorm2d(3, 2),
            "instance": nn.InstanceNorm2d(3, track_running_stats=True),
            "theirs": TheirNorm(),
            "unused": nn.BatchNorm2d(3),
            "used": nn.BatchNorm2d(3),
        }
    )
    before = copy.deepcopy(model.state_dict())
    found = warned(recalibrate, model, uneven_batches(), lambda model, x: model["used"](x))
    why = {name: why for name, _, why in found.skipped}
    assert set(why) == set(model) - {"used"}
    assert "stores no statistics" in why["none"]
    assert "stores no statistics" in why["layer"]
    assert "frozen" in why["frozen"]
    assert "whitening matrix" in why["whitened"]
    assert "mean squares" in why["moving"]
    assert "per domain" in why["domain"]
    assert "each of which has statistics of its own" in why["instance"]
    assert "was not reached by any batch" in why["unused"]
    assert "is not a norm we know" in why["theirs"]
    assert [name for name, _, _ in found.changed] == ["used"]
    for key, value in found.model.state_dict().items():
        if not key.startswith("used"):
            assert torch.equal(value, before[key]), key


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_model_that_has_not_been_initialized_is_refused():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LazyBatchNorm1d())
    with pytest.raises(nk.ArgumentError, match=r"1 \(LazyBatchNorm1d\) has not been initialized.*Run the model once"):
        recalibrate(model, [torch.randn(4, 3)], inplace=True)
    assert isinstance(model[1].running_mean, nn.UninitializedBuffer)


def test_a_model_without_norms_comes_back_as_it_is():
    found = recalibrate(nn.Linear(3, 2), [torch.randn(4, 3)])
    assert (found.changed, found.skipped, found.parity) == ([], [], None)


# ---- models and batches of all kinds


def test_averaged_weights():
    model = plain_net()
    averaged = AveragedModel(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    averaged.update_parameters(model)
    batches = uneven_batches()
    found = recalibrate(averaged, batches)
    expected = float64_population(averaged, batches)
    layers = dict(found.model.named_modules())
    assert expected
    assert all(distance(layers[name], *expected[name]) < 1e-5 for name in expected)
    assert int(found.model.n_averaged) == int(averaged.n_averaged)


def test_batches_of_every_form_give_the_same():
    model, x = plain_net(), torch.cat(uneven_batches())[:90]
    labels = torch.zeros(90)
    loader = DataLoader(TensorDataset(x, labels), batch_size=30)
    parts = x.split(30)
    expected = statistics(recalibrate(model, parts).model)
    forms = [
        (loader, None),
        ((part for part in parts), None),
        ([[part, labels] for part in parts], None),
        ([{"input": part} for part in parts], None),
        ([{"pixels": part, "id": 7} for part in parts], lambda model, batch: model(batch["pixels"])),
    ]
    for batches, forward in forms:
        found = statistics(recalibrate(model, batches, forward).model)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_root_may_be_the_norm_and_hidden_ones_are_found():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = [nn.BatchNorm2d(3)]

        def forward(self, x):
            return self.blocks[0](x)

    batches = uneven_batches()
    root, hidden = recalibrate(nn.BatchNorm2d(3), batches), recalibrate(Hidden(), batches)
    assert [change.layer for change in (*root.changed, *hidden.changed)] == ["", "blocks[0]"]
    assert torch.equal(root.model.running_var, hidden.model.blocks[0].running_var)


def test_hooks_that_change_the_input_come_first():
    model = nn.Sequential(nn.BatchNorm2d(3))
    model[0].register_forward_pre_hook(lambda _, x: (x[0] * 3,))
    batches = uneven_batches()
    assert distance(recalibrate(model, batches).model[0], *pooled([x * 3 for x in batches])) < 1e-6


def test_compiled_models_are_seen_through():
    model, batches = plain_net(), uneven_batches()
    expected = statistics(recalibrate(model, batches).model)
    compiled = torch.compile(model, backend="eager")
    compiled.eval()(batches[0])  # compiled before any hook is registered
    recalibrate(compiled, batches, inplace=True)
    assert all(torch.equal(value, expected[key]) for key, value in statistics(model).items())


def test_half_precision_counts_in_full():
    batches = uneven_batches()
    found = recalibrate(nk.BatchNorm2d(3).bfloat16(), [x.bfloat16() for x in batches]).model
    mean, var = pooled([x.bfloat16() for x in batches])
    assert torch.equal(found.running_mean, mean.bfloat16())
    assert torch.equal(found.running_var, var.bfloat16())


def test_statistics_that_do_not_fit_their_type_are_an_error():
    model = nn.Sequential(nk.BatchNorm2d(3).half())
    before = everything(model)
    with pytest.raises(nk.NonFiniteError, match=r"running_var does not fit into torch\.float16"):
        recalibrate(model, [(x * 1000).half() for x in uneven_batches()], inplace=True)
    assert_same(before, everything(model))


def test_progress_counts_batches():
    seen, batches = [], uneven_batches()
    recalibrate(plain_net(), batches, progress=seen.append)
    assert seen == [1, 2, 3, 4, 5]
    recalibrate(plain_net(), batches, exact=True, progress=seen.append)
    assert seen[5:] == list(range(1, 21))  # 3 norms, and once to find their order


def test_exact_runs_only_as_far_as_it_must():
    model, calls = plain_net(), []
    model[8].register_forward_hook(lambda *_: calls.append(1))
    recalibrate(model, uneven_batches(), exact=True)
    # Behind the linear layer is the last norm: it runs for that one and for the order, not for the two before.
    assert len(calls) == 2 * 5


# ---- everything as it was


@pytest.mark.parametrize("exact", [False, True])
def test_undo_and_copies_bit_for_bit(exact):
    model, batches = net(), uneven_batches()
    model[1].register_forward_hook(lambda *_: None)
    model[0].weight.requires_grad_(False)
    model.train()
    model[5].eval()
    before, buffer = everything(model), model[1].running_mean
    copied = recalibrate(model, batches, exact=exact, example=batches[0])
    assert_same(before, everything(model))
    assert copied.undo() is model
    done = recalibrate(model, batches, exact=exact, example=batches[0], inplace=True)
    assert done.model is model
    assert model[1].running_mean is buffer
    assert everything(model)[1:] == before[1:]
    assert not torch.equal(buffer, before[0]["1.running_mean"])
    assert done.parity == copied.parity
    assert done.parity.max_abs > 0
    assert done.parity.first_layer == "1"
    assert done.undo() is model
    assert_same(before, everything(model))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("bad", [2, 0])
def test_a_batch_that_fails_half_way_loses_nothing(exact, bad):
    model = net()
    model.train()
    batches = uneven_batches()
    batches[bad] = torch.randn(4, 7, 8, 8)
    before = everything(model)
    with pytest.raises(BatchError, match=rf"batch {bad} \(the first is 0\) failed: RuntimeError: .*channels"):
        recalibrate(model, batches, exact=exact, inplace=True)
    assert_same(before, everything(model))


def test_a_source_that_fails_half_way_loses_nothing():
    def failing():
        yield from uneven_batches()[:2]
        raise OSError("the disk is gone")

    model = net()
    before, random = everything(model), torch.get_rng_state()
    with pytest.raises(BatchError, match=r"batch 2 \(the first is 0\) failed: OSError: the disk is gone"):
        recalibrate(model, failing(), inplace=True)
    assert_same(before, everything(model))
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("exact", [False, True])
def test_a_batch_with_nan_names_layer_and_batch(exact):
    model, batches = net(), uneven_batches()
    batches[3][0, 0, 0, 0] = torch.nan
    before = everything(model)
    with pytest.raises(nk.NonFiniteError, match=r"batch 3 \(the first is 0\): 1 \(BatchNorm2d\) needs finite input"):
        recalibrate(model, batches, exact=exact, inplace=True)
    assert_same(before, everything(model))


def test_an_interrupt_passes_through_and_loses_nothing():
    model = net()
    before = everything(model)

    def forward(model, batch):
        model(batch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recalibrate(model, uneven_batches(), forward, inplace=True)
    assert_same(before, everything(model))


def test_one_value_per_channel():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    batches = [torch.randn(5, 3), torch.randn(1, 3)]
    with pytest.raises(nk.ShapeError, match=r"batch 1 .*: 1 \(BatchNorm1d\) needs more than 1 value per channel"):
        recalibrate(model, batches)
    found = recalibrate(model, batches, exact=True).model  # where a batch is never normalized by itself
    x = model[0](torch.cat(batches)).detach().double()
    assert distance(found[1], x.mean(0), x.var(0)) < 1e-6
    with pytest.raises(nk.ShapeError, match="one value per channel in all batches together"):
        recalibrate(model, batches[1:], exact=True)


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([], {}, "there are no batches"),
        (iter([]), {}, "there are no batches"),
        (torch.randn(4, 3, 8, 8), {}, "must be an iterable of batches; got a Tensor"),
        ([torch.randn(4, 3, 8, 8)], {"method": "papr"}, "method must be"),
        (iter([torch.randn(4, 3, 8, 8)]), {"exact": True}, "more than once"),
    ],
)
def test_bad_arguments(batches, options, message):
    model = net()
    before = everything(model)
    with pytest.raises(nk.ArgumentError, match=message):
        recalibrate(model, batches, inplace=True, **options)
    assert_same(before, everything(model))
    with pytest.raises(nk.ArgumentError):
        recalibrate(nn.Linear(2, 2), [])
