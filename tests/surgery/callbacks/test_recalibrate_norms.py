"""When training has ended the norms hold the population's statistics, and the weights are those of the run without."""

import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import normkit as nk
from normkit.surgery.callbacks import RecalibrateNorms, lightning_callback
from support.trainers import (
    RUNS,
    SIZE,
    STATISTICS,
    STEPS,
    Examples,
    lightning,
    loader,
    moved,
    of_norms,
    plain,
    started,
    transformers,
)


def population(task, x):
    """Mean and unbiased variance of what each norm is given when all examples run through the model in evaluation."""
    found = {}

    def note(name):
        def hook(layer, args):
            found[name] = args[0].mean((0, 2, 3)), args[0].var((0, 2, 3), unbiased=False) * _corrected(args[0])

        return hook

    handles = [task.net[i].register_forward_pre_hook(note(f"net.{i}")) for i in (1, 4)]
    with torch.no_grad():
        task.net.eval()(x)
    for handle in handles:
        handle.remove()
    return found


def _corrected(x):
    count = x.numel() // x.shape[1]
    return count / (count - 1)


def assert_population(task, x=None):
    for name, (mean, var) in population(task, Examples().x if x is None else x).items():
        layer = task.get_submodule(name)
        torch.testing.assert_close(layer.running_mean, mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(layer.running_var, var, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("run", RUNS)
def test_statistics_are_the_population_s_and_weights_those_without(run, tmp_path):
    without, _ = started()
    run(None, tmp_path, without, validate=True)
    task, _ = started()
    callback = RecalibrateNorms(exact=True)
    run(callback, tmp_path, task, validate=True)
    assert moved(without.state_dict(), task) == of_norms(*STATISTICS)
    assert_population(task)
    assert int(task.net[1].num_batches_tracked) == STEPS
    assert [change.layer for change in callback.changed] == ["net.1", "net.4"]


@pytest.mark.parametrize("run", RUNS)
def test_validations_see_the_population_s_statistics(run, tmp_path):
    """The model that validates, and the checkpoint after it, are recalibrated; training goes on as without."""
    without, _ = started()
    run(None, tmp_path, without, validate=True)
    task, _ = started()
    validated = []

    def note(layer, args):
        if not layer.training:
            validated.append((layer.running_mean.clone(), args[0].detach()))

    callback = RecalibrateNorms(exact=True, before_validation=True)
    task.net[1].register_forward_pre_hook(note)
    run(callback, tmp_path, task, validate=True)
    assert moved(without.state_dict(), task) == of_norms(*STATISTICS)
    assert_population(task)
    last = [(mean, x) for mean, x in validated if len(x) == SIZE][-STEPS:]
    torch.testing.assert_close(last[0][0], torch.cat([x for _, x in last]).mean((0, 2, 3)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("run", RUNS)
def test_batches_of_one_s_own_and_no_more_than_asked_for(run, tmp_path):
    own = [{"x": 5 + torch.randn(6, 3, 8, 8).double()} for _ in range(4)]
    task, _ = started()
    run(RecalibrateNorms(own, max_batches=2, exact=True), tmp_path, task)
    assert_population(task, torch.cat([batch["x"] for batch in own[:2]]))
    assert int(task.net[1].num_batches_tracked) == 2


def test_a_forward_and_layers_of_one_s_own(tmp_path):
    task, before = started()
    batches = [(torch.randn(9, 3, 8, 8).double(), "other things")]
    plain(RecalibrateNorms(batches, lambda task, batch: task.net(batch[0]), only="net.1"), tmp_path, task, epochs=0)
    assert moved(before, task) == {f"net.1.{name}" for name in STATISTICS}
    mean = task.net[0](batches[0][0]).mean((0, 2, 3)).detach()
    torch.testing.assert_close(task.net[1].running_mean, mean, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("run", RUNS)
def test_a_shuffled_loader_goes_on_as_if_nobody_had_looked(run, tmp_path):
    """Own generators, and for Lightning a validation amid an epoch with workers that persist."""
    found, options = [], {}
    if run is lightning:
        options = {"val_check_interval": 2, "num_sanity_val_steps": 0}
    for callback in (None, RecalibrateNorms(before_validation=True, max_batches=2)):
        task, _ = started()
        workers = {"num_workers": 1, "persistent_workers": True} if run is lightning else {}
        batches = loader(shuffle=True, generator=torch.Generator().manual_seed(8), **workers)
        run(callback, tmp_path, task, validate=True, batches=batches, **options)
        found.append(task)
    assert moved(found[0].state_dict(), found[1]) == of_norms(*STATISTICS)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
def test_a_validation_amid_an_epoch_of_transformers(tmp_path):
    found = []
    for callback in (None, RecalibrateNorms(before_validation=True)):
        task, _ = started()
        batches = loader(shuffle=True, generator=torch.Generator().manual_seed(8))
        transformers(callback, tmp_path, task, batches=batches, validate=2)
        found.append(task)
    assert moved(found[0].state_dict(), found[1]) == of_norms(*STATISTICS)


def test_it_can_be_pickled(tmp_path):
    callback = pickle.loads(pickle.dumps(RecalibrateNorms(exact=True)))
    task, _ = started()
    plain(callback, tmp_path, task)
    assert_population(task)
    assert pickle.loads(pickle.dumps(callback)).changed == callback.changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": iter([1])}, "RecalibrateNorms iterates over the batches more than once"),
        ({"batches": torch.ones(3)}, "batches must be an iterable of batches; got a Tensor"),
        ({"max_batches": 0}, "max_batches must be at least 1; got 0"),
        ({"max_batches": 2.0}, "max_batches must be at least 1; got 2.0"),
        ({"method": "mean"}, 'method must be "pooled" or "paper"; got \'mean\''),
    ],
)
def test_bad_arguments_are_refused_at_once(options, message):
    with pytest.raises(nk.ArgumentError, match=message):
        RecalibrateNorms(**options)


@pytest.mark.parametrize("batches", [None, {"a": loader()}, [loader(), loader()]])
def test_batches_that_are_not_one_loader_are_refused_before_training(batches):
    task, before = started()
    with pytest.raises(
        nk.ArgumentError, match=r"needs one loader of batches, and the training has .*Pass batches=loader"
    ):
        RecalibrateNorms().on_start(task, batches)
    assert moved(before, task) == set()


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield {"x": torch.randn(3, 8, 8).double()}


def test_a_loader_that_may_have_no_end_needs_a_number_of_batches():
    task, _ = started()
    batches = DataLoader(Endless(), 4)
    with pytest.raises(nk.ArgumentError, match=r"needs max_batches= here: the training's DataLoader has no length"):
        RecalibrateNorms().on_start(task, batches)
    callback = RecalibrateNorms(max_batches=3)
    callback.on_start(task, batches)
    callback.on_end(task, batches)
    assert int(task.net[1].num_batches_tracked) == 3


def test_a_model_that_cannot_be_run_is_refused_before_training():
    with pytest.raises(nk.ArgumentError, match=r"and ModuleList has no forward of its own.*pass forward=lambda"):
        RecalibrateNorms().on_start(nn.ModuleList(), loader())
    RecalibrateNorms(forward=lambda model, batch: None).on_start(nn.ModuleList(), loader())


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
def test_a_lightning_module_without_a_forward_is_refused_before_training():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def training_step(self, batch, number):
            raise AssertionError("training has begun")

        def configure_optimizers(self):
            return None

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", callbacks=[lightning_callback(RecalibrateNorms())], max_epochs=1, **quiet)
    with pytest.raises(nk.ArgumentError, match="and Module has no forward of its own"):
        trainer.fit(Module(), DataLoader(Examples(), 4))
