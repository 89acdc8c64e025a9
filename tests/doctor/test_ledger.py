"""The ledger counts every write, changes nothing of the run, and says what it did not see."""

import copy
import pickle
import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks

import normkit as nk
from normkit.doctor.ledger.statistics import Statistics
from support.loops import CLASSES, NORMS, batches, codes, net, sgd, step, train
from support.watched_run import WatchedRun, small_net


def whole_state(run):
    tensors = [*run.model.state_dict().values(), *(p.grad for p in run.model.parameters()), torch.get_rng_state()]
    return tensors, [random.getstate(), numpy.random.get_state()[1].tolist(), run.losses]


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nk.BatchNorm2d, nk.MovingBatchNorm2d, lambda c: nn.GroupNorm(2, c)])
def test_a_watched_run_is_the_unwatched_one_bit_for_bit(norm):
    first = small_net(norm)
    state, found = torch.get_rng_state(), []
    for is_watched in (False, True):
        torch.set_rng_state(state)
        run = WatchedRun(copy.deepcopy(first))
        if is_watched:
            with nk.watch(run.model, optimizer=run.optimizer) as ledger:
                run.train(5)
            assert (ledger.stopped, ledger.steps) == (None, 5)
        else:
            run.train(5)
        found.append(whole_state(run))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert found[0][1] == found[1][1]


def hooks(model):
    return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.modules())


def test_when_it_lets_go_everything_is_as_it_was():
    model = net()
    optimizer = sgd(model)
    others = len(_global_optimizer_post_hooks)
    with nk.watch(model, optimizer=optimizer):
        train(model, optimizer, batches(2))
        assert hooks(model) > 0
    assert hooks(model) == 0
    assert len(_global_optimizer_post_hooks) == others
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_an_error_in_the_loop_ends_the_watch_and_what_was_found_stays():
    model = net()
    optimizer = sgd(model)
    ledger = nk.watch(model, optimizer=optimizer)

    def loop():
        with ledger:
            train(model, optimizer, batches(2))
            with torch.no_grad():
                model(batches(1)[0][0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert hooks(model) == 0
    assert codes(ledger) == {("NK204", name) for name in NORMS}


def test_every_write_is_counted_with_its_step_line_and_size():
    model = net()
    optimizer = sgd(model)
    with nk.watch(model, optimizer=optimizer) as ledger:
        train(model, optimizer, [*batches(3), *batches(1, size=5)])
        model.eval()
        model(batches(1)[0][0])
    assert {entry.layer for entry in ledger.writes} == set(NORMS)
    for entry in ledger.writes:
        assert (entry.use, entry.count, entry.steps, entry.first_step, entry.last_step) == ("step", 4, 4, 0, 3)
        assert (entry.is_training, entry.has_grad, entry.batch_sizes) == (True, True, (5, 12))
        assert entry.site.file.endswith("loops.py")
        assert entry.site.line == step.__code__.co_firstlineno + 3
        assert entry.site.root == "Sequential"
    assert ledger.passes == 5
    assert repr(ledger) == "Ledger(8 writes to 2 layers in 4 steps)"


def test_without_an_optimizer_the_caller_counts():
    model = net()
    with nk.watch(model) as ledger:
        for x, y in batches(4):
            for half in (slice(0, 6), slice(6, 12)):
                F.cross_entropy(model(x[half]), y[half]).backward()
            ledger.step()
            model.zero_grad()
    assert ledger.steps == 4
    assert codes(ledger) == {("NK206", name) for name in NORMS}
    optimizer = sgd(model)
    with (
        nk.watch(model, optimizer=optimizer) as ledger,
        pytest.raises(nk.ArgumentError, match="own steps are counted"),
    ):
        ledger.step()


def test_where_no_step_ends_nothing_is_said_of_accumulation():
    model = net()
    with nk.watch(model) as ledger:
        for x, y in batches(4):
            F.cross_entropy(model(x), y).backward()
    assert ledger.steps == 0
    assert codes(ledger) == set()


class Functional(nn.Module):
    """A norm whose layer is never called: a function gets its buffers, and has no counter to tell of it."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = F.batch_norm(self.conv(x), self.bn.running_mean, self.bn.running_var, self.bn.weight, self.bn.bias, True)
        return self.head(x.relu().mean((2, 3)))


@pytest.mark.parametrize("is_stray", [True, False])
def test_functional_calls_on_buffers_are_seen(is_stray):
    model = Functional()
    optimizer = sgd(model)
    with nk.watch(model, optimizer=optimizer) as ledger:
        train(model, optimizer, batches(4))
        if is_stray:
            with torch.no_grad():
                model(batches(1)[0][0])
    assert codes(ledger) == ({("NK204", "bn")} if is_stray else set())
    uses = {entry.use: entry.count for entry in ledger.writes}
    assert uses == ({"step": 4, "no grad": 1} if is_stray else {"step": 4})


class Own(nn.Module):
    """Somebody's own norm, which writes in its own way."""

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(channels))
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().mean((0, 2, 3))
        return (x - self.running_mean[:, None, None]) * self.scale[:, None, None]


def test_norms_of_other_people_are_watched():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), Own(6), nn.Flatten(), nn.Linear(216, CLASSES))
    optimizer = sgd(model)
    with nk.watch(model, optimizer=optimizer) as ledger:
        train(model, optimizer, batches(3))
        with torch.no_grad():
            model(batches(1)[0][0])
    assert codes(ledger) == {("NK204", "1")}


