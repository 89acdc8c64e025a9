"""normkit: normalization for PyTorch that can be trusted. The public names, as one list."""

from typing import TYPE_CHECKING

from normkit import functional, layers
from normkit.affine import scale_shift
from normkit.errors import (
    ArgumentError,
    BackendError,
    DistributedError,
    DtypeError,
    NonFiniteError,
    NormkitError,
    NormkitWarning,
    ShapeError,
)
from normkit.finding import Finding
from normkit.layers import (
    AccumulatedBatchNorm2d,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    BatchRenorm1d,
    BatchRenorm2d,
    BatchRenorm3d,
    DomainBatchNorm1d,
    DomainBatchNorm2d,
    EvoNormB0,
    EvoNormS0,
    FilterResponseNorm2d,
    FrozenBatchNorm1d,
    FrozenBatchNorm2d,
    FrozenBatchNorm3d,
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    LocalResponseNorm,
    MovingBatchNorm2d,
    PositionBatchNorm2d,
    RMSNorm,
    ScaledStdConv2d,
    ScaleNorm,
    SkipInit,
    SwitchableNorm2d,
    SyncBatchNorm,
    WhitenedBatchNorm1d,
    WhitenedBatchNorm2d,
    adaptive_gradient_clip_,
    domain,
    fixup_init_,
    renorm_schedule,
    weight_norm,
)
from normkit.moments import Moments, ema, population
from normkit.spec import NormSpec, describe

if TYPE_CHECKING:
    __version__: str

    from normkit.surgery.check_export import ExportCheck, check_export
    from normkit.surgery.checkpoint import load, save
    from normkit.surgery.checkpoint.differences import MismatchError
    from normkit.surgery.checkpoint.file import CheckpointError
    from normkit.surgery.checkpoint.manifest import manifest
    from normkit.surgery.fold import fold
    from normkit.surgery.no_updates import no_updates
    from normkit.surgery.replace.convert import convert
    from normkit.surgery.replace.freeze import freeze, unfreeze
    from normkit.surgery.result import Change, Parity, Surgery
    from normkit.surgery.statistics.adapt import adapt
    from normkit.surgery.statistics.recalibrate import recalibrate

__all__ = [
    "AccumulatedBatchNorm2d",
    "ArgumentError",
    "BackendError",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchRenorm1d",
    "BatchRenorm2d",
    "BatchRenorm3d",
    "Change",
    "CheckpointError",
    "DistributedError",
    "DomainBatchNorm1d",
    "DomainBatchNorm2d",
    "DtypeError",
    "EvoNormB0",
    "EvoNormS0",
    "ExportCheck",
    "FilterResponseNorm2d",
    "Finding",
    "FrozenBatchNorm1d",
    "FrozenBatchNorm2d",
    "FrozenBatchNorm3d",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LocalResponseNorm",
    "MismatchError",
    "Moments",
    "MovingBatchNorm2d",
    "NonFiniteError",
    "NormSpec",
    "NormkitError",
    "NormkitWarning",
    "Parity",
    "PositionBatchNorm2d",
    "RMSNorm",
    "ScaleNorm",
    "ScaledStdConv2d",
    "ShapeError",
    "SkipInit",
    "Surgery",
    "SwitchableNorm2d",
    "SyncBatchNorm",
    "WhitenedBatchNorm1d",
    "WhitenedBatchNorm2d",
    "adapt",
    "adaptive_gradient_clip_",
    "check_export",
    "convert",
    "describe",
    "domain",
    "ema",
    "fixup_init_",
    "fold",
    "freeze",
    "functional",
    "layers",
    "load",
    "manifest",
    "no_updates",
    "population",
    "recalibrate",
    "renorm_schedule",
    "save",
    "scale_shift",
    "unfreeze",
    "weight_norm",
]


def __getattr__(name: str) -> object:
    """Load surgery and the version when first asked for: code that only wants layers does not wait for them."""
    if name == "__version__":
        from importlib.metadata import version

        return version("normkit")
    if name in __all__:
        from normkit import surgery

        return getattr(surgery, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
