"""The layers: torch's constructor arguments, in torch's order, and torch's state_dict keys."""

from normkit.layers.batch import BatchNorm1d as BatchNorm1d
from normkit.layers.batch import BatchNorm2d as BatchNorm2d
from normkit.layers.batch import BatchNorm3d as BatchNorm3d
from normkit.layers.batch import PositionBatchNorm2d as PositionBatchNorm2d

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "PositionBatchNorm2d"]
