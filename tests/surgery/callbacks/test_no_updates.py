"""Statistics stand still in the parts of a training that are named, which is otherwise the one without."""

import pickle

import pytest
import torch

import normkit as nk
from normkit.surgery.callbacks import NoUpdates
from support.trainers import RUNS, STATISTICS, STEPS, lightning, moved, of_norms, plain, started, transformers


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def written(before, task):
    """How often each norm has written."""
    return [
        int(task.get_buffer(f"net.{i}.num_batches_tracked") - before[f"net.{i}.num_batches_tracked"]) for i in (1, 4)
    ]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("epochs", [[1], {1}, range(1, 2), lambda epoch: epoch == 1])
def test_statistics_stand_still_in_epochs(run, epochs, tmp_path):
    without, _ = started()
    run(None, tmp_path, without, epochs=3)
    task, before = started()
    run(NoUpdates(epochs=epochs), tmp_path, task, epochs=3)
    assert moved(without.state_dict(), task) == of_norms(*STATISTICS)
    assert written(before, task) == [2 * STEPS] * 2
    means = [mean for _, mean, _ in task.seen]
    assert all(torch.equal(mean, means[STEPS]) for mean in means[STEPS : 2 * STEPS + 1])
    assert not torch.equal(means[STEPS - 1], means[STEPS])
    assert hooks(task) == 0


@pytest.mark.parametrize("run", RUNS)
def test_validations_write_nothing_where_norms_are_in_training_mode(run, tmp_path):
    loose, before = started(stubborn=True)
    run(None, tmp_path, loose, validate=True)
    assert min(written(before, loose)) > 2 * STEPS  # so it goes without
    task, before = started(stubborn=True)
    run(NoUpdates(phases=["validation", "sanity"]), tmp_path, task, validate=True)
    assert written(before, task) == [2 * STEPS] * 2
    assert hooks(task) == 0


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
def test_the_sanity_check_is_a_phase_of_its_own(tmp_path):
    found = {}
    for phase in ("sanity", "validation"):
        task, before = started(stubborn=True)
        lightning(NoUpdates(phases=phase), tmp_path, task, validate=True, num_sanity_val_steps=3)
        found[phase] = written(before, task)
    assert found == {"sanity": [4 * STEPS] * 2, "validation": [2 * STEPS + 3] * 2}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("after", "times"), [({"net": 1}, 1), ({"net": 2}, 2), ({"net.1": 1, "net.4": 0}, None)])
def test_later_forwards_of_a_batch_write_nothing(run, after, times, tmp_path):
    without, _ = started(penalty=True)
    run(None, tmp_path, without)
    task, before = started(penalty=True)
    run(NoUpdates(after=after), tmp_path, task)
    if times is None:
        assert written(before, task) == [2 * STEPS, 0]
    else:
        assert written(before, task) == [2 * STEPS * times] * 2
    assert moved(without.state_dict(), task) <= of_norms(*STATISTICS)
    assert hooks(task) == 0


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
def test_accumulated_batches_are_batches(tmp_path):
    task, before = started(penalty=True)
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    transformers(NoUpdates(after={"net": 1}), tmp_path, task, **options)
    assert written(before, task) == [2 * 2 * STEPS] * 2


def test_only_and_skip(tmp_path):
    for options, expected in (({"only": "net.1"}, [0, STEPS]), ({"skip": "net.1"}, [STEPS, 0])):
        task, before = started()
        plain(NoUpdates(epochs=[0], **options), tmp_path, task, epochs=1)
        assert written(before, task) == expected
    task, before = started(penalty=True)
    plain(NoUpdates(after={"": 0}, only="net.4"), tmp_path, task, epochs=1)
    assert written(before, task) == [2 * STEPS, 0]


def test_an_error_and_a_second_start_leave_nothing_open():
    task, before = started()
    callback, x = NoUpdates(epochs=[0], after={"net": 1}), torch.randn(4, 3, 8, 8).double()
    for _ in range(2):
        callback.on_start(task)
        callback.on_epoch(task, 0)
        callback.on_batch(task)
        task(x)
    assert written(before, task) == [0, 0]
    twin = pickle.loads(pickle.dumps(callback))  # amid a training: without its blocks
    assert (twin._open, twin._after) == ({}, {"net": 1})
    callback.on_error(task)
    assert hooks(task) == 0
    task(x)
    assert written(before, task) == [1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs epochs=, phases= or after="),
        ({"epochs": [-1]}, r"epochs= needs numbers of epochs, or a function of one; got \[-1\]"),
        ({"epochs": 2.5}, "epochs= needs numbers of epochs"),
        ({"phases": "validate"}, r'"sanity" or "validation", or both; got \'validate\'\. Did you mean "validation"'),
        ({"after": {"net": -1}}, r"after\['net'\] must be a number of forwards, at least 0; got -1"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(nk.ArgumentError, match=message):
        NoUpdates(**options)


def test_a_part_that_is_not_there_is_refused_before_training():
    task, _ = started()
    with pytest.raises(nk.ArgumentError, match=r"names no part of this model\. Did you mean .net"):
        NoUpdates(after={"nets": 1}).on_start(task)
    assert hooks(task) == 0
