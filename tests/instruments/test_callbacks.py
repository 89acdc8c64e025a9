"""Callbacks of frameworks, called as these call them: with small stand-ins, and in whole runs of the real ones."""

import builtins
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from normkit.errors import ArgumentError, MissingExtraError
from normkit.instruments import probes, read_records
from normkit.instruments.callbacks import lightning_callback, trainer_callback
from support.watched_run import small_net


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, as accelerate has it: its own hooks are never called."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def steps(model, optimizer, count=3):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()


def hooks(model, optimizer):
    own = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return sum(own) + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def missing(monkeypatch, *names):
    for name in [n for n in sys.modules if n.partition(".")[0] in names]:
        monkeypatch.delitem(sys.modules, name)
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request, monkeypatch):
    """A module of one of Lightning's names with a callback's base class in it."""
    missing(monkeypatch, "lightning", "pytorch_lightning")
    module = ModuleType(request.param)
    module.Callback = type("Callback", (), {"state_key": "base"})
    if "." in request.param:
        package = ModuleType("lightning")
        package.pytorch = module
        monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def test_lightning_s_training_is_recorded(lightning, model, optimizer, tmp_path):
    before = hooks(model, optimizer)
    callback = lightning_callback(probes.GradientNorms(), every=2, out=tmp_path / "r.jsonl")
    assert isinstance(callback, lightning.Callback)
    assert callback.recorder is None
    trainer = SimpleNamespace(optimizers=[optimizer])
    callback.on_train_start(trainer, model)
    steps(model, optimizer)
    callback.on_train_end(trainer, model)
    steps(model, optimizer)
    assert sorted({record["step"] for record in callback.recorder.records}) == [0, 2]
    assert read_records(tmp_path / "r.jsonl") == callback.recorder.records
    assert hooks(model, optimizer) == before


def test_an_error_in_lightning_s_training_lets_go(lightning, model, optimizer):
    before = hooks(model, optimizer)
    callback = lightning_callback([probes.DeadUnits(), probes.GradientNorms()], every=1)
    trainer = SimpleNamespace(optimizers=[optimizer])
    callback.on_train_start(trainer, model)
    steps(model, optimizer, 1)
    assert hooks(model, optimizer) > before
    callback.on_exception(trainer, model, RuntimeError("out of memory"))
    assert hooks(model, optimizer) == before
    assert {record["probe"] for record in callback.recorder.records} == {"DeadUnits", "GradientNorms"}


def test_a_second_training_is_recorded_anew(lightning, model, optimizer):
    before = hooks(model, optimizer)
    callback = lightning_callback(probes.GradientNorms(), every=1)
    trainer = SimpleNamespace(optimizers=[optimizer])
    callback.on_train_start(trainer, model)  # and no end of it: the process was told to begin again
    steps(model, optimizer, 2)
    first = callback.recorder
    callback.on_train_start(trainer, model)
    steps(model, optimizer, 1)
    callback.on_train_end(trainer, model)
    assert hooks(model, optimizer) == before
    assert {record["step"] for record in first.records} == {0, 1}
    assert {record["step"] for record in callback.recorder.records} == {0}


def test_several_optimizers_of_lightning_are_refused(lightning, model, optimizer):
    callback = lightning_callback(probes.GradientNorms())
    for optimizers in ([], [optimizer, optimizer]):
        with pytest.raises(ArgumentError, match=f"one optimizer; this training has {len(optimizers)}"):
            callback.on_train_start(SimpleNamespace(optimizers=optimizers), model)
    with pytest.raises(ArgumentError, match=r"needs a torch\.optim\.Optimizer to count steps of; got a object"):
        callback.on_train_start(SimpleNamespace(optimizers=[object()]), model)


