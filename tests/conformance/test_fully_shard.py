"""FSDP2's `fully_shard` trains each layer as one process would: parameters in parts, gradients averaged."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import normkit as nk
from support.cases import CASES
from support.ranks import run_ranks

RANKS = 2
LOCAL = [case for case in CASES if nk.describe(case.build()).scope != "synced"]


def inputs_of(case, rank):
    torch.manual_seed(100 + rank)
    return case.input(torch.float64)


def train_on_rank(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for case in LOCAL:
        torch.manual_seed(7)
        # A weight before the layer, so that rows without parameters train too.
        model = nn.Sequential(nn.Linear(case.shape[-1], case.shape[-1]).double(), case.layer(torch.float64))
        alone = [copy.deepcopy(model) for _ in range(RANKS)]
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        y = model(inputs_of(case, rank))
        y.square().sum().backward()
        outputs = [m(inputs_of(case, r)) for r, m in enumerate(alone)]
        for z in outputs:
            z.square().sum().backward()
        torch.testing.assert_close(y, outputs[rank], rtol=1e-12, atol=1e-12, msg=f"{case}")
        for (name, p), *others in zip(model.named_parameters(), *(m.parameters() for m in alone), strict=True):
            mean = torch.stack([o.grad for o in others]).mean(0)
            found = p.grad.full_tensor()
            torch.testing.assert_close(found, mean, rtol=1e-11, atol=1e-11, msg=f"{case} {name}")
        for name, b in alone[rank].named_buffers():
            torch.testing.assert_close(model.get_buffer(name), b, rtol=1e-12, atol=1e-12, msg=f"{case} {name}")
        torch.testing.assert_close(model.eval()(y.detach()), alone[rank].eval()(y.detach()), rtol=1e-11, atol=1e-11)


@pytest.mark.deep
def test_fully_shard(tmp_path):
    run_ranks(train_on_rank, RANKS, tmp_path)
