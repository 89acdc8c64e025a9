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
CLASSES = {case.name: case for case in reversed(CASES)}


def inputs_of(case, rank):
    torch.manual_seed(100 + rank)
    return case.input(torch.float64)


def expected(case, model):
    """What each rank's output is, and the gradients averaged; a synchronized layer sees the examples of all ranks."""
    inputs = [inputs_of(case, r) for r in range(RANKS)]
    if nk.describe(model[1]).scope != "synced":
        alone = [copy.deepcopy(model) for _ in inputs]
        outputs = [m(x) for m, x in zip(alone, inputs, strict=True)]
    else:  # every rank gives the whole batch, which has the statistics of the two parts
        alone = [copy.deepcopy(model)]
        outputs = alone[0](torch.cat(inputs)).chunk(RANKS)
    torch.cat(outputs).square().sum().backward()
    gradients = zip(*(m.parameters() for m in alone), strict=True)
    return alone, outputs, [torch.stack([p.grad for p in each]).sum(0) / RANKS for each in gradients]


def train_on_rank(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for case in CLASSES.values():
        torch.manual_seed(7)
        # A weight before the layer, so that rows without parameters train too.
        model = nn.Sequential(nn.Linear(case.shape[-1], case.shape[-1]).double(), case.layer(torch.float64))
        alone, outputs, gradients = expected(case, model)
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        y = model(inputs_of(case, rank))
        y.square().sum().backward()
        torch.testing.assert_close(y, outputs[rank], rtol=1e-12, atol=1e-12, msg=f"{case}")
        for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), gradient, rtol=1e-11, atol=1e-11, msg=f"{case} {name}")
        if len(alone) == RANKS:
            for name, b in alone[rank].named_buffers():
                torch.testing.assert_close(model.get_buffer(name), b, rtol=1e-12, atol=1e-12, msg=f"{case} {name}")
            x = y.detach()
            torch.testing.assert_close(model.eval()(x), alone[rank].eval()(x), rtol=1e-11, atol=1e-11, msg=f"{case}")


@pytest.mark.deep
def test_fully_shard(tmp_path):
    run_ranks(train_on_rank, RANKS, tmp_path)
