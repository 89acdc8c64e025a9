"""Statistics across examples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from normkit import checks
from normkit.activations import ActivationName
from normkit.checks import NonFinite
from normkit.errors import ArgumentError
from normkit.kernels import reference, select
from normkit.kernels.reference import Recipe
from normkit.kernels.synced import Gather, Reduce, SyncedNormalize
from normkit.moments import Moments, ema


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    activation: ActivationName | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    nonfinite: NonFinite = "propagate",
) -> Tensor:
    """Normalise each channel over the batch and its positions (Ioffe & Szegedy 2015).

        activation((x - mean) / sqrt(var + eps) * weight + bias + residual)

    In training, mean and biased variance are the batch's, over the positions where `mask` is true, and the running
    statistics, where given, move towards its mean and unbiased variance in place. In evaluation they are the stored
    ones. Statistics of shape (C, H, W) normalise each position on its own.
    """
    checks.options(eps, momentum, activation, nonfinite)
    if (running_mean is None) != (running_var is None):
        raise ArgumentError("batch_norm needs both running_mean and running_var, or neither; got one of them.")
    stored = None if running_mean is None or running_var is None else Moments(running_mean, running_var, 0)
    if not training:
        if stored is None:
            raise ArgumentError(
                "batch_norm needs running_mean and running_var in evaluation; got None. "
                "To normalise with the batch's own statistics, pass training=True."
            )
        return normalize_stored(input, stored, weight, bias, eps, activation=activation, residual=residual, mask=mask)
    features = _features(input, running_mean, weight, bias)
    checks.one_per_channel(running_var, "running_var", "batch_norm", features)
    y, batch = normalize_batch(
        input,
        features,
        weight,
        bias,
        eps,
        activation=activation,
        residual=residual,
        mask=mask,
        nonfinite=nonfinite,
    )
    if stored is not None:
        update_(stored, batch, momentum, nonfinite)
    return y


def batch_norm_update(
    input: Tensor,
    moments: Moments,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: ActivationName | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    nonfinite: NonFinite = "propagate",
) -> tuple[Tensor, Moments]:
    """Normalise with the batch's statistics, and return the output and the new stored statistics.

    The pure form of `batch_norm` in training, for `torch.func`: nothing is written in place. `moments` are a layer's
    buffers, Moments(running_mean, running_var, num_batches_tracked); momentum None averages over all batches so far.
    """
    checks.options(eps, momentum, activation, nonfinite)
    features = moments.mean.shape
    checks.one_per_channel(moments.var, "moments.var", "batch_norm_update", features)
    y, batch = normalize_batch(
        input,
        features,
        weight,
        bias,
        eps,
        activation=activation,
        residual=residual,
        mask=mask,
        nonfinite=nonfinite,
    )
    stored = moments._replace(count=torch.as_tensor(moments.count, device=moments.mean.device))
    return y, next_stored(stored, batch, average_factor(stored, momentum), nonfinite)


def batch_moments(input: Tensor, mask: Tensor | None = None) -> Moments:
    """Mean, biased variance and count of each channel of one batch, over the positions where `mask` is true."""
    return moments_of(input, _features(input), mask)


# What the layers are made of: one way to normalise with a batch's statistics, one with stored ones, one to store.


def moments_of(x: Tensor, features: Sequence[int], mask: Tensor | None, who: str = "batch_moments") -> Moments:
    """Return the moments of a batch, of shape `features`."""
    checks.batch_input(x, who, features, _ranks(x, features))
    mask = checks.position_mask(mask, x, who)
    return _per_channel(select.moments(x, _over(x, features), mask), features)


def normalize_batch(
    x: Tensor,
    features: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    activation: str | None,
    residual: Tensor | None,
    mask: Tensor | None,
    nonfinite: str,
    who: str = "batch_norm",
) -> tuple[Tensor, Moments]:
    """Return the normalised batch and its moments, of shape `features` and detached. Writes nothing."""
    mask = check_batch(x, features, weight, bias, residual, mask, who)
    recipe = Recipe(_over(x, features), eps, activation)
    checks.enough_values(reference.count_values(x, recipe.over, mask), x, who)
    y, kept = select.normalize(
        x,
        recipe,
        weight=_broadcast(weight, x, features),
        bias=_broadcast(bias, x, features),
        residual=residual,
        mask=mask,
    )
    batch = _per_channel(kept, features)
    if nonfinite == "raise":
        checks.finite(batch, who)
    return y, batch


def normalize_among(
    x: Tensor,
    earlier: Sequence[Moments],
    features: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    activation: str | None,
    residual: Tensor | None,
    mask: Tensor | None,
    nonfinite: str,
    who: str,
) -> tuple[Tensor, Moments, Moments]:
    """Normalise with the merged moments of this batch and earlier ones; return the output, its own and the merged.

    Gradients flow through the batch's own share of the statistics.
    """
    mask = check_batch(x, features, weight, bias, residual, mask, who)
    recipe = Recipe(_over(x, features), eps, activation)
    checks.enough_values(reference.count_values(x, recipe.over, mask), x, who)
    wide = x.to(reference.working_dtype(x))
    own = _per_channel(reference.moments(wide, recipe.over, mask), features)
    if nonfinite == "raise":
        checks.finite(own, who)
    merged = reduce(Moments.merge, earlier, own)
    kept = Moments(_view(merged.mean, x, features), _view(merged.var, x, features), merged.count)
    y = reference.normalize_with(
        wide, kept, _broadcast(weight, x, features), _broadcast(bias, x, features), residual, recipe
    )
    return y.to(x.dtype), own, merged


def normalize_synced(
    x: Tensor,
    features: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    activation: str | None,
    residual: Tensor | None,
    mask: Tensor | None,
    nonfinite: str,
    who: str,
    gather: Gather,
    reduce: Reduce,
) -> tuple[Tensor, Moments]:
    """As `normalize_batch`, of a batch spread over processes: `gather` and `reduce` speak to the others."""
    mask = check_batch(x, features, weight, bias, residual, mask, who)
    recipe = Recipe(_over(x, features), eps, activation)
    y, *kept = SyncedNormalize.apply(
        x, _broadcast(weight, x, features), _broadcast(bias, x, features), residual, mask, recipe, gather, reduce
    )
    batch = _per_channel(Moments(*kept), features)
    # After the exchange, so that all ranks refuse together and none is left waiting.
    checks.enough_values(batch.count, x, who)
    if nonfinite == "raise":
        checks.finite(batch, who)
    return y, batch


def normalize_stored(
    x: Tensor,
    stored: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    activation: str | None,
    residual: Tensor | None,
    mask: Tensor | None,
    who: str = "batch_norm",
) -> Tensor:
    """Return x normalised with stored statistics. A mask has nothing to say here, but its shape is checked."""
    features = stored.mean.shape
    check_batch(x, features, weight, bias, residual, mask, who)
    checks.one_per_channel(stored.var, "running_var", who, features)
    kept = Moments(_view(stored.mean, x, features), _view(stored.var, x, features), stored.count)
    return select.normalize_stored(
        x,
        Recipe(_over(x, features), eps, activation),
        kept,
        _broadcast(weight, x, features),
        _broadcast(bias, x, features),
        residual,
    )


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


def check_batch(
    x: Tensor,
    features: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    who: str,
) -> Tensor | None:
    """Check everything that comes with a batch; return the mask as it broadcasts against x."""
    checks.batch_input(x, who, features, _ranks(x, features))
    checks.one_per_channel(weight, "weight", who, features)
    checks.one_per_channel(bias, "bias", who, features)
    checks.same_shape(residual, x, who)
    return checks.position_mask(mask, x, who)


def _features(x: Tensor, *per_channel: Tensor | None) -> Sequence[int]:
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


def _broadcast(t: Tensor | None, x: Tensor, features: Sequence[int]) -> Tensor | None:
    return None if t is None else _view(t, x, features)


def _per_channel(kept: Moments, features: Sequence[int]) -> Moments:
    count = kept.count
    if isinstance(count, Tensor):
        count = count.expand(kept.mean.shape).reshape(features)
    return Moments(kept.mean.reshape(features), kept.var.reshape(features), count)
