"""What the norms across examples are made of: ways to normalise a batch, and one to store its statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold
from typing import NamedTuple

import torch
from torch import Tensor

from normkit import checks
from normkit.kernels import reference, select
from normkit.kernels.reference import Recipe
from normkit.kernels.synced import Gather, Reduce, SyncedNormalize
from normkit.moments import Moments, ema


class Terms(NamedTuple):
    """All that a batch is normalised by, beside itself."""

    features: Sequence[int]  # the shape of one set of statistics: (C,), or (C, H, W) per position
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    activation: str | None = None
    residual: Tensor | None = None
    mask: Tensor | None = None
    nonfinite: str = "propagate"
    who: object = "batch_norm"  # printed only in an error

    def check(self, x: Tensor) -> Terms:
        """Check everything that comes with a batch; return the terms with the mask as it broadcasts against x."""
        checks.batch_input(x, self.who, self.features, _ranks(x, self.features))
        checks.one_per_channel(self.weight, "weight", self.who, self.features)
        checks.one_per_channel(self.bias, "bias", self.who, self.features)
        checks.same_shape(self.residual, x, self.who)
        mask = checks.position_mask(self.mask, x, self.who)
        return self if mask is self.mask else self._replace(mask=mask)

    def recipe(self, x: Tensor) -> Recipe:
        """What the kernels are to do with x."""
        return Recipe(_over(x, self.features), self.eps, self.activation)

    def parameters(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias as they broadcast against x."""
        return tuple(None if t is None else _view(t, x, self.features) for t in (self.weight, self.bias))  # type: ignore[return-value]


def moments_of(x: Tensor, features: Sequence[int], mask: Tensor | None, who: object = "batch_moments") -> Moments:
    """Return the moments of a batch, of shape `features`."""
    checks.batch_input(x, who, features, _ranks(x, features))
    mask = checks.position_mask(mask, x, who)
    return _per_channel(select.moments(x, _over(x, features), mask), features)


def normalize_batch(x: Tensor, terms: Terms) -> tuple[Tensor, Moments]:
    """Return the normalised batch and its moments, of shape `features` and detached. Writes nothing."""
    terms = terms.check(x)
    recipe = terms.recipe(x)
    checks.enough_values(reference.count_values(x, recipe.over, terms.mask), x, terms.who)
    weight, bias = terms.parameters(x)
    y, kept = select.normalize(x, recipe, weight=weight, bias=bias, residual=terms.residual, mask=terms.mask)
    return y, _finite_if_asked(_per_channel(kept, terms.features), terms)


def normalize_among(x: Tensor, earlier: Sequence[Moments], terms: Terms) -> tuple[Tensor, Moments, Moments]:
    """Normalise with the merged moments of this batch and earlier ones; return the output, its own and the merged.

    Gradients flow through the batch's own share of the statistics.
    """
    terms = terms.check(x)
    recipe = terms.recipe(x)
    checks.enough_values(reference.count_values(x, recipe.over, terms.mask), x, terms.who)
    wide = x.to(reference.working_dtype(x))
    own = _finite_if_asked(_per_channel(reference.moments(wide, recipe.over, terms.mask), terms.features), terms)
    merged = fold(Moments.merge, earlier, own)
    y = reference.normalize_with(wide, _viewed(merged, x, terms), *terms.parameters(x), terms.residual, recipe)
    return y.to(x.dtype), own, merged


def normalize_synced(x: Tensor, terms: Terms, gather: Gather, reduce: Reduce) -> tuple[Tensor, Moments]:
    """As `normalize_batch`, of a batch spread over processes: `gather` and `reduce` speak to the others."""
    terms = terms.check(x)
    arguments = (*terms.parameters(x), terms.residual, terms.mask, terms.recipe(x))
    y, *kept = SyncedNormalize.apply(x, *arguments, gather, reduce)
    batch = _per_channel(Moments(*kept), terms.features)
    # After the exchange, so that all ranks refuse together and none is left waiting.
    checks.enough_values(batch.count, x, terms.who)
    return y, _finite_if_asked(batch, terms)


