"""What a module normalizes, read off any norm layer: ours, torch's, or another library's.

A new layer needs its kind in `Kind` and its place in the sets below that, in `norm_spec`, and a `_describe` here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, singledispatch
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from normkit.activations import activation_child, activation_of, label
from normkit.layers.accumulated import AccumulatedBatchNorm
from normkit.layers.batch import BatchNorm, PositionBatchNorm2d
from normkit.layers.channel_norm import ChannelNorm
from normkit.layers.domain import DomainBatchNorm
from normkit.layers.dynamic_tanh import Derf, Squashed
from normkit.layers.evo import EvoNormB0, EvoNormS0
from normkit.layers.filter_response import FilterResponseNorm2d
from normkit.layers.fixup import SkipInit
from normkit.layers.frozen import FrozenBatchNorm
from normkit.layers.ghost import GhostBatchNorm
from normkit.layers.maps import LayerNorm2d, RMSNorm2d
from normkit.layers.moving import MovingBatchNorm2d
from normkit.layers.renorm import BatchRenorm
from normkit.layers.rms import ScaleNorm
from normkit.layers.scaled_std_conv import ScaledStdConv2d
from normkit.layers.split import SplitBatchNorm2d
from normkit.layers.switchable import SwitchableNorm2d
from normkit.layers.sync import SyncBatchNorm
from normkit.layers.whitened import WhitenedBatchNorm
from normkit.spec.candidate import may_be_tried
from normkit.spec.norm_spec import Affine, Axis, Kind, NormSpec, Updates, affine_of
from normkit.spec.trial import recognized


def describe(module: nn.Module) -> NormSpec | None:
    """Return what `module` normalizes and how, or None if it is not a norm we can recognize.

    Subclasses are described as the class they derive from, with `exact=False` and the activation found among their
    children, if any. A frozen BatchNorm, as torchvision and detectron2 write it, is recognized by its buffers. Layer
    and RMS norms of other libraries are recognized by what they compute: a small module whose forward needs one tensor
    is tried, on a copy with random parameters, and described if its outputs are those of a norm.
    """
    if is_tried(module):
        tried = recognized(module)
        return None if tried is None else replace(tried, activation=label(activation_child(module)))
    spec = _describe(module)
    if spec is None:
        return None
    return replace(spec, exact=_is_known(type(module)), activation=spec.activation or label(activation_of(module)))


def is_tried(module: nn.Module) -> bool:
    """Whether `describe` goes by what a module computes, and not by its type or its buffers."""
    if _is_known(type(module)):
        return False
    return (_has_a_forward_of_its_own(module) or _describe(module) is None) and may_be_tried(module)


def _is_known(kind: type[nn.Module]) -> bool:
    return kind.__module__.startswith(("torch.nn.", "normkit."))


def _has_a_forward_of_its_own(module: nn.Module) -> bool:
    """Whether a layer or RMS norm computes what a class of another library says, and not torch's or ours."""
    if not isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return False
    return not _is_known(next(kind for kind in type(module).__mro__ if "forward" in vars(kind)))


@singledispatch
def _describe(module: nn.Module) -> NormSpec | None:
    return _describe_frozen(module) if _looks_frozen(module) else None


@_describe.register
def _describe_batch(bn: _BatchNorm) -> NormSpec:
    tracked = bn.running_mean is not None
    updates: Updates = "never"
    if tracked and bn.track_running_stats:
        updates = "cumulative" if bn.momentum is None else "ema"
    return NormSpec(
        kind="batch",
        over=("N", "S"),
        uses="stored" if tracked and not bn.training else "batch",
        scope="synced" if isinstance(bn, nn.SyncBatchNorm) else "local",
        updates=updates,
        affine=_affine(bn),
        eps=bn.eps,
        momentum=None if updates == "never" else bn.momentum,
        num_features=bn.num_features,
        channel_dim=bn.dim if isinstance(bn, BatchNorm) else 1,
    )


# How our relatives of BatchNorm differ from it.
_RELATIVES: dict[type[BatchNorm], dict[str, Any]] = {
    BatchNorm: {},
    PositionBatchNorm2d: {"over": ("N",)},
    SyncBatchNorm: {"scope": "synced"},
    GhostBatchNorm: {"scope": "ghost"},
    BatchRenorm: {"kind": "renorm"},
    DomainBatchNorm: {"kind": "domain"},
    AccumulatedBatchNorm: {"kind": "accumulated"},
    SplitBatchNorm2d: {"kind": "split"},
}


def _describe_relative(bn: BatchNorm, **differences: Any) -> NormSpec:
    return replace(_describe_batch(bn), **differences)


for _class, _differences in _RELATIVES.items():
    _describe.register(_class, partial(_describe_relative, **_differences))


@_describe.register
def _(bn: FrozenBatchNorm) -> NormSpec:
    return _describe_frozen(bn)


@_describe.register
def _(norm: _InstanceNorm) -> NormSpec:
    tracked = norm.running_mean is not None
    moving = tracked and norm.track_running_stats and norm.momentum is not None  # torch takes None as 0 here
    return NormSpec(
        kind="instance",
        over=("S",),
        uses="stored" if tracked and not norm.training else "batch",
        updates="ema" if moving else "never",
        affine=_affine(norm),
        eps=norm.eps,
        momentum=norm.momentum if moving else None,
        num_features=norm.num_features,
    )


