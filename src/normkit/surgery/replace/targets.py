"""What norms can be converted to: the classes, and the options each of them takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import nn

from normkit import layers
from normkit.errors import ArgumentError, NormkitError, did_you_mean
from normkit.spec import NormSpec

TargetName = Literal[
    "batch",
    "sync",
    "frozen",
    "renorm",
    "ghost",
    "shuffled",
    "accumulated",
    "split",
    "domain",
    "moving",
    "whitened",
    "switchable",
    "position",
    "group",
    "instance",
    "layer",
    "rms",
    "scale",
    "dyt",
    "derf",
    "filter-response",
    "evo-b0",
    "evo-s0",
]
Classes = Literal["normkit", "torch"]
Choice = Callable[[NormSpec], nn.Module | None]

ANY = 0  # dimensions of a class that takes inputs of any rank


@dataclass(frozen=True)
class Target:
    """Classes by the number of their inputs' dimensions beyond (N, C), ours and torch's, and their options.

    Attributes:
        ours: our classes.
        torchs: torch's of the same function, if it has any.
        options: what both take.
        only_ours: what only ours take.
        size: what their constructors call the number of channels.
        required: options without which no layer can be made, and what they are.
        at_most: an option that is an upper bound, fitted to the channels of each layer, and what it counts.
        sizes: further arguments that say how large a layer is, with values that suit 2 channels.
        is_across: whether they normalize with statistics across examples.
        of_channels: our classes for norms over the channels of each position, (N, C, ...), by the same number.
    """

    ours: Mapping[int, type[nn.Module]]
    torchs: Mapping[int, type[nn.Module]] = field(default_factory=dict)
    options: tuple[str, ...] = ("eps",)
    only_ours: tuple[str, ...] = ()
    size: str = "num_features"
    required: Mapping[str, str] = field(default_factory=dict)
    at_most: tuple[str, str] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    is_across: bool = False
    of_channels: Mapping[int, type[nn.Module]] = field(default_factory=dict)

    def classes(self, whose: Classes) -> Mapping[int, type[nn.Module]]:
        """The classes of one origin."""
        return self.ours if whose == "normkit" else self.torchs

    def taken(self, whose: Classes) -> tuple[str, ...]:
        """The options that the classes of one origin take."""
        return self.options + (self.only_ours if whose == "normkit" else ())


BATCHED = ("eps", "momentum")
GROUPS = ("groups", "the most groups to make")

TARGETS: dict[str, Target] = {
    "batch": Target(
        {1: layers.BatchNorm1d, 2: layers.BatchNorm2d, 3: layers.BatchNorm3d},
        {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d},
        BATCHED,
        ("nonfinite", "inplace"),
        is_across=True,
    ),
    "sync": Target(
        {ANY: layers.SyncBatchNorm},
        {ANY: nn.SyncBatchNorm},
        (*BATCHED, "process_group"),
        ("nonfinite",),
        is_across=True,
    ),
    "frozen": Target(
        {1: layers.FrozenBatchNorm1d, 2: layers.FrozenBatchNorm2d, 3: layers.FrozenBatchNorm3d},
        options=BATCHED,
        is_across=True,
    ),
    "renorm": Target(
        {1: layers.BatchRenorm1d, 2: layers.BatchRenorm2d, 3: layers.BatchRenorm3d},
        options=(*BATCHED, "r_max", "d_max", "warmup_steps", "schedule", "nonfinite", "inplace"),
        is_across=True,
    ),
    "ghost": Target(
        {1: layers.GhostBatchNorm1d, 2: layers.GhostBatchNorm2d},
        options=(*BATCHED, "chunk_size", "nonfinite"),
        is_across=True,
    ),
    "shuffled": Target(
        {1: layers.ShuffledBatchNorm1d, 2: layers.ShuffledBatchNorm2d},
        options=(*BATCHED, "chunk_size", "nonfinite"),
        is_across=True,
    ),
    "accumulated": Target(
        {1: layers.AccumulatedBatchNorm1d, 2: layers.AccumulatedBatchNorm2d, 3: layers.AccumulatedBatchNorm3d},
        options=(*BATCHED, "micro_batches", "nonfinite", "inplace"),
        required={"micro_batches": "the forwards between two steps of the optimizer"},
        is_across=True,
    ),
    "split": Target({2: layers.SplitBatchNorm2d}, options=(*BATCHED, "num_splits", "nonfinite"), is_across=True),
    "domain": Target(
        {1: layers.DomainBatchNorm1d, 2: layers.DomainBatchNorm2d, 3: layers.DomainBatchNorm3d},
        options=(*BATCHED, "num_domains", "affine_per_domain", "nonfinite", "inplace"),
        required={"num_domains": "the number of domains"},
        is_across=True,
    ),
    "moving": Target({2: layers.MovingBatchNorm2d}, options=(*BATCHED, "buffer_size", "warmup"), is_across=True),
    "whitened": Target(
        {1: layers.WhitenedBatchNorm1d, 2: layers.WhitenedBatchNorm2d},
        options=(*BATCHED, "method", "group_size", "iterations"),
        at_most=("group_size", "the most channels to whiten together"),
        sizes={"group_size": 1},
        is_across=True,
    ),
    "switchable": Target({2: layers.SwitchableNorm2d}, options=BATCHED, is_across=True),
    "position": Target(
        {2: layers.PositionBatchNorm2d},
        options=(*BATCHED, "nonfinite"),
        sizes={"height": 2, "width": 2},
        is_across=True,
    ),
    "group": Target(
        {ANY: layers.GroupNorm},
        {ANY: nn.GroupNorm},
        ("eps", "groups"),
        size="num_channels",
        at_most=GROUPS,
        sizes={"num_groups": 1},
    ),
    "instance": Target(
        {1: layers.InstanceNorm1d, 2: layers.InstanceNorm2d, 3: layers.InstanceNorm3d},
        {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d},
        (*BATCHED, "track_running_stats"),
    ),
    "layer": Target(
        {ANY: layers.LayerNorm}, {ANY: nn.LayerNorm}, size="normalized_shape", of_channels={2: layers.LayerNorm2d}
    ),
    "rms": Target({ANY: layers.RMSNorm}, {ANY: nn.RMSNorm}, size="normalized_shape", of_channels={2: layers.RMSNorm2d}),
    "scale": Target({ANY: layers.ScaleNorm}, size="dim"),
    "dyt": Target({ANY: layers.DynamicTanh}, options=("alpha_init_value",), size="normalized_shape"),
    "derf": Target({ANY: layers.Derf}, options=("alpha_init_value", "shift_init_value"), size="normalized_shape"),
    "filter-response": Target({2: layers.FilterResponseNorm2d}, options=("eps", "learnable_eps", "threshold")),
    "evo-b0": Target({2: layers.EvoNormB0}, options=BATCHED, is_across=True),
    "evo-s0": Target({2: layers.EvoNormS0}, options=("eps", "groups"), at_most=GROUPS, sizes={"groups": 1}),
}


@dataclass(frozen=True)
class Wanted:
    """A checked request for a conversion.

    Attributes:
        to: a name of the table.
        classes: whose classes.
        options: for the new layers.
        trainable: whether the gamma and beta of a frozen layer keep learning.
    """

    to: str
    classes: Classes = "normkit"
    options: Mapping[str, Any] = field(default_factory=dict)
    trainable: bool = False

    @property
    def target(self) -> Target:
        """The row of the table."""
        return TARGETS[self.to]


def wanted(to: object, classes: str, options: Mapping[str, Any]) -> Wanted:
    """Check a request, before anything is changed."""
    if classes not in get_args(Classes):
        raise ArgumentError(f'classes must be "normkit" or "torch"; got {classes!r}.')
    target = target_named(to, "to", "or a function of a NormSpec")
    asked = Wanted(str(to), classes, options)  # type: ignore[arg-type]
    if not target.classes(asked.classes):
        there = ", ".join(f'"{name}"' for name, target in TARGETS.items() if target.torchs)
        raise ArgumentError(f'torch has no class for "{to}", only for {there}. Leave classes="torch" out.')
    who, kind = f'convert to "{to}"', next(iter(target.classes(asked.classes).values()))
    check_names(options, target.taken(asked.classes), who)
    check_values(kind, target, options, who)
    return asked


def target_named(name: object, argument: str, otherwise: str = "") -> Target:
    """A row of the table; an error that names the nearest if there is none."""
    if isinstance(name, str) and name in TARGETS:
        return TARGETS[name]
    known = ", ".join(f'"{known}"' for known in TARGETS) + (otherwise and f", {otherwise}")
    raise ArgumentError(f"{argument} must be one of {known}; got {name!r}.{did_you_mean(name, TARGETS)}")


def check_names(options: Mapping[str, Any], taken: tuple[str, ...], who: str) -> None:
    """Refuse options that a target does not take."""
    for name, value in options.items():
        if name not in taken:
            hint = did_you_mean(name, taken)
            raise ArgumentError(f"{who} takes the options {', '.join(taken)}; got {name}={value!r}.{hint}")


def check_values(kind: Callable[..., nn.Module], target: Target, options: Mapping[str, Any], who: str) -> None:
    """Refuse values that the smallest layer refuses, as the real ones would."""
    for name, what in target.required.items():
        if name not in options:
            raise ArgumentError(f"{who} needs {name}=, {what}; got none.")
    own = dict(options)
    if target.at_most is not None:
        name, what = target.at_most
        most = own.pop(name, None)
        if most is not None and (type(most) is not int or most < 1):
            raise ArgumentError(f"{name} must be a number from 1 on, {what}; got {most!r}.")
    try:
        kind(**{target.size: 2}, **{**target.sizes, **own})
    except NormkitError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:  # of torch, which an option went to as it was
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ArgumentError(f"{who} cannot make a layer with {given}: {error}") from error
