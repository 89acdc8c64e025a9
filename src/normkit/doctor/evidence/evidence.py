"""The evidence itself: what rules read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn
from torch.optim import Optimizer

from normkit.doctor.evidence.attribution import Share
from normkit.doctor.evidence.given import Given
from normkit.doctor.evidence.measure import Gap, Loss
from normkit.doctor.evidence.observer import stores_batch_moments
from normkit.doctor.evidence.runs import Refusal, Runs, in_training
from normkit.doctor.evidence.statistics import LayerStatistics
from normkit.doctor.evidence.wiring import dropout_before_norms, weights_before
from normkit.moments import Moments
from normkit.ranks import world_size
from normkit.surgery.fold.dataflow import Flow, record
from normkit.surgery.norms import Norm


@dataclass
class Evidence:
    """What examine knows of a model.

    Attributes:
        model: the model, in the modes that the user left it in.
        norms: its norm layers.
        unknown: layers that are norms by their names, and none that we know.
        modes: whether each norm is in training mode.
        runs: runs the model on the batches again.
        statistics: by name, the norms with statistics across examples that ran, in the order in which they first ran.
        given: by name, what each norm that ran was given on the first batches.
        gap: the measure in training, evaluation and recalibrated mode; None if nothing could be measured.
        shares: by name, the parts of a material gap; empty if there is none.
        refusals: layers that raised for too few values.
        training_error: why the model does not run in training mode on these batches; None if it does.
        smallest_batch: examples in the smallest batch of one pass over the user's source; None if not known.
        loss: the user's loss, as a measure.
        optimizer: the user's.
    """

    model: nn.Module
    norms: list[Norm]
    unknown: dict[str, nn.Module]
    modes: dict[str, bool]
    runs: Runs
    statistics: dict[str, LayerStatistics] = field(default_factory=dict)
    given: dict[str, list[Given]] = field(default_factory=dict)
    gap: Gap | None = None
    shares: dict[str, Share] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    training_error: str | None = None
    smallest_batch: int | None = None
    loss: Loss | None = None
    optimizer: Optimizer | None = None

    @property
    def batches(self) -> int:
        """How many batches the model was run on."""
        return len(self.runs.batches)

    @cached_property
    def by_name(self) -> dict[str, Norm]:
        """The norms."""
        return {norm.name: norm for norm in self.norms}

    @property
    def stored(self) -> Iterator[tuple[Norm, LayerStatistics]]:
        """The norms that ran and store the moments of batches, in the order they run."""
        return ((known.norm, known) for known in self.statistics.values() if stores_batch_moments(known.norm))

    @cached_property
    def exchangeable(self) -> list[Norm]:
        """Those of them for which the batches have statistics to exchange theirs for."""
        return [norm for norm, known in self.stored if known.data is not None]

    @cached_property
    def population(self) -> dict[str, Moments]:
        """The statistics of the data for them, in the shape of their buffers, with the unbiased variance."""
        found = {}
        for norm in self.exchangeable:
            data, buffer = self.statistics[norm.name].data, norm.layer._buffers["running_var"]
            assert data is not None
            assert buffer is not None
            found[norm.name] = Moments(data.mean.view(buffer.shape), data.unbiased_var.view(buffer.shape), data.count)
        return found

    @cached_property
    def flow(self) -> Flow | None:
        """The operators of one forward in training mode; in evaluation if it does not run in training, None in neither.

        Every call of a norm is one event.
        """
        norms = {norm.name: norm.layer for norm in self.norms}
        example, forward = self.runs.several, self.runs.forward
        if example is None:
            return None
        with suppress(Exception):
            return record(self.model, norms, example, forward, in_mode=in_training)
        with suppress(Exception):
            return record(self.model, norms, example, forward)
        return None

    @cached_property
    def dropout(self) -> dict[str, set[str]]:
        """By norm, the layers whose dropout reaches it."""
        return {} if self.flow is None else dropout_before_norms(self.flow)

    @cached_property
    def weights_before(self) -> dict[str, list[nn.Parameter]]:
        """By norm, the weights that its input is a product of."""
        return {} if self.flow is None else weights_before(self.model, self.flow)

    @cached_property
    def optimized(self) -> set[int] | None:
        """The ids of the parameters that the optimizer moves; None without an optimizer."""
        if self.optimizer is None:
            return None
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    def learns(self, parameter: nn.Parameter | None) -> bool:
        """Whether training moves a parameter: it requires a gradient, and the optimizer, if there is one, has it."""
        if parameter is None or not parameter.requires_grad:
            return False
        return self.optimized is None or id(parameter) in self.optimized

    def is_frozen(self, norm: Norm) -> bool:
        """Whether neither a norm's own parameters nor the weights that its input is a product of learn."""
        parameters = [*norm.layer.parameters(), *self.weights_before.get(norm.name, [])]
        return bool(parameters) and not any(self.learns(parameter) for parameter in parameters)

    def share_of(self, name: str) -> float | None:
        """A layer's part of a material gap."""
        share = self.shares.get(name)
        return None if share is None else share.share

    def plain(self) -> dict[str, Any]:
        """What reports show."""
        return {
            "gap": None if self.gap is None else self.gap.plain(),
            "layers": [self._layer(norm) for norm in self.norms],
            "unknown": {name: type(layer).__name__ for name, layer in self.unknown.items()},
            "training_error": self.training_error,
            "batches": self.batches,
            "ranks": world_size(),
        }

    def _layer(self, norm: Norm) -> dict[str, Any]:
        known = self.statistics.get(norm.name)
        stored = None if known is None else known.stored
        data = None if known is None else known.data
        return {
            "name": norm.name,
            "class": type(norm.layer).__name__,
            "kind": norm.spec.kind,
            "share": self.share_of(norm.name),
            "stored_mean": None if stored is None else stored.mean.tolist(),
            "data_mean": None if data is None else data.mean.tolist(),
            "stored_var": None if stored is None else stored.var.tolist(),
            "data_var": None if data is None else data.var.tolist(),
        }
