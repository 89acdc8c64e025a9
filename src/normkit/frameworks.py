"""Other people's training loops: what a callback of Lightning or of transformers' Trainer has to be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from normkit.errors import ArgumentError, MissingExtraError
from normkit.optional import required


class Attachment(ABC):
    """Something that is attached to a model when training begins, and detached when it ends."""

    @abstractmethod
    def attach_to(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Begin, with what the framework trains; what an earlier training has left attached is detached first."""

    @abstractmethod
    def detach(self) -> None:
        """Let go of the model."""


def lightning_class(kind: type[Attachment], what: str) -> type[Any]:
    """A class of callbacks for Lightning's Trainer that is this attachment, too; `what` needs Lightning."""
    base: Any = _framework(("lightning.pytorch", "pytorch_lightning"), what, "lightning").Callback

    class LightningCallback(kind, base):  # type: ignore[valid-type, misc]
        """Attached while a Lightning trainer fits."""

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
            self.attach_to(pl_module, only_optimizer(trainer.optimizers))

        def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
            self.detach()

        def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
            self.detach()

    return LightningCallback


def trainer_class(kind: type[Attachment], what: str) -> type[Any]:
    """A class of callbacks for the Trainer of transformers that is this attachment, too; `what` needs transformers.

    The Trainer tells callbacks nothing of an error: after one, somebody has to call `detach`.
    """
    base: Any = _framework(("transformers",), what, "transformers").TrainerCallback

    class TrainerCallback(kind, base):  # type: ignore[valid-type, misc]
        """Attached while a Trainer of transformers trains."""

        def on_train_begin(
            self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any
        ) -> None:
            self.attach_to(model, only_optimizer([] if optimizer is None else [optimizer]))

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.detach()

    return TrainerCallback


class LoopCallback:
    """Told of what happens in a training loop, by a loop of one's own or by a framework; by itself it does nothing.

    A loop of one's own has to call `on_start` and `on_end`, and of the others what the callback is about.
    """

    def on_setup(self, model: nn.Module) -> None:
        """Before the optimizer is made and DistributedDataParallel wraps the model. Optional."""

    def on_start(self, model: nn.Module, batches: Iterable[Any] | None = None) -> None:
        """Training begins, on these batches."""

    def on_epoch(self, model: nn.Module, epoch: int) -> None:
        """An epoch begins; the first is 0."""

    def on_batch(self, model: nn.Module) -> None:
        """A batch of training begins."""

    def on_validation(self, model: nn.Module, batches: Iterable[Any] | None = None, *, is_sanity: bool = False) -> None:
        """A validation begins, in a training on these batches; `is_sanity`: one that comes before all training."""

    def on_validation_end(self, model: nn.Module) -> None:
        """A validation has ended."""

    def on_end(self, model: nn.Module, batches: Iterable[Any] | None = None) -> None:
        """Training on these batches has ended."""
        self.on_error(model)

    def on_error(self, model: nn.Module) -> None:
        """Training has ended with an error: let go of the model."""


def lightning_loop_callback(callback: LoopCallback, what: str) -> Any:
    """A callback for Lightning's Trainer that tells this one; `what` needs Lightning. It can be pickled."""
    base: Any = _framework(("lightning.pytorch", "pytorch_lightning"), what, "lightning").Callback

    class LightningLoopCallback(base):
        """Tells a callback what happens while a Lightning trainer fits."""

        def __init__(self) -> None:
            super().__init__()
            self.callback = callback

        def __reduce__(self) -> tuple[Any, ...]:
            return lightning_loop_callback, (self.callback, what)

        def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
            if stage == "fit":
                self.callback.on_setup(pl_module)

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
            self.callback.on_start(pl_module, trainer.train_dataloader)
            # Lightning tells nothing of the beginning of an epoch in which it resumes.
            self.callback.on_epoch(pl_module, trainer.current_epoch)

        def on_train_epoch_start(self, trainer: Any, pl_module: nn.Module) -> None:
            self.callback.on_epoch(pl_module, trainer.current_epoch)

        def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
            self.callback.on_batch(pl_module)

        def on_validation_start(self, trainer: Any, pl_module: nn.Module) -> None:
            if trainer.state.fn == "fit":
                is_sanity = trainer.sanity_checking
                self.callback.on_validation(pl_module, trainer.train_dataloader, is_sanity=is_sanity)

        def on_validation_end(self, trainer: Any, pl_module: nn.Module) -> None:
            self.callback.on_validation_end(pl_module)

        def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
            self.callback.on_end(pl_module, trainer.train_dataloader)

        def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
            self.callback.on_error(pl_module)

    return LightningLoopCallback()