def test_parts_that_are_called_alone_are_passes_of_their_own():
    model = net()
    optimizer = sgd(model)
    with nk.watch(model, optimizer=optimizer) as ledger:
        for x, y in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model[3:](model[:3](x)), y).backward()
            optimizer.step()
    assert codes(ledger) == set()
    assert {entry.layer: entry.count for entry in ledger.writes} == dict.fromkeys(NORMS, 3)


def test_a_momentum_of_zero_moves_nothing():
    model = net(momentum=0.0)
    optimizer = sgd(model)
    with nk.watch(model, optimizer=optimizer) as ledger:
        train(model, optimizer, batches(3))
    assert ledger.writes == []


def test_what_others_write_is_not_a_forward_s():
    model, other = net(), net()
    optimizer = sgd(model)
    with nk.watch(model, optimizer=optimizer) as ledger:
        train(model, optimizer, batches(2))
        model.load_state_dict(other.state_dict())
        model[1].running_mean.data.fill_(3.0)
        model.eval()
        model(batches(1)[0][0])
        model.train()
        train(model, optimizer, batches(2))
    assert codes(ledger) == set()
    assert {entry.use for entry in ledger.writes} <= {"step", "unseen"}
    assert sum(entry.count for entry in ledger.writes if entry.use == "step") == 8


def test_copies_and_pickles_of_a_watched_model_do_not_know_of_it():
    model = net()
    optimizer = sgd(model)
    with nk.watch(model, optimizer=optimizer) as ledger:
        train(model, optimizer, batches(2))
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(batches(1)[0][0])
    assert {entry.layer: entry.count for entry in ledger.writes} == dict.fromkeys(NORMS, 2)


def test_lazy_layers_are_watched_from_their_first_batch():
    model = nn.Sequential(nn.LazyConv2d(6, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(CLASSES))
    model.eval()
    with nk.watch(model) as ledger:
        model.train()
        model(torch.randn(4, 3, 8, 8)).sum().backward()
        ledger.step()
    assert ledger.stopped is None
    assert sum(entry.count for entry in ledger.writes) == 1


@pytest.mark.parametrize("momentum", [0.1, 0.9, None])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nk.BatchNorm2d])
def test_the_batch_s_moments_follow_from_the_move(norm, momentum):
    layer = net(norm, momentum=momentum)[1].double()
    seen = Statistics(layer, nk.describe(layer))
    for _ in range(2):
        x = torch.randn(8, 6, 5, 5, dtype=torch.float64) * 2 + 1
        layer(x)
        assert seen.has_moved()
        batch = seen.batch()
        torch.testing.assert_close(batch.mean, x.mean((0, 2, 3)), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(batch.var, x.var((0, 2, 3)), rtol=1e-12, atol=1e-12)
        seen.look()
        assert not seen.has_moved()


def test_what_fails_in_here_does_not_fail_the_run(monkeypatch):
    model = net()
    optimizer = sgd(model)
    ledger = nk.watch(model, optimizer=optimizer)
    monkeypatch.setattr(ledger, "_begin_pass", None)
    with pytest.warns(nk.NormkitWarning, match="watch has stopped, and the run goes on: TypeError"):
        train(model, optimizer, batches(2))
    assert ledger.stopped.startswith("TypeError")
    ledger.close()
    assert hooks(model) == 0
