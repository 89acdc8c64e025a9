"""The layers: torch's constructor arguments, in torch's order, and torch's state_dict keys."""

from normkit.layers.accumulated import AccumulatedBatchNorm1d, AccumulatedBatchNorm2d, AccumulatedBatchNorm3d
from normkit.layers.batch import BatchNorm1d, BatchNorm2d, BatchNorm3d, PositionBatchNorm2d
from normkit.layers.domain import DomainBatchNorm1d, DomainBatchNorm2d, DomainBatchNorm3d, domain
from normkit.layers.dynamic_tanh import Derf, DynamicTanh
from normkit.layers.evo import EvoNormB0, EvoNormS0
from normkit.layers.filter_response import FilterResponseNorm2d
from normkit.layers.fixup import SkipInit, fixup_init_
from normkit.layers.frozen import FrozenBatchNorm1d, FrozenBatchNorm2d, FrozenBatchNorm3d
from normkit.layers.ghost import GhostBatchNorm1d, GhostBatchNorm2d
from normkit.layers.gradient_clip import adaptive_gradient_clip_
from normkit.layers.group import GroupNorm
from normkit.layers.instance import InstanceNorm1d, InstanceNorm2d, InstanceNorm3d
from normkit.layers.layer import LayerNorm
from normkit.layers.local_response import LocalResponseNorm
from normkit.layers.maps import LayerNorm2d, RMSNorm2d
from normkit.layers.moving import MovingBatchNorm2d
from normkit.layers.renorm import BatchRenorm1d, BatchRenorm2d, BatchRenorm3d, renorm_schedule
from normkit.layers.rms import RMSNorm, ScaleNorm
from normkit.layers.scaled_std_conv import ScaledStdConv2d
from normkit.layers.shuffled import ShuffledBatchNorm1d, ShuffledBatchNorm2d
from normkit.layers.split import SplitBatchNorm2d
from normkit.layers.switchable import SwitchableNorm2d
from normkit.layers.sync import SyncBatchNorm
from normkit.layers.weight_norm import weight_norm
from normkit.layers.whitened import WhitenedBatchNorm1d, WhitenedBatchNorm2d

__all__ = [
    "AccumulatedBatchNorm1d",
    "AccumulatedBatchNorm2d",
    "AccumulatedBatchNorm3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchRenorm1d",
    "BatchRenorm2d",
    "BatchRenorm3d",
    "Derf",
    "DomainBatchNorm1d",
    "DomainBatchNorm2d",
    "DomainBatchNorm3d",
    "DynamicTanh",
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
    "LayerNorm2d",
    "LocalResponseNorm",
    "MovingBatchNorm2d",
    "PositionBatchNorm2d",
    "RMSNorm",
    "RMSNorm2d",
    "ScaleNorm",
    "ScaledStdConv2d",
    "ShuffledBatchNorm1d",
    "ShuffledBatchNorm2d",
    "SkipInit",
    "SplitBatchNorm2d",
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
