"""What the norms across examples are made of: ways to normalize a batch, and one to store its statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from normkit import checks
from normkit.kernels import reference, select
from normkit.kernels.reference import Recipe
from normkit.kernels.synced import Gather, Reduce, SyncedNormalize
from normkit.moments import Moments, ema, unbiased_var
from normkit.tracing import is_exporting


class Terms(NamedTuple):
    """Everything that a batch is normalized with, apart from its own values."""

    features: Sequence[int]  # the shape of one set of statistics: (C,), or (C, H, W) per position
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    activation: str | None = None
    residual: Tensor | None = None
    mask: Tensor | None = None
    nonfinite: str = "propagate"
    inplace: bool = False  # x may be overwritten
    who: object = "batch_norm"  # printed only in an error
    ranks: Sequence[int] = ()  # of the inputs that are taken; none: any

    def check(self, x: Tensor) -> Terms:
        """Check everything that comes with a batch; return the terms with the mask as it broadcasts against x."""
        features, weight, bias, _, _, residual, mask, _, _, who, ranks = self
        checks.batch_input(x, who, features, ranks or _ranks(x, features))
        checks.one_per_channel(weight, "weight", who, features)
        checks.one_per_channel(bias, "bias", who, features)
        if residual is not None:
            checks.same_shape(residual, x, who)
        if mask is None:
            return self
        return self._replace(mask=checks.position_mask(mask, x, who))

    def recipe(self, x: Tensor) -> Recipe:
        """What the kernels are to do with x."""
        rank, own = x.dim(), len(self.features)
        over = (0, *range(1 + own, rank))
        return Recipe(over, self.eps, self.activation, True, (1, *self.features, *(1,) * (rank - 1 - own)))


def moments_of(x: Tensor, features: Sequence[int], mask: Tensor | None, who: object = "batch_moments") -> Moments:
    """Return the moments of a batch, of shape `features`."""
    checks.batch_input(x, who, features, _ranks(x, features))
    mask = checks.position_mask(mask, x, who)
    return select.moments(x, (0, *range(1 + len(features), x.dim())), mask)


def has_no_values(x: Tensor) -> bool:
    """Whether x has no examples or no positions: statistics then have nothing to be made of, nor anything to do.

    What a compiler knows only when the graph runs is taken to have some: the operators find out for themselves.
    """
    if is_exporting():
        return False  # the sizes of a recorded graph are not this input's
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false  # compilers have it; importing it takes long

        return guard_or_false(x.numel() == 0)
    return x.numel() == 0


def normalize_nothing(
    x: Tensor, recipe: Recipe, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Return x without values, normalized: as empty, and with gradients of zero for all that would have taken part."""
    weight = recipe.view(weight)
    y = x * 1 if weight is None else x * weight
    return reference.finish(y, recipe.view(bias), residual, recipe.activation).to(x.dtype)


def moments_of_nothing(shape: Sequence[int], x: Tensor) -> Moments:
    """Return moments that change nothing, wherever they are merged or stored."""
    zeros = torch.zeros(tuple(shape), dtype=reference.working_dtype(x), device=x.device)
    return Moments(zeros, zeros, 0)


def normalize_batch(x: Tensor, terms: Terms) -> tuple[Tensor, Moments]:
    """Return the normalized batch and its moments, of shape `features` and detached. Writes nothing."""
    terms = terms.check(x)
    recipe = terms.recipe(x)
    if has_no_values(x):
        y = normalize_nothing(x, recipe, terms.weight, terms.bias, terms.residual)
        return y, moments_of_nothing(terms.features, x)
    checks.enough_values(reference.count_values(x, recipe.over, terms.mask), x, terms.who)
    y, batch = select.normalize(
        x, recipe, weight=terms.weight, bias=terms.bias, residual=terms.residual, mask=terms.mask, inplace=terms.inplace
    )
    return y, finite_if_asked(batch, terms)


def normalize_known(x: Tensor, own: Moments, terms: Terms) -> tuple[Tensor, Moments]:
    """As `normalize_batch`, of a batch whose moments are already known, and checked to be of enough values."""
    terms = terms.check(x)
    weight, bias, residual, mask = terms.weight, terms.bias, terms.residual, terms.mask
    y = select.normalize_known(x, terms.recipe(x), own, weight=weight, bias=bias, residual=residual, mask=mask)
    return y, finite_if_asked(own, terms)


