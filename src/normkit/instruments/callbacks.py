"""Probes in other people's training loops: callbacks for Lightning and for the Trainer of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from normkit.errors import ArgumentError, did_you_mean
from normkit.frameworks import Attachment, lightning_class, trainer_class
from normkit.instruments.probe import Probe
from normkit.instruments.recorder import Recorder, attach

_OPTIONS = ("every", "out", "tensorboard")


class ProbeCallback(Attachment):
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
    return lightning_class(ProbeCallback, "lightning_callback")(probes, _checked(options))


def trainer_callback(probes: Probe | Sequence[Probe], **options: Any) -> Any:
    """A callback for `transformers.Trainer(callbacks=[...])` that records while it trains.

    `callback.recorder` has the records. The Trainer tells callbacks nothing of an error: after one,
    `callback.recorder.close()` lets go of the model.

    Args:
        probes: what to measure: see `nk.probes`.
        options: those of `nk.attach`: every, out, tensorboard.
    """
    return trainer_class(ProbeCallback, "trainer_callback")(probes, _checked(options))


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in _OPTIONS:
            near = " The optimizer is the framework's own." if name == "optimizer" else did_you_mean(name, _OPTIONS)
            raise ArgumentError(f"a callback takes {', '.join(_OPTIONS)}; got {name!r}.{near}")
    return options
