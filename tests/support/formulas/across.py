"""Statistics across examples."""

from types import SimpleNamespace

import numpy as np
import torch

from support.formulas import LONG, activate, affine, wide


def batch_norm(layer, x):
    """Algorithm 1 in training, its stored statistics in evaluation; per channel, or per channel and position."""
    x = wide(x)
    per_position = hasattr(layer, "height")
    over = (0,) if per_position else (0, *range(2, x.ndim))
    shape = (1, *x.shape[1:]) if per_position else (1, x.shape[1], *[1] * (x.ndim - 2))
    if layer.training or layer.running_mean is None:
        mean, var = x.mean(over, keepdims=True), x.var(over, keepdims=True)
    else:
        mean, var = wide(layer.running_mean).reshape(shape), wide(layer.running_var).reshape(shape)
    xhat = (x - mean) / np.sqrt(var + LONG(layer.eps))
    return activate(affine(layer, xhat, shape), layer.activation)


def frozen_batch_norm(layer, x):
    """Algorithm 2's affine map, in training too."""
    x = wide(x)
    shape = (1, x.shape[1], *[1] * (x.ndim - 2))
    mean, var = wide(layer.running_mean).reshape(shape), wide(layer.running_var).reshape(shape)
    xhat = (x - mean) / np.sqrt(var + LONG(layer.eps))
    return activate(affine(layer, xhat, shape), layer.activation)


def domain_batch_norm(layer, x):
    """Algorithm 1 in training; the domain's own stored statistics in evaluation."""
    x, k = wide(x), layer.domain
    over, shape = (0, *range(2, x.ndim)), (1, x.shape[1], *[1] * (x.ndim - 2))
    if layer.training:
        mean, var = x.mean(over, keepdims=True), x.var(over, keepdims=True)
    else:
        mean, var = wide(layer.running_mean[k]).reshape(shape), wide(layer.running_var[k]).reshape(shape)
    own = SimpleNamespace(weight=layer.weight, bias=layer.bias)
    if layer.affine_per_domain:
        own = SimpleNamespace(**{name: None if t is None else t[k] for name, t in vars(own).items()})
    return activate(affine(own, (x - mean) / np.sqrt(var + LONG(layer.eps)), shape), layer.activation)


def ghost_batch_norm(layer, x):
    """Algorithm 1 on every chunk by itself."""
    if not layer.training:
        return batch_norm(layer, x)
    return np.concatenate([batch_norm(layer, chunk) for chunk in x.split(layer.chunk_size)])


def odd_ones_first(x):
    """An order to shuffle a batch in, the same at every call."""
    return torch.cat([torch.arange(1, x.shape[0], 2), torch.arange(0, x.shape[0], 2)]).to(x.device)


def shuffled_batch_norm(layer, x):
    """Algorithm 1 on chunks of the batch in another order, each value back in its place."""
    if not layer.training:
        return batch_norm(layer, x)
    order = odd_ones_first(x).numpy()
    y = np.empty(tuple(x.shape), dtype=LONG)
    y[order] = ghost_batch_norm(layer, x[order])
    return y


def split_batch_norm(layer, x):
    """Xie et al. 2020, section 4.2: in training every part of a batch by a norm of its own, else all by the first."""
    if not layer.training:
        return batch_norm(layer, x)
    norms = [layer, *layer.aux_bn]
    parts = x.split(x.shape[0] // len(norms))
    return np.concatenate([batch_norm(norm, part) for norm, part in zip(norms, parts, strict=True)])


def batch_renorm(layer, x):
    """Ioffe 2017, algorithm 1: corrected towards the running statistics as they were before the batch."""
    if not layer.training:
        return batch_norm(layer, x)
    x = wide(x)
    over, shape = (0, *range(2, x.ndim)), (1, x.shape[1], *[1] * (x.ndim - 2))
    mean, std = x.mean(over, keepdims=True), np.sqrt(x.var(over, keepdims=True) + LONG(layer.eps))
    running_mean = wide(layer.running_mean).reshape(shape)
    running_std = np.sqrt(wide(layer.running_var).reshape(shape) + LONG(layer.eps))
    r_max, d_max = layer.schedule(int(layer.num_batches_tracked)) if layer.schedule else (layer.r_max, layer.d_max)
    if layer.num_batches_tracked < layer.warmup_steps:
        r_max, d_max = 1.0, 0.0
    r = np.clip(std / running_std, 1 / LONG(r_max), r_max)
    d = np.clip((mean - running_mean) / running_std, -d_max, d_max)
    return activate(affine(layer, (x - mean) / std * r + d, shape), layer.activation)