def normalize_and_store_(x: Tensor, terms: Terms, stored: Moments, momentum: float | Tensor | None) -> Tensor:
    """Return the normalized batch, and move the stored tensors, in place, to the statistics after it."""
    checked = terms.check(x)
    if not has_no_values(x):
        _, weight, bias, _, _, residual, mask, nonfinite, inplace, who, _ = checked
        recipe = checked.recipe(x)
        checks.enough_values(reference.count_values(x, recipe.over, mask), x, who)
        tensors, refuse = (weight, bias, residual, mask), partial(checks.finite, who=who)
        y = select.normalize_and_update_(
            x, recipe, stored, momentum, *tensors, nonfinite=nonfinite, refuse=refuse, inplace=inplace
        )
        if y is not None:
            return y
    y, batch = normalize_batch(x, terms)
    update_(stored, batch, average_factor(stored, momentum), terms.nonfinite)
    return y


def renormalize(
    x: Tensor,
    terms: Terms,
    stored: Moments,
    momentum: float | Tensor | None,
    limits: Callable[[], tuple[float, float]] | None,
    correction: Tensor | None = None,
) -> tuple[Tensor, Moments, Tensor] | None:
    """As `select.renormalize`; also None if there are no values."""
    terms = terms.check(x)
    if has_no_values(x):
        return None
    _, weight, bias, _, _, residual, mask, nonfinite, _, who, _ = terms
    recipe = terms.recipe(x)
    checks.enough_values(reference.count_values(x, recipe.over, mask), x, who)
    tensors = {"weight": weight, "bias": bias, "residual": residual, "mask": mask}
    refuse = partial(checks.finite, who=who)
    return select.renormalize(
        x, recipe, stored, momentum, limits, correction, **tensors, nonfinite=nonfinite, refuse=refuse
    )


def normalize_chunks(x: Tensor, sizes: Sequence[int], terms: Terms) -> tuple[Tensor, Moments]:
    """As `normalize_batch`, of chunks of as many examples, each by itself; the moments have a dimension of chunks."""
    terms = terms.check(x)._replace(inplace=False)  # chunks are views, which autograd does not let us overwrite
    done: list[tuple[Tensor, Moments]] = []
    if len(set(sizes)) == 1:
        done = _equal_chunks(x, len(sizes), terms)
    else:  # those of one size after another
        first = 0
        for size, group in groupby(sizes):
            chunks = len(list(group))
            own = slice(first, first + chunks * size)
            residual, mask = (None if t is None else t[own] for t in (terms.residual, terms.mask))
            done += _equal_chunks(x[own], chunks, terms._replace(residual=residual, mask=mask))
            first = own.stop
    if len(done) == 1:
        return done[0]
    moments = (torch.cat([getattr(m, name) for _, m in done]) for name in Moments._fields)
    return torch.cat([y for y, _ in done]), Moments(*moments)


