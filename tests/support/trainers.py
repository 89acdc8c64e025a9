"""One small training, by a loop of one's own, by Lightning's Trainer and by that of transformers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from normkit.surgery.callbacks import lightning_callback, trainer_callback
from support.loops import CLASSES, net, sgd

NORMS = ("net.1", "net.4")
SIZE, STEPS = 8, 5  # of a batch, and of an epoch


class Examples(Dataset):
    """Images with labels, as dictionaries."""

    def __init__(self, count=SIZE * STEPS):
        draws = torch.Generator().manual_seed(3)
        self.x = 1 + 2 * torch.randn(count, 3, 8, 8, generator=draws).double()
        self.y = torch.arange(count) % CLASSES

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


class Task(nn.Module):
    """A network with random state in its norms, and its loss; it notes what its first norm is whenever it trains.

    With `penalty` a batch is run twice, and with `stubborn` the norms are in training mode in validations, too.
    """

    def __init__(self, penalty=False, stubborn=False):
        super().__init__()
        self.net = net().double()
        self.penalty, self.stubborn = penalty, stubborn
        self.seen = []

    def forward(self, x, labels=None):
        norm = self.net[1]
        if self.training:
            self.seen.append((type(norm).__name__, norm.running_mean.clone(), norm.weight.detach().clone()))
        for layer in (self.net[1], self.net[4]):
            layer.training |= self.stubborn
        logits = self.net(x)
        if self.penalty and self.training:
            logits = logits + 0 * self.net(x / 2)
        return {"loss": None if labels is None else F.cross_entropy(logits, labels), "logits": logits}


def loader(shuffle=False, **options):
    return DataLoader(Examples(), SIZE, shuffle=shuffle, **options)


def plain(callback, folder, task=None, *, epochs=2, validate=False, resume=False, batches=None):
    """A loop as one writes it, with all that a callback may be told."""
    task, batches = task or Task(), batches or loader()
    if callback is not None:
        callback.on_setup(task)
    optimizer, first = sgd(task), 0
    if resume:
        state = torch.load(folder / "checkpoint.pt")
        task.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    if callback is not None:
        callback.on_start(task, batches)
    for epoch in range(first, epochs):
        if callback is not None:
            callback.on_epoch(task, epoch)
        for batch in batches:
            task.train()
            if callback is not None:
                callback.on_batch(task)
            optimizer.zero_grad()
            task(**batch)["loss"].backward()
            optimizer.step()
        if validate:
            task.eval()
            if callback is not None:
                callback.on_validation(task, batches)
            for batch in batches:
                task(**batch)
            if callback is not None:
                callback.on_validation_end(task)
        state = {"model": task.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(state, folder / "checkpoint.pt")
    if callback is not None:
        callback.on_end(task, batches)
    return task


def lightning(callback, folder, task=None, *, epochs=2, validate=False, resume=False, batches=None, **options):
    """As the others, by Lightning's Trainer, which takes the options."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self, task):
            super().__init__()
            self.net, self.task = task.net, [task]  # in a list: the names are those of the other loops

        def forward(self, x, labels=None):
            self.task[0].training = self.training
            return self.task[0](x, labels)

        def training_step(self, batch, number):
            return self(**batch)["loss"]

        def validation_step(self, batch, number):
            self(**batch)

        def configure_optimizers(self):
            return sgd(self)

    task = task or Task()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [] if callback is None else [lightning_callback(callback)]
    callbacks.append(pl.callbacks.ModelCheckpoint(folder, filename="last", enable_version_counter=False))
    options = {"max_epochs": epochs, "accelerator": "cpu", "default_root_dir": folder, **quiet, **options}
    if not validate:
        options |= {"limit_val_batches": 0}
    trainer = pl.Trainer(callbacks=callbacks, **options)
    trainer.fit(Module(task), batches or loader(), loader(), ckpt_path=folder / "last.ckpt" if resume else None)
    return task


def transformers(callback, folder, task=None, *, epochs=2, validate=False, resume=False, batches=None, **options):
    """As the others; `validate` may be a number of steps after each of which it validates."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(self.train_dataset)

        def create_optimizer(self, model=None):
            self.optimizer = sgd(self.model)
            return self.optimizer

        def get_train_dataloader(self):
            return super().get_train_dataloader() if batches is None else self.accelerator.prepare(batches)

    task = task or Task()
    quiet = {"report_to": [], "logging_strategy": "no", "disable_tqdm": True}
    options = {"num_train_epochs": epochs, "per_device_train_batch_size": SIZE, "use_cpu": True, **quiet, **options}
    options |= {"max_grad_norm": 0, "lr_scheduler_type": "constant", "save_strategy": "epoch"}
    options |= {"eval_strategy": "epoch" if validate is True else "steps" if validate else "no", "eval_steps": validate}
    options |= {"remove_unused_columns": False, "label_names": ["labels"], "dataloader_pin_memory": False}
    trainer = InOrder(
        task,
        TrainingArguments(str(folder), **options),
        train_dataset=Examples(),
        eval_dataset=Examples(),
        callbacks=[] if callback is None else [trainer_callback(callback)],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return task


REAL = [pytest.mark.deep, pytest.mark.filterwarnings("ignore")]  # the frameworks' own warnings
RUNS = [plain, pytest.param(lightning, marks=REAL), pytest.param(transformers, marks=REAL)]


def started(seed=0, **options):
    """A task in a random state of its own, the same for the same seed, and a copy of its state."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        task = Task(**options)
    return task, {key: value.clone() for key, value in task.state_dict().items()}


def moved(before, task):
    """The names of the entries of a state that are not what they were."""
    return {key for key, value in task.state_dict().items() if not torch.equal(value, before[key])}


def of_norms(*names):
    """Entries of the state of all norms."""
    return {f"{norm}.{name}" for norm in NORMS for name in names}


AFFINE, STATISTICS = ("weight", "bias"), ("running_mean", "running_var", "num_batches_tracked")
REST = {"net.0.weight", "net.3.weight", "net.7.weight", "net.7.bias"}
