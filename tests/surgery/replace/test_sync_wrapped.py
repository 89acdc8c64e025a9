"""Synchronized norms in models that are wrapped or sharded: every way has the gradients of the whole batch."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import normkit as nk
from support.case import randomize_
from support.ranks import run_ranks

WORLD = 2
FSDP_REASON = r"sharded by itself \(fully_shard\): convert the model first, and shard it then"


def net():
    torch.manual_seed(7)
    layers = (nn.Conv2d(3, 8, 3), nk.BatchNorm2d(8, activation="silu"), nn.Flatten(), nn.Linear(8 * 16, 4))
    return randomize_(nn.Sequential(*layers)).double()


def inputs():
    torch.manual_seed(8)
    return (2 * torch.randn(10, 3, 6, 6, dtype=torch.double) + 1).split([6, 4])


def gradients(model, rank):
    """The gradients of a step from the same beginning; they are averaged over ranks."""
    model.train().zero_grad()
    (WORLD * model(inputs()[rank]).square().sum()).backward()
    return [_whole(parameter.grad) for parameter in model.parameters()]


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def of_whole_batch():
    model = net()
    model(torch.cat(inputs())).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()], model


def of_local_norms():
    found = []
    for x in inputs():
        model = net()
        model(x).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    return [sum(each) for each in zip(*found, strict=True)]


def sharded(model, parts=()):
    for part in (*parts, model):
        fully_shard(part)
    return model


def trained(model, rank):
    """The same after a step, which leaves the parameters as they were."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients(model, rank)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return model


WAYS = {
    "before DistributedDataParallel": lambda rank: DistributedDataParallel(nk.convert(net(), "sync").model),
    "a copy of DistributedDataParallel": lambda rank: nk.convert(DistributedDataParallel(net()), "sync").model,
    "in DistributedDataParallel": lambda rank: nk.convert(DistributedDataParallel(net()), "sync", inplace=True).model,
    "in DistributedDataParallel that has trained": lambda rank: (
        nk.convert(trained(DistributedDataParallel(net()), rank), "sync", inplace=True).model
    ),
    "before fully_shard": lambda rank: sharded(nk.convert(net(), "sync").model),
    "before fully_shard of every layer": lambda rank: shard_all(nk.convert(net(), "sync").model),
    "in a sharded model": lambda rank: nk.convert(sharded(net()), "sync", inplace=True).model,
    "in a sharded model that has trained": lambda rank: (
        nk.convert(trained(sharded(net()), rank), "sync", inplace=True).model
    ),
}


def shard_all(model):
    return sharded(model, (model[0], model[1], model[3]))


def convert_each_way(rank, world):
    expected, whole = of_whole_batch()
    for name, make in WAYS.items():
        model = make(rank)
        found = gradients(model, rank)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=name)
        for own, buffer in zip(model.buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(own, buffer, rtol=1e-12, atol=1e-12, msg=name)
    undo(rank)
    refuse()


def undo(rank):
    for wrap in (DistributedDataParallel, sharded):
        model = wrap(net())
        result = nk.convert(model, "sync", inplace=True)
        gradients(model, rank)
        assert result.undo() is model
        for one, other in zip(gradients(model, rank), of_local_norms(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def refuse():
    model = shard_all(net())
    with pytest.warns(nk.NormkitWarning, match=FSDP_REASON):
        result = nk.convert(model, "sync", inplace=True)
    assert result.changed == []
    assert [(one.layer, one.what) for one in result.skipped] == [("1", "FSDPBatchNorm2d")]
    with pytest.raises(nk.NormkitError, match=r"FSDP does not support deepcopy.*Pass inplace=True"):
        nk.convert(model, "sync")


@pytest.mark.deep
def test_every_way_trains_as_one_process_with_the_whole_batch(tmp_path):
    run_ranks(convert_each_way, WORLD, tmp_path)
