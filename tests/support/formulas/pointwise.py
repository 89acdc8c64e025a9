"""Functions of single values in the place of norms."""

from math import erf

import numpy as np

from support.formulas import activate, affine, wide


def shape_of(layer, x):
    """How gamma and beta broadcast: against the last dimensions, or against the channels of (N, C, ...)."""
    return layer.weight.shape if layer.channels_last else (1, x.shape[1], *[1] * (x.ndim - 2))


def dynamic_tanh(layer, x):
    """Equation 1 of Zhu et al.: gamma * tanh(alpha * x) + beta."""
    x = wide(x)
    return activate(affine(layer, np.tanh(wide(layer.alpha) * x), shape_of(layer, x)), layer.activation)


def derf(layer, x):
    """Section 5 of Chen et al.: gamma * erf(alpha * x + s) + beta."""
    x = wide(x)
    bent = np.vectorize(erf)((wide(layer.alpha) * x + wide(layer.shift)).astype(float))
    return activate(affine(layer, bent, shape_of(layer, x)), layer.activation)
