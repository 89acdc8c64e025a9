"""Synchronized norms are recalibrated over all processes: every rank stores the same, that of all ranks' batches."""

import pytest
import torch
from torch import distributed, nn

import normkit as nk
from normkit.surgery.statistics.adapt import adapt
from normkit.surgery.statistics.recalibrate import recalibrate
from support.case import randomize_
from support.population_baselines import batch_norms, distance, float64_population
from support.ranks import run_ranks

WORLD = 2
SIZES = [(3, 8), (9, 2), (1, 6)]  # of each batch, by rank


def net(norm):
    return randomize_(nn.Sequential(nn.Linear(4, 5), norm(5), nn.Tanh(), nn.Linear(5, 3), norm(3)))


def same_on_all_ranks(model):
    own = torch.cat([value.double().flatten() for value in model.state_dict().values()])
    every = [torch.empty_like(own) for _ in range(WORLD)]
    distributed.all_gather(every, own)
    return all(torch.equal(every[0], one) for one in every)


def check_population(rank, world):
    torch.manual_seed(3)
    whole = [torch.randn(sum(sizes), 4) * 2 + i for i, sizes in enumerate(SIZES)]
    own = [x.split(sizes)[rank] for x, sizes in zip(whole, SIZES, strict=True)]
    for norm in (nk.SyncBatchNorm, nn.SyncBatchNorm):
        model = net(norm)
        twin = net(nn.BatchNorm1d)
        twin.load_state_dict(model.state_dict())
        expected = float64_population(twin, whole)
        found = recalibrate(model, own).model
        assert same_on_all_ranks(found)
        for name, layer in batch_norms(found).items():
            assert distance(layer, *expected[name]) < 1e-5, name
        assert same_on_all_ranks(recalibrate(model, own, exact=True).model)
        adapted = adapt(model, own, prior=5.0, collapse=0.0)
        assert same_on_all_ranks(adapted.model)
        assert adapted.changed
        with pytest.raises(nk.ArgumentError, match="processes would diverge"):
            adapt(model, own, "tent")


def check_roll_back(rank, world):
    """The first rank's own predictions all become one class, those of both together do not."""
    torch.manual_seed(3)
    model = nn.Sequential(nk.SyncBatchNorm(2, affine=False), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].weight.copy_(10 * torch.eye(2))
        model[1].bias.zero_()
        model[0].running_mean.copy_(torch.tensor([20.0, -20.0]))
    x = torch.randn(60, 2) + (0 if rank else model[0].running_mean)
    found = adapt(model, [x])
    assert found.changed
    assert same_on_all_ranks(found.model)


@pytest.mark.deep
@pytest.mark.skipif(not distributed.is_available(), reason="this build of torch has no processes to speak to")
def test_all_ranks_store_the_statistics_of_all_ranks(tmp_path):
    run_ranks(check_population, WORLD, tmp_path)


@pytest.mark.skipif(not distributed.is_available(), reason="this build of torch has no processes to speak to")
@pytest.mark.deep
def test_all_ranks_decide_together(tmp_path):
    run_ranks(check_roll_back, WORLD, tmp_path)


def test_a_group_that_is_not_there_is_not_asked():
    whole = [torch.randn(7, 4), torch.randn(5, 4)]
    model = net(nk.SyncBatchNorm)
    twin = net(nn.BatchNorm1d)
    twin.load_state_dict(model.state_dict())
    expected = float64_population(twin, whole)
    found = batch_norms(recalibrate(model, whole).model)
    assert all(distance(found[name], *expected[name]) < 1e-5 for name in expected)
