"""The partition that a net's ReLUs make of the space of its inputs: where units switch, and how far that is from data.

A unit is a channel of a layer: it switches where what enters its ReLU is 0. Nets are those of `relu_nets`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.hooks import hooked
from normkit.layers.batch import BatchNorm


class Unit(NamedTuple):
    """What went through a layer and its norm, as rows: of a convolution, one for each example and position."""

    layer: Any  # Linear or Conv2d
    norm: BatchNorm | None
    inputs: Tensor  # (rows, fan in)
    outputs: Tensor  # (rows, channels), as they enter the ReLU

    @property
    def weights(self) -> Tensor:
        """Those of each channel in a row."""
        return self.layer.weight.detach().flatten(1)  # type: ignore[no-any-return]

    def distances(self) -> Tensor:
        """Of each row from the hyperplane where each channel switches, in the space of the layer's inputs."""
        slopes = self.weights.norm(dim=1)
        if self.norm is not None:
            slopes = slopes * scale_of(self.norm).abs()
        found: Tensor = self.outputs.abs() / slopes
        return found


def scale_of(norm: BatchNorm) -> Tensor:
    """What a norm multiplies each channel by in evaluation."""
    assert norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    return scale if norm.weight is None else scale * norm.weight.detach()


def units_of(model: nn.Module) -> list[Any]:
    """The units of layer, norm and activation, in order."""
    return [module for module in model.modules() if isinstance(module, nn.Sequential) and hasattr(module, "layer")]


@torch.no_grad()
def watched(model: nn.Module, x: Tensor) -> list[Unit]:
    """What goes through each layer when the model sees x."""
    units, inputs = units_of(model), list[Tensor]()
    before = [(unit.layer, lambda _, args, kwargs: inputs.append(args[0])) for unit in units]
    with hooked(before=before):
        entering = switches(model, x)
    found = zip(units, inputs, entering, strict=True)
    return [Unit(unit.layer, getattr(unit, "norm", None), rows_of(unit.layer, z), _by_row(h)) for unit, z, h in found]


def switches(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What enters each ReLU, layer by layer."""
    found: list[Tensor] = []
    before = [(unit.activation, lambda _, args, kwargs: found.append(args[0])) for unit in units_of(model)]
    with hooked(before=before):
        model(x)
    return found


def rows_of(layer: Any, inputs: Tensor) -> Tensor:
    """What a layer's weights are multiplied with: of a convolution, patches."""
    if isinstance(layer, nn.Linear):
        return inputs
    patches = F.unfold(inputs, layer.kernel_size, padding=layer.padding, stride=layer.stride)
    return patches.transpose(1, 2).flatten(0, 1)


def _by_row(outputs: Tensor) -> Tensor:
    return outputs.movedim(1, -1).flatten(0, -2)


@torch.no_grad()
def store_statistics_(model: nn.Module, x: Tensor) -> None:
    """Let every norm store the mean and the biased variance of x, as evaluation would see them: exactly its own."""

    def store(norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        var, mean = torch.var_mean(_by_row(args[0]), 0, correction=0)
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(var)

    model.eval()
    with hooked(before=[(unit.norm, store) for unit in units_of(model) if hasattr(unit, "norm")]):
        model(x)


# ---- measures


def measured(model: nn.Module, x: Tensor, radius: float) -> dict[str, Any]:
    """Where a net's boundaries lie that has the statistics of x, which are stored in its norms.

    "identity" is an error and "distances" are by layer: see `identity_error` and `relative_distance`. "near" is the
    share of units and inputs that are within a radius of each other, in standard deviations of x along a random
    direction, and "elsewhere" the same for points drawn uniformly from the range of x. "crossings", by layer, are along
    segments between one quarter of x and the next.
    """
    store_statistics_(model, x)
    units = watched(model, x)
    low, high, quarter = x.amin(0), x.amax(0), len(x) // 4
    points = low + (high - low) * torch.rand_like(x)
    limit = radius * float(x.flatten(1).var(0, correction=0).mean().sqrt())
    near, elsewhere = (float((input_distances(model, p, 16) < limit).double().mean()) for p in (x, points))
    return {
        "identity": max(map(identity_error, units)),
        "distances": [relative_distance(unit) for unit in units],
        "near": near,
        "elsewhere": elsewhere,
        "crossings": crossings(model, x[:quarter], x[quarter : 2 * quarter], parts=16),
    }


def identity_error(unit: Unit) -> float:
    """How far variance = |w|^2 mean(d^2) is from holding, relative to the variance, at most over channels."""
    variances = (unit.inputs @ unit.weights.T).var(0, correction=0)
    squares = unit.weights.square().sum(1) * unit.distances().square().mean(0)
    return float(((squares - variances).abs() / variances).max())


def relative_distance(unit: Unit) -> float:
    """The mean squared distance of rows from boundaries, over the rows' variance along a random direction."""
    variance = unit.inputs.var(0, correction=0).mean()
    return float(unit.distances().square().mean() / variance)


def input_distances(model: nn.Module, x: Tensor, units: int) -> Tensor:
    """First-order distances of inputs from where units switch, |h| / |dh/dx|, of some units of each layer: (all, N)."""
    found = []
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        for values in switches(model, x):
            for unit in _drawn(values.flatten(1), units):
                (gradient,) = torch.autograd.grad(unit.sum(), x, retain_graph=True)
                found.append(unit.detach().abs() / gradient.flatten(1).norm(dim=1))
    return torch.stack(found)


def _drawn(values: Tensor, units: int) -> Iterator[Tensor]:
    """Columns drawn at random, the same for all nets of a shape."""
    drawing = torch.Generator().manual_seed(0)
    return (values[:, i] for i in torch.randperm(values.shape[1], generator=drawing)[:units].tolist())


@torch.no_grad()
def crossings(model: nn.Module, starts: Tensor, ends: Tensor, parts: int) -> list[float]:
    """How often a unit switches between two inputs, on average, by layer; segments are cut into so many parts."""
    way = torch.linspace(0, 1, parts + 1, dtype=starts.dtype).view(-1, *[1] * starts.dim())
    points = starts + (ends - starts) * way  # (parts + 1, N, ...)
    signs = [(h > 0).unflatten(0, points.shape[:2]) for h in switches(model, points.flatten(0, 1))]
    return [float((s[1:] != s[:-1]).sum(0).double().mean()) for s in signs]


@torch.no_grad()
def jitter(model: nn.Module, batches: Sequence[Tensor]) -> list[float]:
    """How far boundaries move from batch to batch, by layer: the standard deviation of mean / |w|, over units."""
    model.train()
    means: list[list[Tensor]] = [[] for _ in units_of(model)]
    after = [
        (unit.layer, lambda layer, args, kwargs, output, own=own: own.append(_by_row(output).mean(0)))
        for unit, own in zip(units_of(model), means, strict=True)
    ]
    with hooked(after=after):
        for x in batches:
            model(x)
    widths = [unit.layer.weight.flatten(1).norm(dim=1) for unit in units_of(model)]
    deviations = [torch.stack(own).std(0) / width for own, width in zip(means, widths, strict=True)]
    return [float(deviation.square().mean().sqrt()) for deviation in deviations]
