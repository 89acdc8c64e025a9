"""The papers' formulas in numpy's longest float: slow, obvious, and sharing no line with the package."""

from __future__ import annotations

from math import erf

import numpy as np

LONG = np.longdouble


def wide(t):
    """A tensor's values; bfloat16 and float16 go through float64, which holds them exactly."""
    return t.detach().double().numpy().astype(LONG)


def exp(z):
    with np.errstate(over="ignore"):  # infinity is what the sigmoid's denominator should be there
        return np.exp(z)


def activate(z, name):
    if name is None:
        return z
    return {
        "relu": lambda: np.where(z > 0, z, 0),
        "leaky_relu": lambda: np.where(z > 0, z, LONG("0.01") * z),
        "silu": lambda: z / (1 + exp(-z)),
        "gelu": lambda: z * (1 + np.vectorize(erf)(z.astype(float) / np.sqrt(2.0))) / 2,
        "sigmoid": lambda: 1 / (1 + exp(-z)),
        "tanh": lambda: np.tanh(z),
    }[name]()


def affine(layer, xhat, shape):
    """Gamma and beta, where the layer has them, seen as `shape`."""
    if getattr(layer, "weight", None) is not None:
        xhat = xhat * wide(layer.weight).reshape(shape)
    if getattr(layer, "bias", None) is not None:
        xhat = xhat + wide(layer.bias).reshape(shape)
    return xhat
