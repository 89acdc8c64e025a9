"""normkit: normalization for PyTorch that can be trusted. The public names, as one list."""

from normkit import functional, layers
from normkit.affine import scale_shift
from normkit.errors import ArgumentError, DtypeError, NonFiniteError, NormkitError, ShapeError
from normkit.layers import BatchNorm1d, BatchNorm2d, BatchNorm3d, PositionBatchNorm2d
from normkit.moments import Moments, ema, population
from normkit.spec import NormSpec, describe

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "DtypeError",
    "Moments",
    "NonFiniteError",
    "NormSpec",
    "NormkitError",
    "PositionBatchNorm2d",
    "ShapeError",
    "describe",
    "ema",
    "functional",
    "layers",
    "population",
    "scale_shift",
]
