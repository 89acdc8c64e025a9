"""The ledger in other people's training loops: callbacks for Lightning and for the Trainer of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from normkit.doctor.ledger import Ledger
from normkit.doctor.watch import watch
from normkit.errors import NormkitWarning
from normkit.frameworks import Attachment, lightning_class, trainer_class

Codes = str | Iterable[str] | None


class WatchCallback(Attachment):
    """Opens a ledger when training begins, and closes it when it ends.

    Attributes:
        ledger: that of the last training; it stays when training has ended.
    """

    def __init__(self, select: Codes, ignore: Codes) -> None:
        super().__init__()
        self.ledger: Ledger | None = None
        self._select, self._ignore = select, ignore

    def attach_to(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Begin a ledger; what an earlier training has left open is closed."""
        if self.ledger is not None:
            self.ledger.close()
        self.ledger = watch(model, optimizer, select=self._select, ignore=self._ignore)

    def detach(self) -> None:
        """Close the ledger, and warn of what it found."""
        if self.ledger is not None:
            self.ledger.close()
            found = [str(finding) for finding in self.ledger.findings if finding.severity != "info"]
            if found:
                warnings.warn("\n".join(found), NormkitWarning, stacklevel=2)


def lightning_callback(*, select: Codes = None, ignore: Codes = None) -> Any:
    """A callback for `lightning.Trainer(callbacks=[...])` that keeps a ledger while it fits.

    It watches the LightningModule and the trainer's optimizer, of which there must be one. `callback.ledger` has the
    writes and the findings; errors and warnings among these are warned of when training ends.

    Args:
        select: codes, beginnings of codes or names of the rules to go by; without it, all.
        ignore: those to leave out.
    """
    return lightning_class(WatchCallback, "lightning_callback")(select, ignore)


def trainer_callback(*, select: Codes = None, ignore: Codes = None) -> Any:
    """A callback for `transformers.Trainer(callbacks=[...])` that keeps a ledger while it trains.

    `callback.ledger` has the writes and the findings; errors and warnings among these are warned of when training ends.
    The Trainer tells callbacks nothing of an error: after one, `callback.ledger.close()` lets go of the model.

    Args:
        select: codes, beginnings of codes or names of the rules to go by; without it, all.
        ignore: those to leave out.
    """
    return trainer_class(WatchCallback, "trainer_callback")(select, ignore)
