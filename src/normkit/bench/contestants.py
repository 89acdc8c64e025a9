"""Who takes part in a case: our layer, torch's with what ours includes around it, published code, and compilers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn

from normkit import layers
from normkit.activations import MODULES, ActivationName
from normkit.bench import published
from normkit.bench.case import EAGER, OUR_BATCH_NORM, OURS, PUBLISHED, UNMASKED
from normkit.bench.layer_case import Contestants

Shape = tuple[int, ...]
Build = Callable[[], nn.Module]

TORCH_ACTIVATIONS = {name: MODULES[name] for name in get_args(ActivationName)}
_BATCH_NORMS = {
    2: (layers.BatchNorm1d, nn.BatchNorm1d),
    3: (layers.BatchNorm1d, nn.BatchNorm1d),
    4: (layers.BatchNorm2d, nn.BatchNorm2d),
    5: (layers.BatchNorm3d, nn.BatchNorm3d),
}


class OneAfterTheOther(nn.Module):
    """A norm, an addition and an activation, called as our layers are, which compute them together."""

    def __init__(self, norm: nn.Module, activation: nn.Module | None) -> None:
        super().__init__()
        self.norm, self.activation = norm, activation

    def forward(self, x: Tensor, *, residual: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Compute them one after the other, as torchvision's networks do."""
        y: Tensor = self.norm(x) if mask is None else self.norm(x, mask)
        if residual is not None:
            y += residual
        return y if self.activation is None else self.activation(y)


class WithoutMask(nn.Module):
    """A layer whose caller has a mask, and does not use it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        """Call the layer without it."""
        return self.layer(x)  # type: ignore[no-any-return]


def batch_norm(
    shape: Shape, activation: ActivationName | None = "relu", *, masked: bool = False, compiled: bool = False
) -> Contestants:
    """BatchNorm and an activation: ours fused, torch's one after the other, and the latter compiled.

    The backward that torch.compile makes of a real ReLU is slow. With a leaky one it is not, so that both take part.
    """
    ours, theirs = _BATCH_NORMS[len(shape)]
    channels = shape[1]
    torchs = published.MaskedBatchNorm if masked else theirs
    contestants: dict[str, Build] = {
        OURS: partial(ours, channels, activation=activation),
        EAGER: lambda: OneAfterTheOther(torchs(channels), TORCH_ACTIVATIONS[activation]() if activation else None),
    }
    if compiled:
        contestants["compile"] = lambda: _compile(nn.Sequential(theirs(channels), nn.ReLU()))
        contestants["compile-leaky"] = lambda: _compile(nn.Sequential(theirs(channels), nn.LeakyReLU()))
    return contestants


def masked_batch_norm(shape: Shape, activation: ActivationName | None = None) -> Contestants:
    """BatchNorm with a mask: ours, one written by hand, and our call without it, which shows what the mask costs."""
    unmasked = partial(_BATCH_NORMS[len(shape)][0], shape[1], activation=activation)
    return {**batch_norm(shape, activation, masked=True), UNMASKED: lambda: WithoutMask(unmasked())}


def _compile(layer: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(layer, fullgraph=True, dynamic=False)  # type: ignore[assignment]
    return compiled


def group_norm(shape: Shape, groups: int = 32) -> Contestants:
    """GroupNorm."""
    return {OURS: partial(layers.GroupNorm, groups, shape[1]), EAGER: partial(nn.GroupNorm, groups, shape[1])}


def instance_norm(shape: Shape) -> Contestants:
    """InstanceNorm with gamma and beta; two dimensions are one example, (C, L)."""
    ours, theirs = {
        2: (layers.InstanceNorm1d, nn.InstanceNorm1d),
        4: (layers.InstanceNorm2d, nn.InstanceNorm2d),
    }[len(shape)]
    channels = shape[0] if len(shape) == 2 else shape[1]
    return {OURS: partial(ours, channels, affine=True), EAGER: partial(theirs, channels, affine=True)}


def layer_norm(shape: Shape) -> Contestants:
    """LayerNorm over everything but the examples, and of sequences (N, L, C) over the vectors."""
    over = shape[-1:] if len(shape) == 3 else shape[1:]
    return {OURS: partial(layers.LayerNorm, over), EAGER: partial(nn.LayerNorm, over)}


def rms_norm(shape: Shape) -> Contestants:
    """RMSNorm, over the same."""
    over = shape[-1:] if len(shape) == 3 else shape[1:]
    return {OURS: partial(layers.RMSNorm, over), EAGER: partial(nn.RMSNorm, over)}


def _domain(channels: int, domains: int = 2) -> nn.Module:
    layer = layers.DomainBatchNorm2d(channels, domains)
    layer.domain = 0
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.fill_(1)  # or evaluation would refuse statistics that no batch has given
    return layer


class OfExamples(nn.Module):
    """A norm with gamma and beta of each example: in our layer's call, or after torch's, as everyone writes it."""

    def __init__(self, norm: nn.Module, shape: Shape, view: Shape, at_the_call: bool) -> None:
        super().__init__()
        self.norm, self.view, self.at_the_call = norm, view, at_the_call
        self.weight, self.bias = (nn.Parameter(torch.randn(shape)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, and apply them."""
        weight, bias = (_first(p, len(x)) for p in (self.weight, self.bias))
        if self.at_the_call:
            return self.norm(x, weight=weight, bias=bias)  # type: ignore[no-any-return]
        return self.norm(x) * weight.view(-1, *self.view) + bias.view(-1, *self.view)  # type: ignore[no-any-return]


def _first(t: Tensor, examples: int) -> Tensor:
    """What belongs to the first examples, of which a test may have fewer."""
    return t if len(t) == examples else t[:examples]


