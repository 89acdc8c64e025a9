"""Probes see a run and change nothing of it; what fails is said, and the run goes on."""

import copy
import random
from functools import partial

import numpy
import pytest
import torch
from torch import nn

import normkit as nk
from normkit.instruments import read_records
from normkit.json_lines import RecordError
from support.watched_run import WatchedRun, small_net


def whole_state(run):
    states = [run.model.state_dict(), run.optimizer.state_dict()["state"]]
    grads = [p.grad for p in run.model.parameters()]
    randoms = [torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()]
    modes = [layer.training for layer in run.model.modules()]
    return states, grads, randoms, modes, run.losses


def assert_same(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


NORMS = {
    "ours": nk.BatchNorm2d,
    "torch's": nn.BatchNorm2d,
    "group": lambda c: nn.GroupNorm(2, c),
    "moving": nk.MovingBatchNorm2d,  # it keeps a state that is no buffer
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_watched_run_is_the_unwatched_one_bit_for_bit(norm):
    first = small_net(NORMS[norm])
    state, python, numbers = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    found = []
    for is_watched in (False, True):
        torch.set_rng_state(state)
        random.setstate(python)
        numpy.random.set_state(numbers)
        run = WatchedRun(copy.deepcopy(first))
        if is_watched:
            probes = run.all_probes()
            if norm == "group":
                probes = [probe for probe in probes if probe.name != "StatisticsNoise"]  # it has none across examples
            with nk.attach(run.model, probes, every=2, optimizer=run.optimizer) as recorder:
                run.train(5)
            assert recorder.stopped == {}
            assert {record["probe"] for record in recorder.records} == {probe.name for probe in probes}
        else:
            run.train(5)
        found.append(whole_state(run))
    assert_same(*found)


@pytest.mark.parametrize("given", ["first", "by name"])
def test_a_closure_s_gradient_is_that_of_its_own_step(given):
    """Lightning gives each step a closure that runs the model: before it the gradient is that of the step before."""
    net, found = small_net(), []
    for with_closure in (False, True):
        run = WatchedRun(copy.deepcopy(net))
        if with_closure:
            run.step = partial(step_with_closure, run, given)
        torch.manual_seed(1)
        with nk.attach(run.model, run.all_probes(), every=2, optimizer=run.optimizer) as recorder:
            run.train(5)
        assert recorder.stopped == {}
        found.append((run.model.state_dict(), recorder.records))
    assert_same(*found)
    assert {record["step"] for record in found[0][1]} == {0, 2, 4}


def step_with_closure(run, given, number):
    run.choose(number)

    def closure():
        run.optimizer.zero_grad()
        loss = run.loss()
        loss.backward()
        return loss

    run.optimizer.step(closure) if given == "first" else run.optimizer.step(closure=closure)


class Renamed(torch.optim.SGD):
    """Calls its closure by another name, and takes more."""

    def step(self, function=None, scale=1.0):
        self.scale = scale
        return super().step(function)


def test_what_a_step_is_given_reaches_it():
    run = WatchedRun(small_net())
    optimizer = Renamed(run.model.parameters(), lr=0.1)
    run.choose(0)
    with nk.attach(run.model, nk.probes.GradientNorms(), every=1, optimizer=optimizer) as recorder:
        optimizer.step(lambda: run.loss(), 3.0)
    assert optimizer.scale == 3.0
    assert recorder.stopped == {}


def test_of_several_evaluations_in_a_step_the_first_counts():
    run = WatchedRun(small_net(nn.Identity))
    run.batch = run.images, run.labels
    optimizer = torch.optim.LBFGS(run.model.parameters(), max_iter=3)
    norms = []

    def closure():
        optimizer.zero_grad()
        loss = run.loss()
        loss.backward()
        norms.append(sum(p.grad.square().sum() for p in run.model.parameters()).sqrt().item())
        return loss

    run.model.eval()  # no dropout
    with nk.attach(run.model, nk.probes.GradientNorms(), every=1, optimizer=optimizer) as recorder:
        optimizer.step(closure)
    assert len(norms) > 1
    whole = sum(record["gradient"] ** 2 for record in recorder.records) ** 0.5
    assert whole == pytest.approx(norms[0], rel=1e-5)


def test_when_it_lets_go_the_model_is_as_it_was():
    run = WatchedRun(small_net())
    before = {name: dict(vars(layer)) for name, layer in run.model.named_modules()}
    recorder = nk.attach(run.model, run.all_probes(), every=1, optimizer=run.optimizer)
    run.train(1)
    recorder.close()
    for name, layer in run.model.named_modules():
        assert vars(layer).keys() == before[name].keys(), name
        assert not layer._forward_hooks, name
        assert not layer._forward_pre_hooks, name
    assert not run.optimizer._optimizer_step_pre_hooks
    assert not run.optimizer._optimizer_step_post_hooks
    count = len(recorder.records)
    run.train(1)
    assert len(recorder.records) == count > 0


@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2, 3, 4]), (3, [0, 3]), (lambda step: step in (1, 4), [1, 4])])
def test_which_steps_are_recorded(every, steps):
    run = WatchedRun(small_net())
    with nk.attach(run.model, nk.probes.GradientNorms("8"), every, run.optimizer) as recorder:
        run.train(5)
    assert [record["step"] for record in recorder.of("GradientNorms", "8")] == steps


