"""Examples normalized by the C++ loops with a weight and a bias of each, not of the batch.

To the loops a batch of maps is one example with as many channels as all examples have together; only its statistics are
those of the batch. Of lines, they take as many sets of parameters as there are examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from normkit.kernels import autograd, halves, native, reference, select
from normkit.kernels.plans import FEW_LINES, Plan
from normkit.kernels.reference import Recipe
from normkit.moments import Moments


def normalize(
    x: Tensor, recipe: Recipe, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Moments] | None:
    """Return x, (N, C, ...), normalized by channels, and their moments; weight and bias are (N, C).

    None, and nothing done, if the loops cannot.
    """
    batch, whole = select.plan_for(x, recipe._replace(activation=None)), _as_one(x, recipe, weight, bias, residual)
    if batch is None or whole is None:
        return None
    seam = _Seam(batch, recipe, x.shape[0])
    y = halves.normalize(*whole, seam).view(x.shape)
    return y, seam.own


def normalize_stored(
    x: Tensor, recipe: Recipe, stored: Moments, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> Tensor | None:
    """As `normalize`, with statistics that are already known."""
    whole = _as_one(x, recipe, weight, bias, residual)
    if whole is None or stored.mean.requires_grad or stored.var.requires_grad:
        return None
    flat, own_weight, own_bias, beside, plan = whole
    every = _repeated(stored, x.shape[0])
    return autograd.normalize_stored(flat, every, own_weight, own_bias, beside, plan).view(x.shape)


def normalize_lines(
    x: Tensor, recipe: Recipe, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> Tensor | None:
    """Return x, (N, ..., *shape), normalized over its last dimensions; weight and bias are (N, *shape).

    None, and nothing done, if the loops cannot.
    """
    first = recipe.over[0]
    if prod(x.shape[1:first]) < FEW_LINES or not x.is_contiguous():
        return None
    own = recipe._replace(parameters=(x.shape[0], *(1,) * (first - 1), *x.shape[first:]))
    plan = select.plan_for(x, own, weight, bias, residual)
    return None if plan is None else autograd.normalize(x, weight, bias, residual, plan)[0]


def _as_one(
    x: Tensor, recipe: Recipe, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Plan] | None:
    """The tensors of a call, with examples and channels in one dimension, and the plan of that."""
    if x.dim() < 3 or not x.is_contiguous():
        return None
    channels = x.shape[0] * x.shape[1]
    own = recipe._replace(over=(0, 2), parameters=(1, channels, 1))
    weight, bias = (None if t is None else t.reshape(-1) for t in (weight, bias))
    flat, beside = (None if t is None else t.reshape(1, channels, -1) for t in (x, residual))
    assert flat is not None
    plan = select.plan_for(flat, own, weight, bias, beside)
    return None if plan is None or plan.copy is not None else (flat, weight, bias, beside, plan)


class _Seam:
    """Between the halves: statistics are those of all examples, and so are the sums that go through them."""

    own: Moments

    def __init__(self, batch: Plan, recipe: Recipe, examples: int) -> None:
        self._batch, self._recipe, self._examples = batch, recipe._replace(over=(0, 2), parameters=None), examples

    def statistics(self, x: Tensor, parameters: Sequence[Tensor]) -> Moments:
        self.own = native.moments(x, self._batch)
        return _repeated(self.own, self._examples)

    def between(self, sums: Tensor, weight: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        of_g = sums if weight is None else sums * weight.detach()
        means = of_g.view(2, self._examples, -1).sum(1) / self._batch.values
        return means.repeat(1, self._examples), ()

    def again(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        channels = self._batch.statistics
        weight, bias, residual = (
            None if t is None else t.reshape(self._examples, channels, -1) for t in (weight, bias, residual)
        )
        of_batch = x.reshape(self._examples, channels, -1)
        return reference.normalize(of_batch, weight, bias, residual, None, self._recipe)[0].reshape(x.shape)


def _repeated(of_batch: Moments, examples: int) -> Moments:
    return Moments(of_batch.mean.repeat(examples), of_batch.var.repeat(examples), of_batch.count)
