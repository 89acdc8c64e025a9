"""Norms synchronize where several processes train, on CPUs too: their statistics are those of the whole batch."""

import importlib
import os
import pickle
import socket

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import normkit as nk
from normkit.surgery.callbacks import FreezeNorms, SyncNorms, lightning_callback, lightning_plugin
from support.ranks import run_ranks
from support.trainers import RUNS, SIZE, Examples, lightning, plain, started, transformers


@pytest.mark.parametrize("run", [run for run in RUNS if getattr(run, "values", [None])[0] is not lightning])
@pytest.mark.parametrize("back", [True, False])
def test_one_process_trains_as_without(run, back, tmp_path):
    without, _ = started()
    run(None, tmp_path, without)
    task, _ = started()
    run(SyncNorms(back=back), tmp_path, task)
    for key, value in without.state_dict().items():
        torch.testing.assert_close(task.state_dict()[key], value, rtol=1e-9, atol=1e-9)
    assert {kind for kind, _, _ in task.seen} == {"SyncBatchNorm"}
    assert type(task.net[1]) is (nn.BatchNorm2d if back else nk.SyncBatchNorm)


def test_each_layer_becomes_what_it_was():
    model = nn.Sequential(
        nn.BatchNorm2d(3), nk.BatchNorm2d(3, activation="relu"), nk.FrozenBatchNorm2d(3), nn.BatchNorm2d(3)
    )
    callback = SyncNorms(back=True, skip="3")
    callback.on_setup(model)
    callback.on_start(model)
    kinds = [nk.SyncBatchNorm, nk.SyncBatchNorm, nk.FrozenBatchNorm2d, nn.BatchNorm2d]
    assert [type(layer) for layer in model] == kinds
    callback.on_end(model)
    assert [type(layer) for layer in model] == [nn.BatchNorm2d, nk.BatchNorm2d, nk.FrozenBatchNorm2d, nn.BatchNorm2d]
    assert model[1].activation == "relu"
    callback.on_end(model)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
def test_the_plugin_of_lightning():
    from lightning.pytorch.plugins import LayerSync

    plugin = pickle.loads(pickle.dumps(lightning_plugin(SyncNorms(back=True))))
    assert isinstance(plugin, LayerSync)
    model = nn.Sequential(nn.BatchNorm1d(3))
    assert plugin.revert(model) is model  # as Lightning does after an error before anything was done
    assert plugin.apply(model) is model
    assert type(model[0]) is nk.SyncBatchNorm
    assert plugin.revert(model) is model
    assert type(model[0]) is nn.BatchNorm1d


def test_what_is_for_a_plugin_is_no_callback():
    with pytest.raises(nk.ArgumentError, match=r"takes no SyncNorms: .*plugins=\[lightning_plugin\(SyncNorms"):
        lightning_callback(SyncNorms())
    with pytest.raises(nk.ArgumentError, match=r"lightning_plugin needs SyncNorms\(\); got a FreezeNorms"):
        lightning_plugin(FreezeNorms())


def by_lightning(folder, task):
    options = {"devices": 2, "strategy": "ddp", "plugins": [lightning_plugin(SyncNorms(back=True))]}
    in_order = DistributedSampler(Examples(), shuffle=False)
    batches = DataLoader(Examples(), SIZE // 2, sampler=in_order)
    return lightning(None, folder, task, batches=batches, use_distributed_sampler=False, **options)


def by_transformers(folder, task):
    options = {"per_device_train_batch_size": SIZE // 2, "ddp_backend": "gloo"}
    return transformers(SyncNorms(back=True), folder, task, **options)


def train_one_rank(rank, world, port, run, folder):
    # A new process has the parent's path, on which the trainers may find torchvision, and none of its declarations.
    importlib.import_module("support.aside")
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "NODE_RANK": 0}
    os.environ |= {key: str(value) for key, value in here.items()} | {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    task, _ = started()
    run(folder, task)
    kinds = ({kind for kind, _, _ in task.seen}, type(task.net[1]).__name__)
    torch.save((task.state_dict(), kinds), folder / f"rank{rank}.pt")


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", [by_lightning, by_transformers])
def test_two_processes_train_as_one_with_the_whole_batch(run, tmp_path):
    """Each has every other half of a batch; in float64 only rounding is left between them and one process."""
    run_ranks(train_one_rank, 2, tmp_path, free_port(), run, tmp_path)
    alone, _ = started()
    plain(None, tmp_path, alone)
    states = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    for state, kinds in states:
        assert kinds == ({"SyncBatchNorm"}, "BatchNorm2d")
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(states[0][0][key], value) for key, value in states[1][0].items())
