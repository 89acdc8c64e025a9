"""Norms stand still while a model trains, by whatever loop, and are what they were when it has ended."""

import copy
import pickle

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.surgery.callbacks import FreezeNorms, lightning_callback, trainer_callback
from support.loops import sgd
from support.ranks import run_ranks
from support.trainers import AFFINE, REST, RUNS, STATISTICS, STEPS, Examples, lightning, moved, of_norms, plain, started


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("affine", [True, False])
def test_norms_stand_still_and_the_rest_learns(run, affine, tmp_path):
    task, before = started()
    kinds = [type(layer) for layer in task.net]
    parameters = list(task.parameters())
    run(FreezeNorms(affine=affine), tmp_path, task, validate=True)
    assert moved(before, task) == REST | (set() if affine else of_norms(*AFFINE))
    assert {kind for kind, _, _ in task.seen} == {"FrozenBatchNorm2d"}
    assert [type(layer) for layer in task.net] == kinds
    assert all(p is q for p, q in zip(task.parameters(), parameters, strict=True))
    assert all(p.requires_grad for p in parameters)


@pytest.mark.parametrize("run", RUNS)
def test_an_epoch_sets_them_going_again(run, tmp_path):
    task, before = started()
    run(FreezeNorms(until=1), tmp_path, task, epochs=3)
    kinds = [kind for kind, _, _ in task.seen]
    assert kinds == ["FrozenBatchNorm2d"] * STEPS + ["BatchNorm2d"] * 2 * STEPS
    for _, mean, gamma in task.seen[: STEPS + 1]:
        assert torch.equal(mean, before["net.1.running_mean"])
        assert torch.equal(gamma, before["net.1.weight"])
    assert moved(before, task) == REST | of_norms(*AFFINE, *STATISTICS)
    assert int(task.net[1].num_batches_tracked - before["net.1.num_batches_tracked"]) == 2 * STEPS


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("until", [None, 1, 2])
def test_a_resumed_training_is_the_one_that_was_not_interrupted(run, until, tmp_path):
    whole, before = started()
    (tmp_path / "whole").mkdir()
    run(FreezeNorms(until=until), tmp_path / "whole", whole, epochs=3)
    first, _ = started()
    run(FreezeNorms(until=until), tmp_path, first, epochs=1)
    second, _ = started(seed=1)
    run(FreezeNorms(until=until), tmp_path, second, epochs=3, resume=True)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(second.state_dict()[key], value, rtol=1e-12, atol=1e-12)
    if until is None:
        assert moved(before, second) == REST


@pytest.mark.parametrize("run", RUNS)
def test_only_the_layers_that_are_named_and_none_that_were_frozen_before(run, tmp_path):
    task, before = started()
    nk.freeze(task, only="net.4", affine=False, inplace=True)
    run(FreezeNorms(skip=iter(["net.4"])), tmp_path, task)
    assert moved(before, task) == REST | {"net.4.weight", "net.4.bias"}
    assert [type(task.net[i]).__name__ for i in (1, 4)] == ["BatchNorm2d", "FrozenBatchNorm2d"]
    other, before = started()
    nk.freeze(other, only="net.4", affine=False, inplace=True)
    run(FreezeNorms(), tmp_path, other)
    assert moved(before, other) == REST
    assert [type(other.net[i]).__name__ for i in (1, 4)] == ["BatchNorm2d", "FrozenBatchNorm2d"]  # not ours to thaw


def test_norms_that_are_the_model_itself_or_in_lists():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = [nn.BatchNorm1d(3), nk.BatchNorm1d(3)]

    holder, norm = Holder(), nn.BatchNorm1d(3)
    for model, layers in ((norm, [norm]), (holder, holder.held)):
        kinds, callback = [type(layer) for layer in layers], FreezeNorms()
        callback.on_start(model)
        assert {type(layer) for layer in layers} == {nk.FrozenBatchNorm1d}
        callback.on_end(model)
        assert [type(layer) for layer in layers] == kinds


def test_an_error_gives_the_layers_back():
    task, before = started()
    callback = FreezeNorms()
    callback.on_start(task)
    assert type(task.net[1]) is nk.FrozenBatchNorm2d
    callback.on_error(task)
    assert type(task.net[1]) is nn.BatchNorm2d
    assert moved(before, task) == set()
    callback.on_error(task)  # once more does nothing


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
def test_an_error_in_lightning_gives_the_layers_back(tmp_path):
    task, _ = started()
    task.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lightning(FreezeNorms(), tmp_path, task)
    assert type(task.net[1]) is nn.BatchNorm2d


def train_one_rank(rank, world, until, folder):
    """Two epochs of a step each under DistributedDataParallel; the ranks have different batches."""
    task, before = started()
    callback = FreezeNorms(until=until)
    callback.on_setup(task)
    wrapped = nn.parallel.DistributedDataParallel(task, find_unused_parameters=until is not None)
    optimizer = sgd(task)
    callback.on_start(task)
    for epoch in range(2):
        callback.on_epoch(task, epoch)
        optimizer.zero_grad()
        part = Examples()[rank::2]
        wrapped(part["x"], part["labels"])["loss"].backward()
        optimizer.step()
        assert moved(before, task) == (REST if until is None or epoch < until else {*before})
    callback.on_end(task)
    torch.save(dict(task.named_parameters()), folder / f"rank{rank}.pt")


@pytest.mark.deep
@pytest.mark.parametrize("until", [None, 1])
def test_ranks_train_together(until, tmp_path):
    run_ranks(train_one_rank, 2, tmp_path, until, tmp_path)
    one, other = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in (0, 1))
    assert all(torch.equal(one[key], value) for key, value in other.items())


def test_copies_and_pickles_do_the_same(tmp_path):
    for made in (copy.deepcopy(FreezeNorms(until=1)), pickle.loads(pickle.dumps(FreezeNorms(until=1)))):
        task, before = started()
        plain(made, tmp_path, task, epochs=1)
        assert moved(before, task) == REST


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
def test_callbacks_of_frameworks_can_be_pickled():
    for make in (lightning_callback, trainer_callback):
        made = make(FreezeNorms(affine=False, only="net.1"))
        twin = pickle.loads(pickle.dumps(made))
        assert type(twin).__name__ == type(made).__name__
        assert vars(twin.callback) == vars(made.callback)
        assert vars(copy.deepcopy(made).callback) == vars(made.callback)


@pytest.mark.parametrize("until", [0, -1, 1.5, True, "2"])
def test_an_epoch_that_is_none_is_refused(until):
    with pytest.raises(
        nk.ArgumentError, match=f"until must be an epoch, the first of which is 0, so at least 1; got {until!r}"
    ):
        FreezeNorms(until=until)


def test_a_layer_that_is_not_there_changes_nothing():
    task, before = started()
    with pytest.raises(nk.ArgumentError, match="only='backbone' fits no layer of this model"):
        FreezeNorms(only="backbone").on_start(task)
    assert moved(before, task) == set()
    assert type(task.net[1]) is nn.BatchNorm2d
    for make in (lightning_callback, trainer_callback):
        with pytest.raises(nk.ArgumentError, match=r"needs a FreezeNorms, RecalibrateNorms, .* got a type"):
            make(FreezeNorms)
