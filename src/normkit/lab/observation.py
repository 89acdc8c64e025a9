"""Probes on a trial: they see the steps whose result is measured, and their records go with what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from normkit.errors import NormkitError
from normkit.instruments import attach
from normkit.lab.experiment import Training


class ProbeError(NormkitError, RuntimeError):
    """A probe that failed in a trial, whose record would be incomplete without it."""


class Observation:
    """The probes of a training, if it has any, attached to it."""

    def __init__(self, training: Training) -> None:
        self._training, self._batch = training, None
        self._recorder = None
        if training.probes is not None:
            self._recorder = attach(
                training.model, training.probes(self._loss), self._is_measured, optimizer=training.optimizer
            )

    def show(self, batch: Any) -> None:
        """Say which batch the next step is taken on."""
        self._batch = batch

    def records(self) -> dict[str, Any]:
        """What the probes have recorded since this was last called, as a part of a line."""
        if self._recorder is None:
            return {}
        for name, why in self._recorder.stopped.items():
            raise ProbeError(f"{name} failed: {why}")
        found, self._recorder.records = self._recorder.records, []
        return {"probes": found}

    @property
    def seconds(self) -> float:
        """What the probes have taken in all."""
        return 0.0 if self._recorder is None else sum(self._recorder.seconds.values())

    def state(self) -> dict[str, Any]:
        """What a resumed trial needs to record the same."""
        return {} if self._recorder is None else self._recorder.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        if self._recorder is not None:
            self._recorder.load_state(state)

    def close(self) -> None:
        """Let go of the model."""
        if self._recorder is not None:
            self._recorder.close()

    def _is_measured(self, step: int) -> bool:
        after = step + 1
        return after == self._training.steps or self._training.measure_at(after)

    def _loss(self) -> Tensor:
        assert self._batch is not None
        x, y = self._batch
        return self._training.loss(self._training.model(x), y)
