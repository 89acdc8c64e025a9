"""What a module normalizes, read off any norm layer: ours, torch's, or another library's.

What a kind of norm allows is said here and nowhere else: a new layer needs its kind in `Kind`, its place in the sets
below that, and a `_describe`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, singledispatch
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from normkit.activations import activation_of, label
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
Affine = bool | Literal["scale", "shift"]
Updates = Literal["ema", "cumulative", "never"]
Kind = Literal[
    "batch",
    "renorm",
    "accumulated",
    "domain",
    "moving",
    "whitened",
    "switchable",
    "group",
    "instance",
    "layer",
    "rms",
    "scale",
    "filter-response",
    "evo-b0",
    "evo-s0",
    "local-response",
    "weight-standardized",
    "skip-init",
]

# Kinds whose evaluation is that of a BatchNorm, gamma * (x - mean) / sqrt(var + eps) + beta with stored statistics.
_EVALUATES_AS_BATCH_NORM: frozenset[Kind] = frozenset({"batch", "renorm", "accumulated"})
# Kinds that are one scale and shift for each channel when they normalize with stored statistics.
_CAN_FOLD = _EVALUATES_AS_BATCH_NORM | {"moving", "instance"}
# Kinds whose stored statistics are the mean and variance of batches, per channel.
_STORES_BATCH_MOMENTS = _EVALUATES_AS_BATCH_NORM | {"switchable", "evo-b0"}
# Kinds whose stored statistics are something else.
_STORES_INSTEAD: dict[Kind, str] = {
    "whitened": "a whitening matrix, which no mean and variance per channel make up for",
    "moving": "mean squares of the last batches, not moments",
    "domain": "statistics per domain; train on batches of each domain instead",
    "instance": "an average over examples, each of which has statistics of its own in training",
}
# Kinds that do not subtract a mean.
_UNCENTERED: frozenset[Kind] = frozenset(
    {"moving", "rms", "scale", "filter-response", "evo-b0", "evo-s0", "local-response", "skip-init"}
)
# Kinds that normalize the last dimensions of their input, where all others have the channels second.
_OVER_LAST: frozenset[Kind] = frozenset({"layer", "rms", "scale"})
# Kinds whose place another norm can take.
_REPLACEABLE = _EVALUATES_AS_BATCH_NORM | {"group", "instance", "filter-response", "layer", "rms"}


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A norm layer in words, in its present mode: in evaluation the same layer has another spec.

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
        activation: what follows inside the same module, in a word: one of our names, the class of another module or
            the name of a function; `normkit.activations.activation_of` has the thing itself.
        exact: whether the module's type is one we know, rather than a foreign subclass of one, which may do more.
    """

    kind: Kind
    over: tuple[Axis, ...]
    uses: Literal["batch", "stored"]
    scope: Literal["local", "synced", "ghost"] = "local"
    updates: Updates = "never"
    affine: Affine
    eps: float | None
    momentum: float | None = None
    num_features: int | None = None
    num_groups: int | None = None
    activation: str | None = None
    exact: bool = True

    @property
    def evaluates_as_batch_norm(self) -> bool:
        """Whether evaluation is a BatchNorm's, so that it and other such norms turn into one another without loss."""
        return self.kind in _EVALUATES_AS_BATCH_NORM

    @property
    def can_fold(self) -> bool:
        """Whether it is one scale and shift for each channel, when it normalizes with stored statistics."""
        return self.kind in _CAN_FOLD

    @property
    def stores_batch_moments(self) -> bool:
        """Whether the statistics it stores, if any, are the mean and variance of batches."""
        return self.kind in _STORES_BATCH_MOMENTS

    @property
    def stores_instead(self) -> str | None:
        """What it stores instead of the moments of batches; None if it stores these or nothing."""
        return _STORES_INSTEAD.get(self.kind)

    @property
    def subtracts_mean(self) -> bool:
        """Whether it centers its input, or its weights."""
        return self.kind not in _UNCENTERED

    @property
    def is_over_last(self) -> bool:
        """Whether it normalizes the last dimensions of its input; the channels of all others are the second."""
        return self.kind in _OVER_LAST

    @property
    def is_replaceable(self) -> bool:
        """Whether another norm can take its place."""
        return self.kind in _REPLACEABLE and self.over != ("N",)

    @property
    def has_gamma(self) -> bool:
        """Whether a parameter called weight is a gamma, and not a convolution's weight or a branch's scalar."""
        return "W" not in self.over and bool(self.over)

    @property
    def statistics_per_example(self) -> int | None:
        """How many means and variances each example has of its own; None for norms across examples and others."""
        counts = {"group": self.num_groups, "instance": self.num_features, "layer": 1}
        return counts.get(self.kind)


def describe(module: nn.Module) -> NormSpec | None:
    """Return what `module` normalizes and how, or None if it is not a norm we can recognize.

    Subclasses are described as the class they derive from, with `exact=False` and the activation found among their
    children, if any. A frozen BatchNorm, as torchvision and detectron2 write it, is recognized by its buffers.
    """
    spec = _describe(module)
    if spec is None:
        return None
    known = type(module).__module__.startswith(("torch.nn.", "normkit."))
    return replace(spec, exact=known, activation=spec.activation or label(activation_of(module)))


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
    )


# How our relatives of BatchNorm differ from it.
_RELATIVES: dict[type[BatchNorm], dict[str, Any]] = {
    BatchNorm: {},
    PositionBatchNorm2d: {"over": ("N",)},
    SyncBatchNorm: {"scope": "synced"},
    GhostBatchNorm: {"scope": "ghost"},
    BatchRenorm: {"kind": "renorm"},
    DomainBatchNorm: {"kind": "domain"},
    AccumulatedBatchNorm2d: {"kind": "accumulated"},
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
    return NormSpec(kind="layer", over=("C",), uses="batch", affine=_affine(norm), eps=norm.eps)


@_describe.register
def _(norm: nn.RMSNorm) -> NormSpec:
    return NormSpec(kind="rms", over=("C",), uses="batch", affine=_affine(norm), eps=norm.eps)


@_describe.register
def _(norm: ScaleNorm) -> NormSpec:
    return NormSpec(kind="scale", over=("C",), uses="batch", affine="scale", eps=norm.eps)


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
    scale = getattr(module, "weight", None) is not None
    shift = getattr(module, "bias", None) is not None
    if scale == shift:
        return scale
    return "scale" if scale else "shift"
