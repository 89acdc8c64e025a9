"""Statistics across examples."""

import numpy as np

from formulas import LONG, activate, affine, wide


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
