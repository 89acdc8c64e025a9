"""Other people's training loops: what a callback of Lightning or of transformers' Trainer has to be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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
