"""Gamma and beta from outside, for each example its own: conditional batch norm, AdaLN, FiLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeGuard

from torch import Tensor

from normkit import checks
from normkit.errors import ShapeError
from normkit.functional import batch_core
from normkit.functional.batch_core import Terms
from normkit.kernels import by_example, fused, reference
from normkit.moments import Moments


def is_of_examples(parameter: Tensor | None, features: Sequence[int], examples: int) -> TypeGuard[Tensor]:
    """Whether a weight or a bias has a row for each of so many examples."""
    return parameter is not None and parameter.shape == (examples, *features)


class OfExamples(NamedTuple):
    """A weight and a bias of each example: (N, ...) and one of a layer's own."""

    weight: Tensor | None
    bias: Tensor | None

    @staticmethod
    def of(
        weight: Tensor | None, bias: Tensor | None, features: Sequence[int], examples: int, who: object
    ) -> OfExamples | None:
        """Both as (N, *features), if one of them has a dimension of examples; None if all examples share them."""
        if all(t is None or t.dim() <= len(features) for t in (weight, bias)):
            return None
        shared, own = tuple(features), (examples, *features)
        for name, t in (("weight", weight), ("bias", bias)):
            if t is not None and t.shape not in (shared, own):
                raise ShapeError(
                    f"{who} needs a {name} of shape {shared}, for all examples, or {own}, for each of this batch; "
                    f"got {tuple(t.shape)}."
                )
        weight, bias = (None if t is None else t.expand(own) for t in (weight, bias))
        return OfExamples(weight, bias)

    def applied(self, z: Tensor, shape: Sequence[int], residual: Tensor | None, activation: str | None) -> Tensor:
        """activation(z * weight + bias + residual), where parameters are viewed in this shape to broadcast."""
        weight, bias = (None if t is None else t.reshape(tuple(shape)) for t in self)
        return fused.finish(fused.affine(z, weight, bias), residual, activation)


def parted(x: Tensor, terms: Terms) -> tuple[Terms, OfExamples | None]:
    """The terms, and what they have of parameters of each example, which then are in them no more."""
    given = OfExamples.of(terms.weight, terms.bias, terms.features, x.shape[0], terms.who)
    return (terms if given is None else terms._replace(weight=None, bias=None)), given


def normalize_batch(x: Tensor, terms: Terms, given: OfExamples) -> tuple[Tensor, Moments] | None:
    """As `batch_core.normalize_batch`, in the loops, which take these in place of the terms' own parameters.

    None, and nothing done, if they cannot.
    """
    terms, recipe = terms.check(x), terms.recipe(x)
    if terms.mask is not None or batch_core.has_no_values(x):
        return None
    checks.enough_values(reference.count_values(x, recipe.over), x, terms.who)
    found = by_example.normalize(x, recipe, *given, terms.residual)
    return None if found is None else (found[0], batch_core.finite_if_asked(found[1], terms))


def normalize_stored(x: Tensor, stored: Moments, terms: Terms, given: OfExamples) -> Tensor | None:
    """As `batch_core.normalize_stored`, in the same way."""
    terms = terms.check(x)
    if batch_core.has_no_values(x):
        return None
    return by_example.normalize_stored(x, terms.recipe(x), stored, *given, terms.residual)


def normalize_then_apply(
    x: Tensor, terms: Terms, given: OfExamples, normalize: Callable[[Tensor, Terms], Tensor]
) -> Tensor:
    """Normalize without parameters, in whatever way; then apply these, in a pass of their own."""
    terms.check(x)
    z = normalize(x, terms._replace(activation=None, residual=None))
    shape = (x.shape[0], *terms.features, *(1,) * (x.dim() - 1 - len(terms.features)))
    return given.applied(z, shape, terms.residual, terms.activation)


def normalize_stored_with_any(x: Tensor, stored: Moments, terms: Terms) -> Tensor:
    """As `batch_core.normalize_stored`, with parameters that all examples share or that each has its own of."""
    bare, given = parted(x, terms)
    if given is None:
        return batch_core.normalize_stored(x, stored, terms)
    y = normalize_stored(x, stored, bare, given)
    if y is not None:
        return y
    return normalize_then_apply(x, bare, given, lambda x, terms: batch_core.normalize_stored(x, stored, terms))
