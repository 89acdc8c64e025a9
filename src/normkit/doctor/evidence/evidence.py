"""The evidence itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from normkit.doctor.evidence.attribution import Share
from normkit.doctor.evidence.measure import Gap
from normkit.doctor.evidence.statistics import LayerStatistics
from normkit.surgery.norms import Norm


@dataclass
class Evidence:
    """What examine knows of a model.

    Attributes:
        model: the model, as the rules may read it: in the modes that the user left it in.
        norms: its norm layers.
        unknown: layers that are norms by their names, and none that we know.
        batches: how many batches the model was run on.
        modes: whether each norm was in training mode.
        statistics: by name, the norms with statistics across examples that ran, in the order in which they first ran.
        gap: the measure in training, evaluation and recalibrated mode; None if nothing could be measured.
        shares: by name, the parts of a material gap; empty if there is none.
        optimizer: the user's.
    """

    model: nn.Module
    norms: list[Norm]
    unknown: dict[str, nn.Module]
    batches: int
    modes: dict[str, bool]
    statistics: dict[str, LayerStatistics]
    gap: Gap | None = None
    shares: dict[str, Share] = field(default_factory=dict)
    optimizer: Optimizer | None = None

    def plain(self) -> dict[str, Any]:
        """What reports show."""
        return {
            "gap": None if self.gap is None else self.gap.plain(),
            "layers": [self._layer(norm) for norm in self.norms],
            "batches": self.batches,
        }

    def _layer(self, norm: Norm) -> dict[str, Any]:
        known, share = self.statistics.get(norm.name), self.shares.get(norm.name)
        stored = None if known is None else known.stored
        data = None if known is None else known.data
        return {
            "name": norm.name,
            "class": type(norm.layer).__name__,
            "kind": norm.spec.kind,
            "share": None if share is None else share.share,
            "stored_mean": None if stored is None else stored.mean.tolist(),
            "data_mean": None if data is None else data.mean.flatten().tolist(),
            "stored_var": None if stored is None else stored.var.tolist(),
            "data_var": None if data is None else data.var.flatten().tolist(),
        }
