"""Gamma and beta, and statistics where there were none, so that a new norm starts close to the one it replaces."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.batches import Forward, each_batch, in_evaluation
from normkit.errors import NonFiniteError
from normkit.snapshot import untouched
from normkit.surgery.parity import run_example
from normkit.surgery.replace.builders import frozen_twin
from normkit.surgery.replace.carry import Replacement
from normkit.surgery.replace.foreign import plain
from normkit.surgery.replace.sites import first_tensor


class Line(NamedTuple):
    """The straight lines through pairs (x, y), one per channel, and the share of y's variance they explain."""

    slope: Tensor
    intercept: Tensor
    explained: float


class Sums:
    """Sums over pairs of a normalized input x and an old output y, per channel, in float64."""

    def __init__(self) -> None:
        self.count, self.batches = 0, 0
        self.sums: Tensor | None = None  # x, y, x^2, xy, y^2

    def add(self, x: Tensor, y: Tensor, over: Sequence[int]) -> None:
        """Take more pairs, that share a channel over these dimensions."""
        new = torch.stack([of.sum(tuple(over)) for of in (x, y, x * x, x * y, y * y)])
        self.sums = new if self.sums is None else self.sums + new
        self.count += x.numel() // new[0].numel()
        self.batches += 1

    def standardized(self, mean: Tensor, std: Tensor) -> Sums:
        """The same sums for (x - mean) / std."""
        assert self.sums is not None
        x, y, xx, xy, yy = self.sums
        n, result = self.count, Sums()
        centred = (x - n * mean, y, xx - 2 * mean * x + n * mean * mean, xy - mean * y, yy)
        result.sums = torch.stack([of / std**power for of, power in zip(centred, (1, 0, 2, 1, 0), strict=True)])
        result.count, result.batches = n, self.batches
        return result

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and unbiased variance of x."""
        assert self.sums is not None
        mean = self.sums[0] / self.count
        square = self.sums[2] / self.count
        return mean, (square - mean * mean).clamp(min=0) * (self.count / max(1, self.count - 1))

    def fit(self, slope: bool, intercept: bool) -> Line:
        """Least squares, of slope and intercept, or of one of them with the other at one or zero."""
        assert self.sums is not None
        x, y, xx, xy, yy = self.sums / self.count
        if intercept:
            spread, together = xx - x * x, xy - x * y
        else:
            spread, together = xx, xy
        moves = spread > 1e-12 * xx  # not a constant input, of which only rounding would be left
        a = torch.where(moves, together / spread.where(moves, 1), 0) if slope else torch.ones_like(x)
        b = y - a * x if intercept else torch.zeros_like(x)
        error = (yy - 2 * a * xy - 2 * b * y + a * a * xx + 2 * a * b * x + b * b).clamp(min=0).sum().item()
        total = (yy - y * y).clamp(min=0).sum().item()
        return Line(a, b, max(0.0, 1 - error / total) if total else 1.0)


def observe(
    model: nn.Module, replacements: Sequence[Replacement], batches: Iterable[Any], forward: Forward | None
) -> dict[int, Sums]:
    """Run the model as it still is over all batches, and add up for every replacement what it must come close to.

    Each sees the inputs of the layer that it will replace. By the place of the replacement in the sequence.
    """
    sums = {index: Sums() for index in range(len(replacements))}
    with untouched(model), in_evaluation(model):
        for index, one in enumerate(replacements):
            one.site.layer.register_forward_pre_hook(_adding(one, sums[index]), with_kwargs=True)
        for batch in each_batch(batches):
            run_example(model, batch, forward)
    return {index: of for index, of in sums.items() if of.sums is not None}


def _adding(one: Replacement, into: Sums) -> Any:
    """A hook that passes a layer's input through the old norm and the new one, both without activation."""
    old = plain(copy.deepcopy(one.site.layer).double(), frozen_twin(one.site)).eval()
    new = None if one.needs_statistics else _normalizing_only(one.layer)

    def add(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_tensor(args, kwargs)
        if x is not None:
            x = x.detach().double()
            into.add(x if new is None else new.forward(x), old.forward(x), _shared(one.layer, x))

    return add


@torch.no_grad()
def _normalizing_only(layer: nn.Module) -> nn.Module:
    """A copy with gamma at one, beta at zero and nothing after them."""
    bare = plain(layer).double().eval()
    for name, parameter in bare.named_parameters():
        if name != "eps":
            parameter.fill_(1 if name == "weight" else 0)
    if "tau" in bare._parameters:
        bare._parameters["tau"] = None
    return bare


def _shared(layer: nn.Module, x: Tensor) -> list[int]:
    """The dimensions over which an input shares gamma and beta."""
    shape: tuple[int, ...] | None = getattr(layer, "normalized_shape", None)
    return [d for d in range(x.dim()) if d != 1] if shape is None else list(range(x.dim() - len(shape)))


@torch.no_grad()
def fit_(one: Replacement, seen: Sums) -> float:
    """Set the new layer's gamma and beta, and its statistics if it has none; return how much they explain."""
    weight, bias = one.layer._parameters.get("weight"), one.layer._parameters.get("bias")
    _must_be_finite(one, seen)
    if one.needs_statistics:
        seen = _take_statistics_(one.layer, seen)
    line = seen.fit(weight is not None, bias is not None)
    for parameter, value in ((weight, line.slope), (bias, line.intercept)):
        if parameter is not None:
            parameter.copy_(value.reshape(parameter.shape))
    return line.explained


def _must_be_finite(one: Replacement, seen: Sums) -> None:
    if seen.sums is not None and not seen.sums.isfinite().all():
        raise NonFiniteError(
            f"calibrate needs finite values; on these batches {one.site.name or 'the model itself'!r} sees NaN or "
            "infinity. Leave out the batch that brings them, or look for the layer that overflows."
        )


def _take_statistics_(layer: nn.Module, seen: Sums) -> Sums:
    mean, var = seen.moments()
    layer.get_buffer("running_mean").copy_(mean)
    layer.get_buffer("running_var").copy_(var)
    layer.get_buffer("num_batches_tracked").fill_(seen.batches)
    return seen.standardized(mean, (var + layer.eps).sqrt())  # type: ignore[operator]
