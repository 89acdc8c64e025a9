"""Faults of several processes, each with its healthy twin."""

import pytest
import torch
from torch import nn

import normkit as nk
from support.patients import mlp, randomized, rows
from support.ranks import run_ranks


def found(code, model, batches, **options):
    return {one.layer for one in nk.examine(model, batches, select=code, **options).findings}


def worker(rank, world):
    torch.manual_seed(0)
    model = randomized(mlp())
    nk.recalibrate(model, [x for x, _ in rows()], inplace=True)
    batches = [x for x, _ in rows(seed=rank)]
    assert found("NK401", model, batches) == set()
    with torch.no_grad():
        model[1].running_mean.add_(0.5 * rank)
    assert found("NK401", model, batches) == {"1"}
    with torch.no_grad():
        model[1].running_mean.sub_(0.5 * rank)

    small = [x[:4] for x in batches]
    assert found("NK402", model, small) == {"1"}
    assert found("NK402", model, batches) == set()
    synced = nk.convert(model, to="sync").model
    assert found("NK402", synced, small) == set()

    twice = {"forward": lambda m, x: (m(x), m(x + 1))}
    wrapped = nn.parallel.DistributedDataParallel(model.train())
    assert found("NK403", wrapped, batches, **twice) == {"module.1"}
    assert found("NK403", wrapped, batches) == set()
    alone = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    assert found("NK403", alone, batches, **twice) == set()


@pytest.mark.deep
def test_faults_of_ranks_are_found_on_every_rank(tmp_path):
    run_ranks(worker, 2, tmp_path)


def test_without_ranks_they_are_silent():
    model = randomized(mlp())
    assert nk.examine(model, rows(), select="NK4").findings == []