def normalize_stored(x: Tensor, stored: Moments, terms: Terms) -> Tensor:
    """Return x normalised with stored statistics. A mask has nothing to say here, but its shape is checked."""
    terms = terms.check(x)
    checks.one_per_channel(stored.var, "running_var", terms.who, terms.features)
    parameters = terms.parameters(x)
    return select.normalize_stored(x, terms.recipe(x), _viewed(stored, x, terms), *parameters, terms.residual)


def next_stored(stored: Moments, batch: Moments, momentum: float | Tensor, nonfinite: str = "propagate") -> Moments:
    """Return the stored statistics after this batch: its unbiased variance is what is stored, and `count` goes up."""
    wide = batch.mean.dtype
    old = stored._replace(mean=stored.mean.to(wide), var=stored.var.to(wide))
    return settle(stored, ema(old, batch._replace(var=batch.unbiased_var), momentum), nonfinite)


def settle(stored: Moments, new: Moments, nonfinite: str) -> Moments:
    """Return `new` in the types of `stored`; told to skip, return `stored` where `new` is not finite in them."""
    mean, var = new.mean.to(stored.mean.dtype), new.var.to(stored.var.dtype)
    if nonfinite != "skip-update":
        return Moments(mean, var, new.count)
    good = mean.isfinite().all() & var.isfinite().all()
    return Moments(
        torch.where(good, mean, stored.mean),
        torch.where(good, var, stored.var),
        torch.where(good, torch.as_tensor(new.count), torch.as_tensor(stored.count)),
    )


def update_(stored: Moments, batch: Moments, momentum: float | Tensor, nonfinite: str = "propagate") -> None:
    """Move the stored tensors, in place, to the statistics after this batch."""
    if nonfinite == "skip-update" or not select.update_natively_(stored, batch, momentum):
        write_(stored, next_stored(stored, batch, momentum, nonfinite))


@torch.no_grad()
def write_(stored: Moments, new: Moments) -> None:
    """Write new statistics into the stored tensors; a tensor `count` counts along."""
    stored.mean.copy_(new.mean)
    stored.var.copy_(new.var)
    if isinstance(stored.count, Tensor) and isinstance(new.count, Tensor):
        stored.count.copy_(new.count)


def average_factor(stored: Moments, momentum: float | None) -> float | Tensor:
    """Return the weight of the next batch: the momentum, or for None that of a plain average over all batches."""
    if momentum is not None:
        return momentum
    if isinstance(stored.count, Tensor):
        return (stored.count + 1).to(reference.working_dtype(stored.mean)).reciprocal()
    return 1 / (stored.count + 1)


def features_of(x: Tensor, *per_channel: Tensor | None) -> Sequence[int]:
    """The shape of one set of statistics: that of the tensors given, else one value per channel."""
    for t in per_channel:
        if t is not None:
            return t.shape
    return x.shape[1:2]


def _ranks(x: Tensor, features: Sequence[int]) -> Sequence[int]:
    return (1 + len(features),) if len(features) > 1 else (max(2, x.dim()),)


def _over(x: Tensor, features: Sequence[int]) -> tuple[int, ...]:
    return (0, *range(1 + len(features), x.dim()))


def _view(t: Tensor, x: Tensor, features: Sequence[int]) -> Tensor:
    return t.reshape(1, *features, *[1] * (x.dim() - 1 - len(features)))


def _per_channel(kept: Moments, features: Sequence[int]) -> Moments:
    count = kept.count
    if isinstance(count, Tensor):
        count = count.expand(kept.mean.shape).reshape(features)
    return Moments(kept.mean.reshape(features), kept.var.reshape(features), count)


def _viewed(m: Moments, x: Tensor, terms: Terms) -> Moments:
    return Moments(_view(m.mean, x, terms.features), _view(m.var, x, terms.features), m.count)


def _finite_if_asked(batch: Moments, terms: Terms) -> Moments:
    if terms.nonfinite == "raise":
        checks.finite(batch, terms.who)
    return batch