def normalize_chunks_and_store_(
    x: Tensor, chunks: int, terms: Terms, stored: Moments, momentum: float | Tensor | None
) -> Tensor | None:
    """As `normalize_and_store_` of so many chunks of one size, one after another; None if that is not one call."""
    terms = terms.check(x)
    cut, recipe, residual, mask = _cut(x, chunks, terms)
    if chunks < 2 or select.plan_for(cut, recipe, terms.weight, terms.bias, residual, mask) is None:
        return None
    checks.enough_values(reference.count_values(cut, recipe.over, mask), x[: x.shape[0] // chunks], terms.who)
    tensors, refuse = (terms.weight, terms.bias, residual, mask), partial(checks.finite, who=terms.who)
    y = select.normalize_and_update_(cut, recipe, stored, momentum, *tensors, nonfinite=terms.nonfinite, refuse=refuse)
    return None if y is None else y.flatten(0, 1)


def _cut(x: Tensor, chunks: int, terms: Terms) -> tuple[Tensor, Recipe, Tensor | None, Tensor | None]:
    """The batch, with a first dimension of chunks of one size; what to do with it; and residual and mask likewise."""
    rank = x.dim()
    own = (1, 1, *terms.features, *(1,) * (rank - 2))
    recipe = Recipe((1, *range(3, rank + 1)), terms.eps, terms.activation, True, own)
    residual, mask = (None if t is None else t.unflatten(0, (chunks, -1)) for t in (terms.residual, terms.mask))
    return x.unflatten(0, (chunks, -1)), recipe, residual, mask


def _equal_chunks(x: Tensor, chunks: int, terms: Terms) -> list[tuple[Tensor, Moments]]:
    cut, recipe, residual, mask = _cut(x, chunks, terms)
    weight, bias = terms.weight, terms.bias
    if chunks > 1 and select.plan_for(cut, recipe, weight, bias, residual, mask) is not None:
        counts = reference.count_values(cut, recipe.over, mask)
        checks.enough_values(counts, x[: x.shape[0] // chunks], terms.who)
        y, m = select.normalize(cut, recipe, weight=weight, bias=bias, residual=residual, mask=mask)
        count = torch.as_tensor(m.count, device=x.device).expand(m.mean.shape)
        return [(y.flatten(0, 1), finite_if_asked(m._replace(count=count), terms))]
    pieces = ([None] * chunks if t is None else t.chunk(chunks) for t in (x, terms.residual, terms.mask))
    done = []
    for chunk, own_residual, own_mask in zip(*pieces, strict=True):
        assert chunk is not None
        y, m = normalize_batch(chunk, terms._replace(residual=own_residual, mask=own_mask))
        count = torch.as_tensor(m.count, device=x.device).expand(m.mean.shape)
        done.append((y, Moments(m.mean.unsqueeze(0), m.var.unsqueeze(0), count.unsqueeze(0))))
    return done


def normalize_among(x: Tensor, others: Moments, terms: Terms) -> tuple[Tensor, Moments, Moments]:
    """Normalize with the merged moments of this batch and others; return the output, its own and the merged.

    Gradients flow through the batch's own share of the statistics.
    """
    terms = terms.check(x)
    recipe = terms.recipe(x)
    if has_no_values(x):
        own = moments_of_nothing(terms.features, x)
        y = normalize_nothing(x, recipe, terms.weight, terms.bias, terms.residual)
        return y, own, others.merge(own)
    checks.enough_values(reference.count_values(x, recipe.over, terms.mask), x, terms.who)
    weight, bias, residual, mask = terms.weight, terms.bias, terms.residual, terms.mask
    y, own, merged = select.normalize_among(x, recipe, others, weight=weight, bias=bias, residual=residual, mask=mask)
    return y, finite_if_asked(own, terms), merged


def normalize_synced(x: Tensor, terms: Terms, gather: Gather, reduce: Reduce) -> tuple[Tensor, Moments]:
    """As `normalize_batch`, of a batch spread over processes: `gather` and `reduce` exchange values with the others."""
    terms = terms.check(x)
    recipe = terms.recipe(x)
    arguments = (terms.weight, terms.bias, terms.residual, terms.mask, recipe, gather, reduce)
    y, *kept = SyncedNormalize.apply(x, *arguments)
    batch = Moments(*kept)
    # After the exchange, so that all ranks refuse together and none is left waiting.
    checks.enough_values(batch.count, x, terms.who)
    return y, finite_if_asked(batch, terms)


def normalize_stored(x: Tensor, stored: Moments, terms: Terms) -> Tensor:
    """Return x normalized with stored statistics. A mask has no effect here, but its shape is checked."""
    terms = terms.check(x)
    checks.one_per_channel(stored.var, "running_var", terms.who, terms.features)
    if has_no_values(x):
        return normalize_nothing(x, terms.recipe(x), terms.weight, terms.bias, terms.residual)
    return select.normalize_stored(x, terms.recipe(x), stored, terms.weight, terms.bias, terms.residual)


def next_stored(stored: Moments, batch: Moments, momentum: float | Tensor, nonfinite: str = "propagate") -> Moments:
    """Return the stored statistics after this batch: its unbiased variance is what is stored, and `count` goes up.

    A batch of no values counts, as in torch, but moves nothing.
    """
    if not isinstance(batch.count, Tensor) and batch.count == 0:
        return stored._replace(count=stored.count + 1)
    wide = batch.mean.dtype
    old = stored._replace(mean=stored.mean.to(wide), var=stored.var.to(wide))
    return settle(stored, ema(old, batch._replace(var=unbiased_var(batch)), momentum), nonfinite)


def settle(stored: Moments, new: Moments, nonfinite: str) -> Moments:
    """Return `new` in the types of `stored`; with "skip-update", `stored` if `new` is not finite in those types."""
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
    write_(stored, next_stored(stored, batch, momentum, nonfinite))


@torch.no_grad()
def write_(stored: Moments, new: Moments) -> None:
    """Write new statistics into the stored tensors; a tensor `count` counts along."""
    stored.mean.copy_(new.mean)
    stored.var.copy_(new.var)
    if isinstance(stored.count, Tensor) and isinstance(new.count, Tensor):
        stored.count.copy_(new.count)


def average_factor(stored: Moments, momentum: float | Tensor | None) -> float | Tensor:
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


def finite_if_asked(batch: Moments, terms: Terms) -> Moments:
    """Return a batch's moments; raise if they are not finite and the terms ask for that."""
    if terms.nonfinite == "raise":
        checks.finite(batch, terms.who)
    return batch
