"""Statistics across examples."""

from __future__ import annotations

import torch
from torch import Tensor

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike, parted
from normkit.checks import NonFinite
from normkit.errors import ArgumentError
from normkit.functional import batch_core
from normkit.functional.batch_core import Terms
from normkit.moments import Moments


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
    activation: ActivationLike | None = None,
    negative_slope: float = LEAKY_SLOPE,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    nonfinite: NonFinite = "propagate",
) -> Tensor:
    """Normalize each channel over the batch and its positions (Ioffe & Szegedy 2015).

        activation((x - mean) / sqrt(var + eps) * weight + bias + residual)

    In training, mean and biased variance are the batch's, over the positions where `mask` is true, and the running
    statistics, where given, move towards its mean and unbiased variance in place. In evaluation they are the stored
    ones. Statistics of shape (C, H, W) normalize each position on its own.
    """
    checks.options(eps, momentum, activation, nonfinite)
    act = parted(activation, negative_slope)
    if (running_mean is None) != (running_var is None):
        raise ArgumentError("batch_norm needs both running_mean and running_var, or neither; got one of them.")
    stored = None if running_mean is None or running_var is None else Moments(running_mean, running_var, 0)
    features = batch_core.features_of(input, running_mean, weight, bias)
    terms = Terms(features, weight, bias, eps, act.fused, residual, mask, nonfinite)
    if not training:
        if stored is None:
            raise ArgumentError(
                "batch_norm needs running_mean and running_var in evaluation; got None. "
                "To normalize with the batch's own statistics, pass training=True."
            )
        return act.finish(batch_core.normalize_stored(input, stored, terms))
    checks.one_per_channel(running_var, "running_var", "batch_norm", terms.features)
    if stored is None:
        return act.finish(batch_core.normalize_batch(input, terms)[0])
    return act.finish(batch_core.normalize_and_store_(input, terms, stored, momentum))


def batch_norm_update(
    input: Tensor,
    moments: Moments,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: ActivationLike | None = None,
    negative_slope: float = LEAKY_SLOPE,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    nonfinite: NonFinite = "propagate",
) -> tuple[Tensor, Moments]:
    """Normalize with the batch's statistics, and return the output and the new stored statistics.

    The pure form of `batch_norm` in training, for `torch.func`: nothing is written in place. `moments` are a layer's
    buffers, Moments(running_mean, running_var, num_batches_tracked); momentum None averages over all batches so far.
    """
    checks.options(eps, momentum, activation, nonfinite)
    act = parted(activation, negative_slope)
    features = moments.mean.shape
    checks.one_per_channel(moments.var, "moments.var", "batch_norm_update", features)
    terms = Terms(features, weight, bias, eps, act.fused, residual, mask, nonfinite, who="batch_norm_update")
    y, batch = batch_core.normalize_batch(input, terms)
    stored = moments._replace(count=torch.as_tensor(moments.count, device=moments.mean.device))
    new = batch_core.next_stored(stored, batch, batch_core.average_factor(stored, momentum), nonfinite)
    return act.finish(y), new


def batch_moments(input: Tensor, mask: Tensor | None = None) -> Moments:
    """Mean, biased variance and count of each channel of one batch, over the positions where `mask` is true."""
    return batch_core.moments_of(input, batch_core.features_of(input), mask)