@pytest.fixture(params=["stand-in", "real"])
def transformers(request, monkeypatch):
    if request.param == "real":
        return pytest.importorskip("transformers")
    missing(monkeypatch, "transformers")
    module = ModuleType("transformers")
    module.TrainerCallback = type("TrainerCallback", (), {})
    monkeypatch.setitem(sys.modules, "transformers", module)
    return module


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_a_trainer_s_training_is_recorded(transformers, model, optimizer, wrapped):
    before = hooks(model, optimizer)
    callback = trainer_callback(probes.EffectiveRate(), every=1)
    assert isinstance(callback, transformers.TrainerCallback)
    arguments = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
    used = Wrapper(Wrapper(optimizer)) if wrapped else optimizer
    extra = {"lr_scheduler": None, "train_dataloader": [], "processing_class": None}
    assert callback.on_train_begin(*arguments, model=model, optimizer=used, **extra) is None
    steps(model, used)
    assert callback.on_train_end(*arguments, model=model, optimizer=used, **extra) is None
    steps(model, used)
    assert [record["step"] for record in callback.recorder.records if record["layer"] == "0"] == [0, 1, 2]
    assert hooks(model, optimizer) == before


def test_a_trainer_without_an_optimizer_is_refused(transformers, model):
    with pytest.raises(ArgumentError, match="one optimizer; this training has 0"):
        trainer_callback(probes.GradientNorms()).on_train_begin(None, None, None, model=model)


# ---- whole runs


def fit_by_lightning(callbacks, folder):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, number):
            self.net(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)

    data = torch.utils.data.TensorDataset(torch.randn(40, 3, 8, 8), torch.arange(40) % 5)
    module, loader = Module(), torch.utils.data.DataLoader(data, 8)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", callbacks=callbacks, default_root_dir=folder, **quiet)
    trainer.fit(module, loader, loader)
    return module


def train_by_transformers(callbacks, folder):
    from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    model = ResNetForImageClassification(ResNetConfig(**sizes, layer_type="basic", num_labels=4))
    examples = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 4} for i in range(40)]
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    options = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "use_cpu": True, **quiet}
    Trainer(model, TrainingArguments(str(folder), **options), train_dataset=examples, callbacks=callbacks).train()
    return model


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")  # the frameworks' own
@pytest.mark.parametrize(
    ("run", "make"), [(fit_by_lightning, lightning_callback), (train_by_transformers, trainer_callback)]
)
def test_a_whole_run_is_recorded_and_is_the_one_without_probes(run, make, tmp_path):
    measured = [probes.ActivationMoments(), probes.EffectiveRate(), probes.StatisticsNoise(), probes.GradientNorms()]
    callback, found = make(measured, every=3), []
    for callbacks in ([], [callback]):
        torch.manual_seed(0)
        found.append(run(callbacks, tmp_path).state_dict())
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
    assert callback.recorder.stopped == {}
    for probe in measured:
        assert {record["step"] for record in callback.recorder.of(probe.name)} == {0, 3, 6, 9}


# ---- what is refused


@pytest.mark.parametrize(("make", "names", "package"), [
    (lightning_callback, ("lightning", "pytorch_lightning"), "lightning"),
    (trainer_callback, ("transformers",), "transformers"),
])  # fmt: skip
def test_a_missing_framework_is_named_with_what_to_install(make, names, package, monkeypatch):
    missing(monkeypatch, *names)
    with pytest.raises(MissingExtraError, match=rf"needs {package}, which.*Install it: pip install {package}\.$"):
        make(probes.GradientNorms())


def test_options_are_attach_s_own(transformers):
    with pytest.raises(ArgumentError, match=r"takes every, out, tensorboard; got 'optimizer'\. The optimizer is"):
        trainer_callback(probes.GradientNorms(), optimizer=None)
    with pytest.raises(ArgumentError, match=r"got 'evry'\. Did you mean .every"):
        trainer_callback(probes.GradientNorms(), evry=3)


def test_importing_it_imports_no_framework(monkeypatch):
    monkeypatch.delitem(sys.modules, "normkit.instruments.callbacks")
    asked = []
    own = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *rest: asked.append(name) or own(name, *rest))
    own("normkit.instruments.callbacks")
    assert asked
    assert [name for name in asked if name.startswith(("lightning", "pytorch_lightning", "transformers"))] == []