def of_examples(shape: Shape, kind: str) -> Contestants:
    """A norm with gamma and beta of each example, ours and torch's."""
    examples, channels = shape[0], shape[-1] if kind in ("layer", "rms") else shape[1]
    norms: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
        "batch": (partial(_BATCH_NORMS[len(shape)][0], channels), partial(_BATCH_NORMS[len(shape)][1], channels)),
        "group": (partial(layers.GroupNorm, 32, channels), partial(nn.GroupNorm, 32, channels)),
        "layer": (partial(layers.LayerNorm, channels), partial(nn.LayerNorm, channels)),
        "rms": (partial(layers.RMSNorm, channels), partial(nn.RMSNorm, channels)),
    }
    ours, theirs = norms[kind]
    within = kind in ("layer", "rms")
    bare = {"elementwise_affine": False} if within else {"affine": False}
    between = (1,) * (len(shape) - 2)
    view = (*between, channels) if within else (channels, *between)
    return {
        OURS: lambda: OfExamples(ours(**bare), (examples, channels), view, at_the_call=True),
        EAGER: lambda: OfExamples(theirs(**bare), (examples, channels), view, at_the_call=False),
    }


class Added(nn.Module):
    """The stream of a transformer after a branch: added, and normalized for the next; both go on from here."""

    def __init__(self, norm: nn.Module, shape: Shape, in_one: bool) -> None:
        super().__init__()
        self.norm, self.branch, self.in_one = norm, nn.Parameter(torch.randn(shape)), in_one

    def forward(self, x: Tensor) -> Tensor:
        """Add and normalize, in one call or in two."""
        branch = _first(self.branch, len(x))
        if self.in_one:
            y, total = self.norm(x, add=branch)
        else:
            total = x + branch
            y = self.norm(total)
        return y + total  # type: ignore[no-any-return]


def added(shape: Shape, kind: str) -> Contestants:
    """A sum that is normalized, by our layer and by torch's after an addition."""
    ours, theirs = {"layer": (layers.LayerNorm, nn.LayerNorm), "rms": (layers.RMSNorm, nn.RMSNorm)}[kind]
    return {
        OURS: lambda: Added(ours(shape[-1]), shape, in_one=True),
        EAGER: lambda: Added(theirs(shape[-1]), shape, in_one=False),
    }


# BatchNorm's relatives, by name: ours, and what others publish. Each function takes the number of channels.
RELATIVES: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], nn.Module]]] = {
    "BatchRenorm2d": (layers.BatchRenorm2d, published.BatchRenorm),
    "AccumulatedBatchNorm2d": (
        partial(layers.AccumulatedBatchNorm2d, micro_batches=4),
        partial(published.AccumulatedBatchNorm, micro_batches=4),
    ),
    # Without a warmup: a layer spends most of its time after it.
    "MovingBatchNorm2d": (partial(layers.MovingBatchNorm2d, warmup=0), published.MovingBatchNorm),
    "GhostBatchNorm2d": (
        partial(layers.GhostBatchNorm2d, chunk_size=16),
        lambda channels: published.GhostBatchNorm(nn.BatchNorm2d(channels), 16),
    ),
    "DomainBatchNorm2d": (_domain, partial(published.DomainBatchNorm, num_domains=2)),
    "FrozenBatchNorm2d": (layers.FrozenBatchNorm2d, published.FrozenBatchNorm),
}

# Norms of their own, for which torch has none.
OTHERS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], nn.Module]]] = {
    "SwitchableNorm2d": (layers.SwitchableNorm2d, published.SwitchableNorm),
    "EvoNormB0": (layers.EvoNormB0, published.EvoNormB0),
    "EvoNormS0": (layers.EvoNormS0, published.EvoNormS0),
    "FilterResponseNorm2d": (layers.FilterResponseNorm2d, published.FilterResponseNorm),
    "ScaleNorm": (layers.ScaleNorm, published.ScaleNorm),
}


# Norms over the channels of each position of maps, and functions of single values in the place of norms.
OF_MAPS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], nn.Module]]] = {
    "LayerNorm2d": (layers.LayerNorm2d, partial(published.LayerNorm2d, eps=1e-6)),
    "RMSNorm2d": (layers.RMSNorm2d, published.RMSNorm2d),
}
POINTWISE: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], nn.Module]]] = {
    "DynamicTanh": (layers.DynamicTanh, published.DynamicTanh),
    "Derf": (layers.Derf, published.Derf),
}


def relative(name: str, channels: int) -> Contestants:
    """One of BatchNorm's relatives: ours, the published code, and our BatchNorm, to which it should keep close."""
    ours, theirs = RELATIVES[name]
    return {
        OURS: partial(ours, channels),
        PUBLISHED: partial(theirs, channels),
        OUR_BATCH_NORM: partial(layers.BatchNorm2d, channels),
    }


def ghost_of_rows(channels: int, chunk_size: int = 128) -> Contestants:
    """GhostBatchNorm1d as TabNet uses it."""
    return {
        OURS: partial(layers.GhostBatchNorm1d, channels, chunk_size=chunk_size),
        PUBLISHED: lambda: published.GhostBatchNorm(nn.BatchNorm1d(channels), chunk_size),
        OUR_BATCH_NORM: partial(layers.BatchNorm1d, channels),
    }


def other(name: str, size: int) -> Contestants:
    """A norm that torch has nothing like: ours, and the published code."""
    ours, theirs = (OTHERS | OF_MAPS | POINTWISE)[name]
    return {OURS: partial(ours, size), PUBLISHED: partial(theirs, size)}
