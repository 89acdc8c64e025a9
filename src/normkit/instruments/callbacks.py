"""Probes in other people's training loops: callbacks for Lightning and for the Trainer of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from normkit.errors import ArgumentError, MissingExtraError, did_you_mean
from normkit.instruments.probe import Probe
from normkit.instruments.recorder import Recorder, attach
from normkit.optional import required

_OPTIONS = ("every", "out", "tensorboard")


class ProbeCallback:
    """Attaches probes when training begins and lets go when it ends.

    Attributes:
        recorder: what was recorded, from the beginning of training on; it stays when training has ended.
    """

    def __init__(self, probes: Probe | Sequence[Probe], options: dict[str, Any]) -> None:
        super().__init__()
        self.recorder: Recorder | None = None
        self._probes, self._options = probes, options

    def attach_to(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Begin to record; what an earlier training has left attached is closed."""
        self.detach()
        self.recorder = attach(model, self._probes, optimizer=optimizer, **self._options)

    def detach(self) -> None:
        """Let go of the model. The records stay."""
        if self.recorder is not None:
            self.recorder.close()


def lightning_callback(probes: Probe | Sequence[Probe], **options: Any) -> Any:
    """A callback for `lightning.Trainer(callbacks=[...])` that records while it fits.

    It watches the LightningModule and the trainer's optimizer, of which there must be one. `callback.recorder` has the
    records.

    Args:
        probes: what to measure: see `nk.probes`.
        options: those of `nk.attach`: every, out, tensorboard.
    """
    base: Any = _framework(("lightning.pytorch", "pytorch_lightning"), "lightning_callback", "lightning").Callback

    class LightningProbes(ProbeCallback, base):
        """Records while a Lightning trainer fits."""

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
            self.attach_to(pl_module, _only(trainer.optimizers))

        def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
            self.detach()

        def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
            self.detach()

    return LightningProbes(probes, _checked(options))


def trainer_callback(probes: Probe | Sequence[Probe], **options: Any) -> Any:
    """A callback for `transformers.Trainer(callbacks=[...])` that records while it trains.

    `callback.recorder` has the records. The Trainer tells callbacks nothing of an error: after one,
    `callback.recorder.close()` lets go of the model.

    Args:
        probes: what to measure: see `nk.probes`.
        options: those of `nk.attach`: every, out, tensorboard.
    """
    base: Any = _framework(("transformers",), "trainer_callback", "transformers").TrainerCallback

    class TrainerProbes(ProbeCallback, base):
        """Records while a Trainer of transformers trains."""

        def on_train_begin(
            self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any
        ) -> None:
            self.attach_to(model, _only([] if optimizer is None else [optimizer]))

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.detach()

    return TrainerProbes(probes, _checked(options))


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


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in _OPTIONS:
            near = " The optimizer is the framework's own." if name == "optimizer" else did_you_mean(name, _OPTIONS)
            raise ArgumentError(f"a callback takes {', '.join(_OPTIONS)}; got {name!r}.{near}")
    return options


def _only(optimizers: Sequence[Any]) -> torch.optim.Optimizer:
    """The one optimizer, without what a framework has wrapped around it: only its own steps call hooks."""
    if len(optimizers) != 1:
        raise ArgumentError(
            f"a callback counts the steps of one optimizer; this training has {len(optimizers)}. Call nk.attach with "
            "the one to count."
        )
    found = optimizers[0]
    while isinstance(getattr(found, "optimizer", None), torch.optim.Optimizer):
        found = found.optimizer
    if not isinstance(found, torch.optim.Optimizer):
        raise ArgumentError(
            f"a callback needs a torch.optim.Optimizer to count steps of; got a {type(found).__name__}."
        )
    return found
