"""The layers: torch's constructor arguments, in torch's order, and torch's state_dict keys."""

from normkit.layers.accumulated import AccumulatedBatchNorm2d as AccumulatedBatchNorm2d
from normkit.layers.batch import BatchNorm1d as BatchNorm1d
from normkit.layers.batch import BatchNorm2d as BatchNorm2d
from normkit.layers.batch import BatchNorm3d as BatchNorm3d
from normkit.layers.batch import PositionBatchNorm2d as PositionBatchNorm2d
from normkit.layers.domain import DomainBatchNorm1d as DomainBatchNorm1d
from normkit.layers.domain import DomainBatchNorm2d as DomainBatchNorm2d
from normkit.layers.domain import domain as domain
from normkit.layers.evo import EvoNormB0 as EvoNormB0
from normkit.layers.evo import EvoNormS0 as EvoNormS0
from normkit.layers.filter_response import FilterResponseNorm2d as FilterResponseNorm2d
from normkit.layers.fixup import SkipInit as SkipInit
from normkit.layers.fixup import fixup_init_ as fixup_init_
from normkit.layers.frozen import FrozenBatchNorm1d as FrozenBatchNorm1d
from normkit.layers.frozen import FrozenBatchNorm2d as FrozenBatchNorm2d
from normkit.layers.frozen import FrozenBatchNorm3d as FrozenBatchNorm3d
from normkit.layers.ghost import GhostBatchNorm1d as GhostBatchNorm1d
from normkit.layers.ghost import GhostBatchNorm2d as GhostBatchNorm2d
from normkit.layers.gradient_clip import adaptive_gradient_clip_ as adaptive_gradient_clip_
from normkit.layers.group import GroupNorm as GroupNorm
from normkit.layers.instance import InstanceNorm1d as InstanceNorm1d
from normkit.layers.instance import InstanceNorm2d as InstanceNorm2d
from normkit.layers.instance import InstanceNorm3d as InstanceNorm3d
from normkit.layers.layer import LayerNorm as LayerNorm
from normkit.layers.local_response import LocalResponseNorm as LocalResponseNorm
from normkit.layers.moving import MovingBatchNorm2d as MovingBatchNorm2d
from normkit.layers.renorm import BatchRenorm1d as BatchRenorm1d
from normkit.layers.renorm import BatchRenorm2d as BatchRenorm2d
from normkit.layers.renorm import BatchRenorm3d as BatchRenorm3d
from normkit.layers.renorm import renorm_schedule as renorm_schedule
from normkit.layers.rms import RMSNorm as RMSNorm
from normkit.layers.rms import ScaleNorm as ScaleNorm
from normkit.layers.scaled_std_conv import ScaledStdConv2d as ScaledStdConv2d
from normkit.layers.switchable import SwitchableNorm2d as SwitchableNorm2d
from normkit.layers.sync import SyncBatchNorm as SyncBatchNorm
from normkit.layers.weight_norm import weight_norm as weight_norm
from normkit.layers.whitened import WhitenedBatchNorm1d as WhitenedBatchNorm1d
from normkit.layers.whitened import WhitenedBatchNorm2d as WhitenedBatchNorm2d

__all__ = [
    "AccumulatedBatchNorm2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchRenorm1d",
    "BatchRenorm2d",
    "BatchRenorm3d",
    "DomainBatchNorm1d",
    "DomainBatchNorm2d",
    "EvoNormB0",
    "EvoNormS0",
    "FilterResponseNorm2d",
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
    "MovingBatchNorm2d",
    "PositionBatchNorm2d",
    "RMSNorm",
    "ScaleNorm",
    "ScaledStdConv2d",
    "SkipInit",
    "SwitchableNorm2d",
    "SyncBatchNorm",
    "WhitenedBatchNorm1d",
    "WhitenedBatchNorm2d",
    "adaptive_gradient_clip_",
    "domain",
    "fixup_init_",
    "renorm_schedule",
    "weight_norm",
]
