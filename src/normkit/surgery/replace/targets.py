"""What norms can be converted to: the classes, and the options each of them takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import nn

from normkit import layers
from normkit.errors import ArgumentError, did_you_mean
from normkit.spec import NormSpec

TargetName = Literal[
    "batch", "sync", "frozen", "renorm", "ghost", "group", "instance", "layer", "rms", "filter-response"
]
Classes = Literal["normkit", "torch"]
Choice = Callable[[NormSpec], nn.Module | None]

ANY = 0  # dimensions of a class that takes inputs of any rank


@dataclass(frozen=True)
class Target:
    """Classes by the number of their inputs' dimensions beyond (N, C), ours and torch's, and their options.

    `size` is what their constructors call the number of channels.
    """

    ours: Mapping[int, type[nn.Module]]
    torchs: Mapping[int, type[nn.Module]] = field(default_factory=dict)
    options: tuple[str, ...] = ("eps",)
    only_ours: tuple[str, ...] = ()
    size: str = "num_features"

    def classes(self, whose: Classes) -> Mapping[int, type[nn.Module]]:
        """The classes of one origin."""
        return self.ours if whose == "normkit" else self.torchs

    def taken(self, whose: Classes) -> tuple[str, ...]:
        """The options that the classes of one origin take."""
        return self.options + (self.only_ours if whose == "normkit" else ())


BATCHED = ("eps", "momentum")

TARGETS: dict[str, Target] = {
    "batch": Target(
        {1: layers.BatchNorm1d, 2: layers.BatchNorm2d, 3: layers.BatchNorm3d},
        {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d},
        BATCHED,
        ("nonfinite", "inplace"),
    ),
    "sync": Target({ANY: layers.SyncBatchNorm}, {ANY: nn.SyncBatchNorm}, (*BATCHED, "process_group"), ("nonfinite",)),
    "frozen": Target(
        {1: layers.FrozenBatchNorm1d, 2: layers.FrozenBatchNorm2d, 3: layers.FrozenBatchNorm3d}, options=BATCHED
    ),
    "renorm": Target(
        {1: layers.BatchRenorm1d, 2: layers.BatchRenorm2d, 3: layers.BatchRenorm3d},
        options=(*BATCHED, "r_max", "d_max", "schedule", "nonfinite", "inplace"),
    ),
    "ghost": Target(
        {1: layers.GhostBatchNorm1d, 2: layers.GhostBatchNorm2d}, options=(*BATCHED, "chunk_size", "nonfinite")
    ),
    "group": Target({ANY: layers.GroupNorm}, {ANY: nn.GroupNorm}, ("eps", "groups"), size="num_channels"),
    "instance": Target(
        {1: layers.InstanceNorm1d, 2: layers.InstanceNorm2d, 3: layers.InstanceNorm3d},
        {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d},
        (*BATCHED, "track_running_stats"),
    ),
    "layer": Target({ANY: layers.LayerNorm}, {ANY: nn.LayerNorm}, size="normalized_shape"),
    "rms": Target({ANY: layers.RMSNorm}, {ANY: nn.RMSNorm}, size="normalized_shape"),
    "filter-response": Target({2: layers.FilterResponseNorm2d}, options=("eps", "learnable_eps", "threshold")),
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
    if not isinstance(to, str) or to not in TARGETS:
        hint = did_you_mean(to, TARGETS)
        known = ", ".join(f'"{name}"' for name in TARGETS)
        raise ArgumentError(f"to must be one of {known}, or a function of a NormSpec; got {to!r}.{hint}")
    asked = Wanted(to, classes, options)  # type: ignore[arg-type]
    if not asked.target.classes(asked.classes):
        there = ", ".join(f'"{name}"' for name, target in TARGETS.items() if target.torchs)
        raise ArgumentError(f'torch has no class for "{to}", only for {there}. Leave classes="torch" out.')
    _check_options(asked)
    return asked


def _check_options(asked: Wanted) -> None:
    taken = asked.target.taken(asked.classes)
    for name in asked.options:
        if name not in taken:
            hint = did_you_mean(name, taken)
            got = f"{name}={asked.options[name]!r}"
            raise ArgumentError(f'convert to "{asked.to}" takes the options {", ".join(taken)}; got {got}.{hint}')
    options = dict(asked.options)
    if asked.to == "group":
        groups = options.pop("groups", 32)
        if type(groups) is not int or groups < 1:
            raise ArgumentError(f"groups must be a number from 1 on, the most groups to make; got {groups!r}.")
        options["num_groups"] = 1
    kind = next(iter(asked.target.classes(asked.classes).values()))
    kind(**{asked.target.size: 2}, **options)  # the smallest layer refuses the options that the real ones would