def test_without_an_optimizer_the_caller_counts():
    model, x = small_net().eval(), torch.randn(2, 3, 8, 8)
    with nk.attach(model, nk.probes.ActivationMoments("1"), every=2) as recorder:
        for _ in range(3):
            with torch.no_grad():
                model(x)
            recorder.step()
    assert [record["step"] for record in recorder.records] == [0, 2]
    watched = WatchedRun(small_net())
    with (
        nk.attach(watched.model, nk.probes.GradientNorms(), optimizer=watched.optimizer) as recorder,
        pytest.raises(nk.ArgumentError, match="own steps are counted"),
    ):
        recorder.step()


def test_an_evaluation_between_two_steps_is_not_the_run():
    run = WatchedRun(small_net())
    with nk.attach(run.model, nk.probes.ActivationMoments("0"), every=1, optimizer=run.optimizer) as recorder:
        with torch.no_grad():
            run.model(1000 + torch.randn(4, 3, 8, 8))
        run.train(1)
    (record,) = recorder.records
    assert record["std"] < 10


class Failing(nk.probes.Probe):
    def before_update(self, watched):
        raise ZeroDivisionError("by design")


def test_a_probe_that_fails_is_stopped_and_the_run_goes_on():
    run = WatchedRun(small_net())
    with nk.attach(run.model, [Failing(), nk.probes.GradientNorms("8")], every=1, optimizer=run.optimizer) as recorder:
        with pytest.warns(nk.NormkitWarning, match="Failing was stopped at step 0, and the run goes on: ZeroDivision"):
            run.step(0)
        run.step(1)
    assert recorder.stopped == {"Failing": "ZeroDivisionError: by design"}
    assert [record["step"] for record in recorder.records] == [0, 1]
    assert "stopped: Failing" in repr(recorder)


@pytest.mark.parametrize(
    ("closure", "message"),
    [
        (lambda run: lambda: run.model(run.batch[0]), r"one number; got a tensor of shape \(12, 5\)"),
        (lambda run: lambda: 3.0, "one number; got a float"),
        (lambda run: lambda: run.loss().detach(), "a loss with a gradient; got one without"),
    ],
)
@pytest.mark.parametrize("probe", ["Landscape", "CovariateShift"])
def test_a_loss_that_is_none_is_refused_in_words(probe, closure, message):
    run = WatchedRun(small_net())
    made = getattr(nk.probes, probe)(closure(run))
    with nk.attach(run.model, made, every=1, optimizer=run.optimizer), pytest.warns(nk.NormkitWarning, match=message):
        run.step(0)
    assert len(run.losses) == 1


