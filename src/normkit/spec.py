"""What a module normalizes, read off any norm layer: ours, torch's, or one that somebody else wrote."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from normkit.activations import ACTIVATIONS
from normkit.layers.accumulated import AccumulatedBatchNorm2d
from normkit.layers.batch import BatchNorm, PositionBatchNorm2d
from normkit.layers.channel_norm import ChannelNorm
from normkit.layers.domain import DomainBatchNorm
from normkit.layers.evo import EvoNormB0, EvoNormS0
from normkit.layers.filter_response import FilterResponseNorm2d
from normkit.layers.fixup import SkipInit
from normkit.layers.frozen import FrozenBatchNorm
from normkit.layers.ghost import GhostBatchNorm
from normkit.layers.moving import MovingBatchNorm2d
from normkit.layers.renorm import BatchRenorm
from normkit.layers.rms import ScaleNorm
from normkit.layers.scaled_std_conv import ScaledStdConv2d
from normkit.layers.switchable import SwitchableNorm2d
from normkit.layers.sync import SyncBatchNorm
from normkit.layers.whitened import WhitenedBatchNorm

Axis = Literal["N", "C", "G", "S", "W"]


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A norm layer in words, as it is now: switching it to evaluation changes what is said here.

    Attributes:
        kind: the family: "batch", "renorm", "group", "layer" and so on, as in `convert(to=...)` where that takes it.
        over: the axes that share one set of statistics: N examples, C channels, G the channels of one group,
            S positions, W the weights of one unit.
        uses: the statistics it normalizes with: its "batch"'s own, or "stored" ones. Norms within an example
            count as "batch".
        scope: where a batch's statistics come from: this process ("local"), all ranks ("synced"), or a part of
            the batch ("ghost").
        updates: how stored statistics move when it trains: "ema", "cumulative" or "never".
        affine: which of gamma and beta it has: True, False, "scale" or "shift".
        eps: added to the variance; None where the module does not say.
        momentum: weight of the new value; None where there is none.
        num_features: channels, where they are fixed.
        num_groups: groups of channels with statistics of their own.
        activation: what follows inside the same module: one of our names, or the class name of a foreign one.
        exact: whether the module's type is one we know, rather than somebody's subclass of one, which may do more.
    """

    kind: str
    over: tuple[Axis, ...]
    uses: Literal["batch", "stored"]
    scope: Literal["local", "synced", "ghost"] = "local"
    updates: Literal["ema", "cumulative", "never"] = "never"
    affine: bool | Literal["scale", "shift"]
    eps: float | None
    momentum: float | None = None
    num_features: int | None = None
    num_groups: int | None = None
    activation: str | None = None
    exact: bool = True


def describe(module: nn.Module) -> NormSpec | None:
    """Return what `module` normalizes and how, or None if it is not a norm we can recognize.

    Subclasses are described as what they derive from, with `exact=False` and the activation they carry, where one is
    found among their children. A frozen BatchNorm, as torchvision and detectron2 write it, is known by its buffers.
    """
    spec = _describe(module)
    if spec is None:
        return None
    known = type(module).__module__.startswith(("torch.nn.", "normkit."))
    return replace(spec, exact=known, activation=spec.activation or _activation_within(module))


@singledispatch
def _describe(module: nn.Module) -> NormSpec | None:
    return _describe_frozen(module) if _looks_frozen(module) else None


@_describe.register
def _describe_batch(bn: _BatchNorm) -> NormSpec:
    tracked = bn.running_mean is not None
    updates: Literal["ema", "cumulative", "never"] = "never"
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
    )


def _like_batch_norm(bn: BatchNorm, **differences: Any) -> NormSpec:
    return replace(_describe_batch(bn), activation=bn.activation, **differences)


@_describe.register
def _(bn: BatchNorm) -> NormSpec:
    return _like_batch_norm(bn)


@_describe.register
def _(bn: PositionBatchNorm2d) -> NormSpec:
    return _like_batch_norm(bn, over=("N",))


