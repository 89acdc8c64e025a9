"""What examine measures once, and all its rules read."""

from normkit.doctor.evidence.evidence import Evidence
from normkit.doctor.evidence.statistics import LayerStatistics

__all__ = ["Evidence", "LayerStatistics"]