@_describe.register
def _(norm: nn.GroupNorm) -> NormSpec:
    return NormSpec(
        kind="group",
        over=("G", "S"),
        uses="batch",
        affine=_affine(norm),
        eps=norm.eps,
        num_features=norm.num_channels,
        num_groups=norm.num_groups,
    )


@_describe.register
def _(norm: nn.LayerNorm) -> NormSpec:
    return _over_last(norm, "layer", tuple(norm.normalized_shape))


@_describe.register
def _(norm: nn.RMSNorm) -> NormSpec:
    return _over_last(norm, "rms", tuple(norm.normalized_shape))


@_describe.register
def _(norm: ScaleNorm) -> NormSpec:
    return _over_last(norm, "scale", (norm.dim,))


@_describe.register
def _(norm: LayerNorm2d) -> NormSpec:
    return _over_second(norm, "layer")


@_describe.register
def _(norm: RMSNorm2d) -> NormSpec:
    return _over_second(norm, "rms")


@_describe.register
def _(squashed: Squashed) -> NormSpec:
    is_last, shape = squashed.channels_last, squashed.normalized_shape
    return NormSpec(
        kind="derf" if isinstance(squashed, Derf) else "dyt",
        over=(),
        uses="batch",
        affine=_affine(squashed),
        eps=None,
        num_features=None if is_last else shape[0],
        normalized_shape=shape if is_last else None,
        channels_first=not is_last,
    )


@_describe.register
def _(norm: FilterResponseNorm2d) -> NormSpec:
    return NormSpec(
        kind="filter-response",
        over=("S",),
        uses="batch",
        affine=_affine(norm),
        eps=norm.eps if isinstance(norm.eps, float) else None,
        num_features=norm.num_features,
        activation=None if norm.tau is None else "threshold",
    )


@_describe.register
def _(norm: ScaledStdConv2d) -> NormSpec:
    return NormSpec(kind="weight-standardized", over=("W",), uses="batch", affine="scale", eps=norm.eps)


@_describe.register
def _(scalar: SkipInit) -> NormSpec:
    return NormSpec(kind="skip-init", over=(), uses="batch", affine="scale", eps=None)


def _over_last(norm: nn.LayerNorm | nn.RMSNorm | ScaleNorm, kind: Kind, shape: tuple[int, ...]) -> NormSpec:
    return NormSpec(kind=kind, over=("C",), uses="batch", affine=_affine(norm), eps=norm.eps, normalized_shape=shape)


def _over_second(norm: LayerNorm2d | RMSNorm2d, kind: Kind) -> NormSpec:
    channels, affine = norm.normalized_shape[0], _affine(norm)
    terms: dict[str, Any] = {"affine": affine, "eps": norm.eps, "num_features": channels, "channels_first": True}
    return NormSpec(kind=kind, over=("C",), uses="batch", **terms)


def _tracking(norm: ChannelNorm, kind: Kind, over: tuple[Axis, ...], **more: Any) -> NormSpec:
    """A norm of ours whose running statistics are not those of a BatchNorm."""
    stores = getattr(norm, "num_batches_tracked", None) is not None
    updates: Updates = "never"
    if stores and norm.track_running_stats:
        updates = "cumulative" if norm.momentum is None else "ema"
    return NormSpec(
        kind=kind,
        over=over,
        uses="stored" if stores and not norm.training else "batch",
        updates=updates,
        affine=_affine(norm),
        eps=norm.eps,
        momentum=norm.momentum if updates == "ema" else None,
        num_features=norm.num_features,
        **more,
    )


@_describe.register
def _(norm: WhitenedBatchNorm) -> NormSpec:
    groups = norm.num_features // norm.group_size
    return _tracking(norm, "whitened", ("N", "S"), num_groups=groups)


@_describe.register
def _(norm: EvoNormB0) -> NormSpec:
    return _tracking(norm, "evo-b0", ("N", "S"), activation="evo")


@_describe.register
def _(norm: EvoNormS0) -> NormSpec:
    return _tracking(norm, "evo-s0", ("G", "S"), num_groups=norm.groups, activation="evo")


@_describe.register
def _(norm: SwitchableNorm2d) -> NormSpec:
    return _tracking(norm, "switchable", ("N", "C", "S"))


@_describe.register
def _(norm: MovingBatchNorm2d) -> NormSpec:
    return _tracking(norm, "moving", ("N", "S"))


@_describe.register(nn.LocalResponseNorm)
@_describe.register(nn.CrossMapLRN2d)
def _(norm: nn.LocalResponseNorm | nn.CrossMapLRN2d) -> NormSpec:
    return NormSpec(kind="local-response", over=("G",), uses="batch", affine=False, eps=None)


def _describe_frozen(module: nn.Module) -> NormSpec:
    return NormSpec(
        kind="batch",
        over=("N", "S"),
        uses="stored",
        affine=_affine(module),
        eps=getattr(module, "eps", None),
        num_features=dict(module.named_buffers())["running_mean"].numel(),
    )


def _looks_frozen(module: nn.Module) -> bool:
    """Whether a module has the buffers of a BatchNorm, and nothing to train."""
    buffers = {name for name, _ in module.named_buffers(recurse=False)}
    frozen = {"weight", "bias", "running_mean", "running_var"}
    return frozen <= buffers <= frozen | {"num_batches_tracked"} and next(module.parameters(), None) is None


def _affine(module: nn.Module) -> Affine:
    return affine_of(*(getattr(module, name, None) is not None for name in ("weight", "bias")))