@_describe.register
def _(bn: SyncBatchNorm) -> NormSpec:
    return _like_batch_norm(bn, scope="synced")


@_describe.register
def _(bn: GhostBatchNorm) -> NormSpec:
    return _like_batch_norm(bn, scope="ghost")


@_describe.register
def _(bn: BatchRenorm) -> NormSpec:
    return _like_batch_norm(bn, kind="renorm")


@_describe.register
def _(bn: DomainBatchNorm) -> NormSpec:
    return _like_batch_norm(bn, kind="domain")


@_describe.register
def _(bn: AccumulatedBatchNorm2d) -> NormSpec:
    return _like_batch_norm(bn, kind="accumulated")


@_describe.register
def _(bn: FrozenBatchNorm) -> NormSpec:
    return replace(_describe_frozen(bn), activation=bn.activation)


@_describe.register
def _(norm: _InstanceNorm) -> NormSpec:
    tracked = norm.running_mean is not None
    moving = tracked and norm.track_running_stats and norm.momentum is not None  # torch takes None for 0 here
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
    return NormSpec(kind="layer", over=("C",), uses="batch", affine=_affine(norm), eps=norm.eps)


@_describe.register
def _(norm: nn.RMSNorm) -> NormSpec:
    return NormSpec(kind="rms", over=("C",), uses="batch", affine=_affine(norm), eps=norm.eps)


@_describe.register
def _(norm: ScaleNorm) -> NormSpec:
    return NormSpec(kind="scale", over=("C",), uses="batch", affine="scale", eps=norm.eps, activation=norm.activation)


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


def _tracking(norm: ChannelNorm, kind: str, over: tuple[Axis, ...], **more: Any) -> NormSpec:
    """A norm of ours with running statistics of its own kind."""
    stores = getattr(norm, "num_batches_tracked", None) is not None
    updates: Literal["ema", "cumulative", "never"] = "never"
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
    return _tracking(norm, "whitened", ("N", "S"), num_groups=groups, activation=norm.activation)


@_describe.register
def _(norm: EvoNormB0) -> NormSpec:
    return _tracking(norm, "evo-b0", ("N", "S"), activation="evo")


@_describe.register
def _(norm: EvoNormS0) -> NormSpec:
    return _tracking(norm, "evo-s0", ("G", "S"), num_groups=norm.groups, activation="evo")


@_describe.register
def _(norm: SwitchableNorm2d) -> NormSpec:
    return _tracking(norm, "switchable", ("N", "C", "S"), activation=norm.activation)


@_describe.register
def _(norm: MovingBatchNorm2d) -> NormSpec:
    return _tracking(norm, "moving", ("N", "S"), activation=norm.activation)


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


def _affine(module: nn.Module) -> bool | Literal["scale", "shift"]:
    scale = getattr(module, "weight", None) is not None
    shift = getattr(module, "bias", None) is not None
    if scale == shift:
        return scale
    return "scale" if scale else "shift"


# Written as torch prints them, so that another slope or approximation is another activation.
_PRINTED = {
    repr(torchs): name
    for torchs, name in (
        (nn.ReLU(), "relu"),
        (nn.ReLU(inplace=True), "relu"),
        (nn.LeakyReLU(), "leaky_relu"),
        (nn.LeakyReLU(inplace=True), "leaky_relu"),
        (nn.SiLU(), "silu"),
        (nn.SiLU(inplace=True), "silu"),
        (nn.GELU(), "gelu"),
        (nn.Sigmoid(), "sigmoid"),
        (nn.Tanh(), "tanh"),
    )
}


def _activation_within(module: nn.Module) -> str | None:
    """The activation of a foreign subclass: a child module (timm), or a name it keeps (inplace_abn)."""
    for name, child in module.named_children():
        if name != "parametrizations" and not isinstance(child, nn.Identity | _DropoutNd):
            return _PRINTED.get(repr(child), type(child).__name__)
    kept = getattr(module, "activation", None)
    return kept if isinstance(kept, str) and kept in ACTIVATIONS else None
