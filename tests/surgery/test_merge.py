"""Several models as one: parameters averaged, statistics those of all data together."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import normkit as nk
from support.case import randomize_


def small(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 2))
    randomize_(model)
    model[1].num_batches_tracked.fill_(3 + seed)
    return model


def state_is(model, other):
    mine, theirs = model.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_statistics_are_those_of_all_data_together():
    """Shards that differ in mean, scale and size, against one model that has seen them all."""
    torch.manual_seed(0)
    shards = [
        [scale * torch.randn(64, 2, 128, 128) + mean for _ in range(batches)]
        for batches, mean, scale in ((1, 0.0, 1.0), (3, 5.0, 0.5), (2, -2.0, 3.0))
    ]

    def seen(batches):
        layer = nn.BatchNorm2d(2, momentum=None)
        return nk.recalibrate(nn.Sequential(layer), batches).model.eval()

    whole = seen([batch for shard in shards for batch in shard])[0]
    clients = [seen(shard) for shard in shards]
    merged = nk.merge(clients).model[0]
    torch.testing.assert_close(merged.running_mean, whole.running_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merged.running_var, whole.running_var, rtol=1e-6, atol=0)
    assert merged.num_batches_tracked == 6
    weighted = nk.merge(clients, weights=[100, 300, 200]).model[0]
    torch.testing.assert_close(weighted.running_var, merged.running_var, rtol=1e-6, atol=0)
    average = torch.stack([client[0].running_var for client in clients]).mean(0)
    assert (average < 0.7 * whole.running_var).all()  # what averaging variances would have given


def test_parameters_are_averaged_as_torch_averages_them():
    models = [small(seed) for seed in range(4)]
    torchs = AveragedModel(models[0])
    for model in models:
        torchs.update_parameters(model)
    merged = nk.merge(models).model
    for (name, mine), theirs in zip(merged.named_parameters(), torchs.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


def test_weights_are_shares():
    one, two = small(0), small(1)
    merged = nk.merge([one, two], weights=[1, 3]).model
    torch.testing.assert_close(merged[0].weight, 0.25 * one[0].weight + 0.75 * two[0].weight)
    mean = 0.25 * one[1].running_mean + 0.75 * two[1].running_mean
    spread = 0.25 * 0.75 * (one[1].running_mean - two[1].running_mean).square()
    torch.testing.assert_close(merged[1].running_mean, mean)
    torch.testing.assert_close(merged[1].running_var, 0.25 * one[1].running_var + 0.75 * two[1].running_var + spread)
    alone = nk.merge([one, two], weights=[0, 0.001]).model
    torch.testing.assert_close(alone[1].running_var, two[1].running_var)
    torch.testing.assert_close(alone[4].weight, two[4].weight)


def test_counts_weigh_statistics_where_no_weights_are_given():
    one, two = small(0), small(1)
    one[1].num_batches_tracked.fill_(0)  # it has seen nothing: its statistics are made up
    merged = nk.merge([one, two]).model
    torch.testing.assert_close(merged[1].running_mean, two[1].running_mean)
    torch.testing.assert_close(merged[0].weight, (one[0].weight + two[0].weight) / 2)
    two[1].num_batches_tracked.fill_(0)
    merged = nk.merge([one, two]).model
    torch.testing.assert_close(merged[1].running_mean, (one[1].running_mean + two[1].running_mean) / 2)


def test_what_is_equal_stays_and_the_models_are_left_alone():
    model = small(2)
    before = copy.deepcopy(model)
    result = nk.merge([model, copy.deepcopy(model), copy.deepcopy(model)], weights=[0.1, 0.3, 0.7])
    merged = result.model
    assert merged is not model
    assert merged[1].num_batches_tracked == 3 * model[1].num_batches_tracked
    merged[1].num_batches_tracked.copy_(model[1].num_batches_tracked)
    assert state_is(merged, model)
    assert state_is(model, before)
    assert result.undo() is model


def test_states_merge_as_models_do():
    models = [small(seed) for seed in range(3)]
    state = nk.merge([model.state_dict() for model in models], weights=[1, 2, 3])
    filled = small(7)
    filled.load_state_dict(state)
    assert state_is(filled, nk.merge(models, weights=[1, 2, 3]).model)


def test_every_norm_is_accounted_for():
    class Net(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.batch, self.instance = nk.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)
            self.domain, self.layer = nk.DomainBatchNorm1d(4, 2), nn.LayerNorm(4)
            self.whitened = nk.WhitenedBatchNorm1d(4)
            torch.manual_seed(seed)
            randomize_(self)
            self.domain.num_batches_tracked.copy_(torch.tensor([2, 0]))

    one, two = Net(0), Net(1)
    two.domain.num_batches_tracked.copy_(torch.tensor([2, 5]))
    result = nk.merge([one, two])
    assert {change.layer: change.what for change in result.changed} == {
        "batch": "statistics merged",
        "instance": "averaged",
        "domain": "statistics merged",
        "layer": "averaged",
        "whitened": "averaged",
    }
    merged = result.model.domain
    torch.testing.assert_close(merged.running_mean[0], (one.domain.running_mean[0] + two.domain.running_mean[0]) / 2)
    torch.testing.assert_close(merged.running_mean[1], two.domain.running_mean[1])
    assert merged.num_batches_tracked.tolist() == [4, 5]
    torch.testing.assert_close(
        result.model.instance.running_var, (one.instance.running_var + two.instance.running_var) / 2
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_types_stay(dtype):
    one, two = ({"weight": torch.randn(3, 5).to(dtype), "index": torch.tensor([1, 2])} for _ in range(2))
    merged = nk.merge([one, two])
    assert merged["weight"].dtype == dtype
    wide = torch.promote_types(dtype, torch.float32)
    expected = (one["weight"].to(wide) + two["weight"].to(wide)) / 2
    torch.testing.assert_close(merged["weight"], expected.to(dtype))
    assert torch.equal(merged["index"], torch.tensor([1, 2]))


def test_a_norm_with_two_names_is_merged_under_both():
    def sharing(seed):
        torch.manual_seed(seed)
        norm = randomize_(nn.BatchNorm1d(3))
        return nn.Sequential(norm, nn.ReLU(), norm)

    one, two = sharing(0), sharing(1)
    merged = nk.merge([one, two], weights=[1, 1]).model
    spread = (one[0].running_mean - two[0].running_mean).square() / 4
    torch.testing.assert_close(merged[0].running_var, (one[0].running_var + two[0].running_var) / 2 + spread)


def test_layers_in_plain_lists_are_merged():
    class Hiding(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.blocks = [nn.BatchNorm1d(3)]
            randomize_(self.blocks[0])

    one, two = Hiding(0), Hiding(1)
    merged = nk.merge([one, two], weights=[1, 1]).model.blocks[0]
    torch.testing.assert_close(merged.weight, (one.blocks[0].weight + two.blocks[0].weight) / 2)


def with_nan(model):
    model[1].running_var[0] = float("nan")
    return model


@pytest.mark.parametrize(
    ("models", "weights", "error", "said"),
    [
        ([], None, nk.ArgumentError, "at least one model; got none"),
        ([nn.Linear(2, 2), {"weight": torch.ones(2)}], None, nk.ArgumentError, "got Linear, dict"),
        ([3], None, nk.ArgumentError, "got int"),
        ([small(0)] * 2, [1], nk.ArgumentError, "one number for each of 2 models; got 1"),
        ([small(0)] * 2, [1, -1], nk.ArgumentError, "0 or more; got -1"),
        ([small(0)] * 2, [0, 0], nk.ArgumentError, "all 0"),
        ([small(0), nn.Sequential(nn.Linear(2, 2))], None, nk.ArgumentError, "1 has kind batch in the first and None"),
        ([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)], None, nk.ArgumentError, "model 2 has no bias"),
        ([nn.Linear(2, 2), nn.Linear(3, 2)], None, nk.ArgumentError, r"\(2, 2\) in the first and \(2, 3\) in model 2"),
        ([nn.BatchNorm1d(2), nn.BatchNorm1d(2, eps=1e-3)], None, nk.ArgumentError, "eps 1e-05 in the first and 0.001"),
        ([small(0), with_nan(small(1))], None, nk.NonFiniteError, "1.running_var of model 2 has NaN"),
        ([nn.LazyLinear(2)] * 2, None, nk.ArgumentError, "no shape yet"),
    ],
)
def test_what_cannot_be_merged_is_said(models, weights, error, said):
    with pytest.raises(error, match=said):
        nk.merge(models, weights)