def trainer_loop_callback(callback: LoopCallback, what: str) -> Any:
    """A callback for the Trainer of transformers that tells this one; `what` needs transformers. It can be pickled.

    The Trainer tells callbacks of a validation only when it is over: one that it begins itself is seen by its decision.
    It tells nothing of an error: after one, somebody has to call `on_error`.
    """
    base: Any = _framework(("transformers",), what, "transformers").TrainerCallback

    class TrainerLoopCallback(base):
        """Tells a callback what happens while a Trainer of transformers trains."""

        def __init__(self) -> None:
            super().__init__()
            self.callback = callback

        def __reduce__(self) -> tuple[Any, ...]:
            return trainer_loop_callback, (self.callback, what)

        def on_init_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
            if model is not None:
                self.callback.on_setup(model)

        def on_train_begin(
            self, args: Any, state: Any, control: Any, *, model: Any = None, train_dataloader: Any = None, **_: Any
        ) -> None:
            self.callback.on_start(model, train_dataloader)

        def on_epoch_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
            self.callback.on_epoch(model, int(state.epoch or 0))

        def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
            self.callback.on_batch(model)

        def on_substep_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
            self.callback.on_batch(model)  # the next one of those whose gradients are accumulated

        def on_step_end(
            self, args: Any, state: Any, control: Any, *, model: Any = None, train_dataloader: Any = None, **_: Any
        ) -> None:
            if control.should_evaluate:
                self.callback.on_validation(model, train_dataloader)

        on_epoch_end = on_step_end

        def on_evaluate(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
            self.callback.on_validation_end(model)

        def on_train_end(
            self, args: Any, state: Any, control: Any, *, model: Any = None, train_dataloader: Any = None, **_: Any
        ) -> None:
            self.callback.on_end(model, train_dataloader)

    return TrainerLoopCallback()


def lightning_layer_sync(callback: LoopCallback, what: str) -> Any:
    """A plugin for Lightning's Trainer that tells a callback when layers are to be synchronized, and when no more."""
    names = ("lightning.pytorch.plugins.layer_sync", "pytorch_lightning.plugins.layer_sync")
    base: Any = _framework(names, what, "lightning").LayerSync

    class CallbackLayerSync(base):
        """Tells a callback of the processes that are about to train a model, and of their end."""

        def __init__(self) -> None:
            super().__init__()
            self.callback = callback

        def __reduce__(self) -> tuple[Any, ...]:
            return lightning_layer_sync, (self.callback, what)

        def apply(self, model: nn.Module) -> nn.Module:
            self.callback.on_setup(model)
            return model

        def revert(self, model: nn.Module) -> nn.Module:
            self.callback.on_end(model)
            return model

    return CallbackLayerSync()


def only_optimizer(optimizers: Sequence[Any]) -> torch.optim.Optimizer:
    """The one optimizer, without what a framework has wrapped around it: only its own steps call hooks."""
    if len(optimizers) != 1:
        raise ArgumentError(
            f"a callback counts the steps of one optimizer; this training has {len(optimizers)}. Call nk.attach or "
            "nk.watch with the one to count."
        )
    found = unwrapped_optimizer(optimizers[0])
    if found is None:
        raise ArgumentError(
            f"a callback needs a torch.optim.Optimizer to count steps of; got a {type(optimizers[0]).__name__}."
        )
    return found


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """An optimizer without the wrappers of frameworks around it; None if there is no optimizer of torch's inside."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def _framework(modules: Sequence[str], what: str, package: str) -> Any:
    """The first of the modules that can be imported. It is not of an extra of ours: its own name is to be installed."""
    for module in modules:
        try:
            return required(module, what, package)
        except MissingExtraError as error:
            cause = error.__cause__
    raise MissingExtraError(
        f"{what} needs {package}, which cannot be imported: {cause}. Install it: pip install {package}."
    )
