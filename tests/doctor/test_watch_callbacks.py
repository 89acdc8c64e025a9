"""The ledger in frameworks' loops: as these call it, and in whole runs of the real ones."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.doctor.callbacks import lightning_callback, trainer_callback
from normkit.errors import MissingExtraError
from support.loops import at_norms, batches, codes, net, sgd, train


def stand_in(monkeypatch, name, kind):
    package = name.partition(".")[0]
    for known in [n for n in sys.modules if n.partition(".")[0] in (package, "pytorch_lightning")]:
        monkeypatch.delitem(sys.modules, known)
    for part in {package, name}:
        module = ModuleType(part)
        setattr(module, kind, type(kind, (), {}))
        monkeypatch.setitem(sys.modules, part, module)


@pytest.fixture
def frameworks(monkeypatch):
    stand_in(monkeypatch, "lightning.pytorch", "Callback")
    stand_in(monkeypatch, "transformers", "TrainerCallback")


def begin(callback, model, optimizer):
    if hasattr(callback, "on_train_start"):
        callback.on_train_start(SimpleNamespace(optimizers=[optimizer]), model)
    else:
        callback.on_train_begin(None, None, None, model=model, optimizer=optimizer, train_dataloader=[])


def end(callback):
    arguments = (None, None) if hasattr(callback, "on_train_start") else (None, None, None)
    callback.on_train_end(*arguments)


@pytest.mark.parametrize("make", [lightning_callback, trainer_callback])
def test_a_training_is_watched_and_what_is_wrong_is_warned_of(frameworks, make):
    model = net(momentum=0.99)
    optimizer, callback = sgd(model), make()
    begin(callback, model, optimizer)
    train(model, optimizer, batches(3))
    with pytest.warns(nk.NormkitWarning, match=r"NK104 inverted-momentum: 1: (.|\n)*NK104 inverted-momentum: 4: "):
        end(callback)
    assert codes(callback.ledger) == at_norms("NK104")
    assert callback.ledger.steps == 3
    assert not any(layer._forward_hooks for layer in model.modules())


@pytest.mark.parametrize("make", [lightning_callback, trainer_callback])
def test_a_healthy_training_is_silent_and_a_second_one_is_watched_anew(frameworks, make):
    model = net()
    optimizer, callback = sgd(model), make()
    for count in (2, 3):
        begin(callback, model, optimizer)
        train(model, optimizer, batches(count))
        first = callback.ledger
    end(callback)
    assert (first.steps, first.findings) == (3, [])
    assert not any(layer._forward_hooks for layer in model.modules())


def test_an_error_in_lightning_s_training_lets_go(frameworks):
    model = net(momentum=0.99)
    optimizer, callback = sgd(model), lightning_callback(ignore="NK104")
    begin(callback, model, optimizer)
    train(model, optimizer, batches(1))
    callback.on_exception(None, model, RuntimeError("out of memory"))
    assert callback.ledger.findings == []
    assert not any(layer._forward_hooks for layer in model.modules())


def test_a_missing_framework_is_named(monkeypatch):
    for name in ("lightning", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    with pytest.raises(MissingExtraError, match=r"needs lightning.*pip install lightning\.$"):
        lightning_callback()
    with pytest.raises(MissingExtraError, match=r"needs transformers.*pip install transformers\.$"):
        trainer_callback()


# ---- whole runs


def fit_by_lightning(callbacks, folder, is_faulty):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, number):
            if is_faulty:
                with torch.no_grad():
                    self.net(batch[0] + 1)
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, number):
            self.net(batch[0])

        def configure_optimizers(self):
            return sgd(self)

    data = torch.utils.data.TensorDataset(torch.randn(40, 3, 8, 8), torch.arange(40) % 4)
    module, loader = Module(), torch.utils.data.DataLoader(data, 8)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", callbacks=callbacks, default_root_dir=folder, **quiet)
    trainer.fit(module, loader, loader)
    return module, {f"net.{name}" for name in ("1", "4")}


def train_by_transformers(callbacks, folder, is_faulty):
    from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    model = ResNetForImageClassification(ResNetConfig(**sizes, layer_type="basic", num_labels=4))
    examples = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 4} for i in range(48)]
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    options = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "use_cpu": True, "weight_decay": 0.01, **quiet}
    if is_faulty:
        options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    Trainer(model, TrainingArguments(str(folder), **options), train_dataset=examples, callbacks=callbacks).train()
    return model, {name for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)}


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")  # the frameworks' own, and ours
@pytest.mark.parametrize(
    ("run", "make", "code"),
    [(fit_by_lightning, lightning_callback, "NK204"), (train_by_transformers, trainer_callback, "NK206")],
)
def test_a_whole_run_is_watched_and_is_the_one_without(run, make, code, tmp_path):
    callback, found = make(), []
    for callbacks in ([], [callback]):
        torch.manual_seed(0)
        found.append(run(callbacks, tmp_path, False)[0].state_dict())
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
    assert (callback.ledger.stopped, codes(callback.ledger)) == (None, set())
    _, layers = run([callback], tmp_path, True)
    assert codes(callback.ledger) == {(code, layer) for layer in layers}
    assert {finding.evidence["file"] for finding in callback.ledger.findings} == {__file__}