def test_a_model_in_half_precision():
    run = WatchedRun(small_net(nn.BatchNorm2d).bfloat16())
    run.images = run.images.bfloat16()
    with nk.attach(run.model, run.all_probes(), every=1, optimizer=run.optimizer) as recorder:
        run.train(2)
    assert recorder.stopped == {}
    numbers = [v for r in recorder.records for v in r.values() if isinstance(v, float)]
    assert torch.tensor(numbers).isfinite().all()


def test_layers_that_are_not_there():
    run = WatchedRun(small_net())
    with pytest.raises(nk.ArgumentError, match=r"GradientNorms is to measure 'conv', and Sequential has no such layer"):
        nk.attach(run.model, nk.probes.GradientNorms("conv"), optimizer=run.optimizer)
    named = nn.ModuleDict({"first": nn.Linear(2, 2)})
    with pytest.raises(nk.ArgumentError, match='Did you mean "first"'):
        nk.attach(named, nk.probes.GradientNorms("firts"), optimizer=run.optimizer)
    with pytest.raises(nk.ArgumentError, match="StatisticsNoise finds no layer to measure in Linear"):
        nk.attach(nn.Linear(2, 2), nk.probes.StatisticsNoise())
    assert not any(layer._forward_hooks for layer in run.model.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("net", nk.probes.GradientNorms()), "needs a torch.nn.Module; got a str"),
        ((nn.Linear(2, 2), []), "attach needs probes, .*; got none"),
        ((nn.Linear(2, 2), ["GradientNorms"]), "got 'GradientNorms'"),
        ((nn.Linear(2, 2), [nk.probes.GradientNorms(), nk.probes.GradientNorms()]), "got 2 of GradientNorms"),
        ((nn.Linear(2, 2), nk.probes.GradientNorms(), 0), "every must be a whole number of steps, 1 or more; got 0"),
        ((nn.Linear(2, 2), nk.probes.EffectiveRate()), "pass optimizer= to attach"),
        ((nn.Linear(2, 2), nk.probes.Landscape(lambda: None)), "needs a learning rate"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(nk.ArgumentError, match=message):
        nk.attach(*arguments)


def test_records_are_on_the_disk_at_once_and_are_read_again(tmp_path):
    run = WatchedRun(small_net())
    path = tmp_path / "logs" / "run.jsonl"
    with nk.attach(run.model, run.all_probes(), 1, run.optimizer, out=path) as recorder:
        run.step(0)
        assert read_records(path) == recorder.records
        run.step(1)
    assert read_records(path) == recorder.records
    assert read_records(recorder.save(tmp_path / "again.jsonl")) == recorder.records
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(path.read_bytes()[:-20])
    assert read_records(cut) == recorder.records[:-1]


@pytest.mark.parametrize(("text", "message"), [("", "holds no record"), ('{"step": 1}\n', "line 1 has no step, probe")])
def test_files_that_are_no_records(text, message, tmp_path):
    path = tmp_path / "some.jsonl"
    with pytest.raises(RecordError, match="there is no file"):
        read_records(path)
    path.write_text(text)
    with pytest.raises(RecordError, match=message):
        read_records(path)


def test_tensorboards_scalars(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = WatchedRun(small_net())
    with nk.attach(run.model, nk.probes.GradientNorms("8"), 1, run.optimizer, tensorboard=tmp_path) as recorder:
        run.train(3)
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("GradientNorms/8/gradient")]
    assert found == [(r["step"], pytest.approx(r["gradient"], rel=1e-6)) for r in recorder.records]


def test_what_probes_cost_is_said():
    run = WatchedRun(small_net())
    with nk.attach(run.model, [nk.probes.GradientNorms(), Slow()], 2, run.optimizer) as recorder:
        run.train(4)
    costs = recorder.costs()
    assert costs.keys() == {"GradientNorms", "Slow"}
    assert costs["Slow"] >= 0.02 > 0
    assert f"{len(recorder.records)} records of 2 steps" in repr(recorder)


class Slow(nk.probes.Probe):
    def before_update(self, watched):
        import time

        time.sleep(0.02)
        yield from ()
