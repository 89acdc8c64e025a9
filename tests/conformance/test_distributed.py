"""DistributedDataParallel trains each layer as it trains torch's: gradients averaged, buffers those of rank 0."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import normkit as nk
from support.cases import CASES
from support.ranks import run_ranks

RANKS = 2

# A synchronized layer sees the other ranks' examples by design: tests/layers/test_sync.py says what it must do there.
LOCAL = [case for case in CASES if nk.describe(case.build()).scope != "synced"]


def inputs_of(case, rank):
    torch.manual_seed(100 + rank)
    return case.input(torch.float64)


def train_on_rank(rank, world):
    for case in LOCAL:
        torch.manual_seed(7)
        # A weight before the layer, so that rows without parameters train too.
        model = nn.Sequential(nn.Linear(case.shape[-1], case.shape[-1]).double(), case.layer(torch.float64))
        alone = [copy.deepcopy(model) for _ in range(RANKS)]
        parallel = DistributedDataParallel(copy.deepcopy(model))
        parallel(inputs_of(case, rank)).square().sum().backward()
        for r in range(RANKS):
            alone[r](inputs_of(case, r)).square().sum().backward()
        for (name, p), *others in zip(
            parallel.module.named_parameters(), *(m.parameters() for m in alone), strict=True
        ):
            mean = torch.stack([o.grad for o in others]).mean(0)
            torch.testing.assert_close(p.grad, mean, rtol=1e-11, atol=1e-11, msg=f"{case} {name}")
        parallel.eval()(inputs_of(case, rank))  # no buffer moves, and none is left behind by the broadcast
        parallel.train()(inputs_of(case, rank))
        alone[0](inputs_of(case, 0))
        if rank == 0:
            for name, b in alone[0].named_buffers():
                torch.testing.assert_close(parallel.module.get_buffer(name), b, rtol=1e-12, atol=1e-12)


@pytest.mark.deep
def test_distributed_data_parallel(tmp_path):
    run_ranks(train_on_rank, RANKS, tmp_path)
