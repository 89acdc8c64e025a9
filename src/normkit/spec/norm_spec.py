"""A norm in words: what `describe` returns, and what a kind of norm allows.

What a kind allows is said here and nowhere else: a new layer needs its kind in `Kind` and its place in the sets below
that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["N", "C", "G", "S", "W"]
Affine = bool | Literal["scale", "shift"]
Updates = Literal["ema", "cumulative", "never"]
Kind = Literal[
    "batch",
    "renorm",
    "accumulated",
    "split",
    "domain",
    "moving",
    "whitened",
    "switchable",
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
    "local-response",
    "weight-standardized",
    "skip-init",
]

# Kinds whose evaluation is that of a BatchNorm, gamma * (x - mean) / sqrt(var + eps) + beta with stored statistics.
_EVALUATES_AS_BATCH_NORM: frozenset[Kind] = frozenset({"batch", "renorm", "accumulated", "split"})
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
    {"moving", "rms", "scale", "dyt", "derf", "filter-response", "evo-b0", "evo-s0", "local-response", "skip-init"}
)
# Kinds that have the channels last unless they say otherwise, where all others have them second.
_OVER_LAST: frozenset[Kind] = frozenset({"layer", "rms", "scale", "dyt", "derf"})
# Kinds that normalize with what they are given alone; a layer after them can take over their gamma and beta.
_MOVES_AFFINE: frozenset[Kind] = frozenset({"layer", "rms"})
# Kinds whose place another norm can take.
_REPLACEABLE = _EVALUATES_AS_BATCH_NORM | {
    *("group", "instance", "filter-response", "layer", "rms", "scale", "dyt", "derf"),
    *("domain", "moving", "whitened", "switchable"),
}


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A norm layer in words, in its present mode: in evaluation the same layer has another spec.

    Attributes:
        kind: the family: "batch", "renorm", "group", "layer" and so on, as in `convert(to=...)` where that takes it.
        over: the axes that share one set of statistics: N examples, C channels, G the channels of one group,
            S positions, W the weights of one unit; none for functions of single values, which take no statistics.
        uses: the statistics it normalizes with: its "batch"'s own, or "stored" ones. Norms within an example
            count as "batch".
        scope: where a batch's statistics come from: this process ("local"), all ranks ("synced"), or a part of
            the batch ("ghost").
        updates: how stored statistics move when it trains: "ema", "cumulative" or "never".
        affine: which of gamma and beta it has: True, False, "scale" or "shift".
        eps: added to the variance; None where the module does not say.
        momentum: weight of the new value; None where there is none.
        num_features: channels, where they are fixed, of norms that have them in the second dimension.
        normalized_shape: sizes of the last dimensions, of norms that normalize these; None where it takes any.
        num_groups: groups of channels with statistics of their own.
        activation: what follows inside the same module, in a word: one of our names, the class of another module or
            the name of a function; `normkit.activations.activation_of` has the thing itself.
        channels_first: of a layer or RMS norm, whether it normalizes the second dimension of its input, (N, C, ...), as
            a LayerNorm2d does, and not the last; and of others of which some have the channels last.
        channel_dim: where a batch norm has the channels, as it was told: 1 for all but those of ours with dim=.
        weight_offset: what is added to the weight to give gamma: 1 for a norm that multiplies by 1 + weight.
        names: what the module calls its gamma and its beta.
        exact: whether the module's type is one we know, rather than a foreign one, which may do more.
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
    normalized_shape: tuple[int, ...] | None = None
    channels_first: bool = False
    channel_dim: int = 1
    weight_offset: float = 0.0
    names: tuple[str, str] = ("weight", "bias")
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
    def moves_affine(self) -> bool:
        """Whether layers that read its output can take over its gamma and beta, while it keeps normalizing."""
        return self.kind in _MOVES_AFFINE

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
        """Whether its channels are the last dimensions of its input, and it normalizes these if it normalizes."""
        return self.kind in _OVER_LAST and not self.channels_first

    def channels_in(self, rank: int) -> int:
        """The dimension of the channels, counted from the first, in an input of this many dimensions."""
        return rank - 1 if self.is_over_last else self.channel_dim % rank

    @property
    def is_replaceable(self) -> bool:
        """Whether another norm can take its place."""
        return self.kind in _REPLACEABLE and self.over != ("N",)

    @property
    def has_gamma(self) -> bool:
        """Whether a parameter called weight is a gamma, and not a convolution's weight or a branch's scalar."""
        return "W" not in self.over and self.kind != "skip-init"

    @property
    def statistics_per_example(self) -> int | None:
        """How many means and variances each example has of its own; None for norms across examples and others."""
        counts = {"group": self.num_groups, "instance": self.num_features, "layer": None if self.channels_first else 1}
        return counts.get(self.kind)


def affine_of(scale: bool, shift: bool) -> Affine:
    """`NormSpec.affine` of a norm with or without a gamma and a beta."""
    if scale == shift:
        return scale
    return "scale" if scale else "shift"
