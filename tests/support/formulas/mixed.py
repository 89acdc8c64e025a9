"""Layers whose arithmetic is their own: whitening, EvoNorm, switchable and moving-average norms."""

from itertools import combinations

import numpy as np

from support.formulas import LONG, activate, affine, exp, wide


def inverse_root(sigma):
    """sigma^(-1/2) by Jacobi's rotations, in the longest float: numpy's own eigenvectors are float64."""
    a, vectors = sigma.astype(LONG), np.eye(len(sigma), dtype=LONG)
    for _ in range(12):  # sweeps; each squares the error
        for i, j in combinations(range(len(a)), 2):
            angle = np.arctan2(2 * a[i, j], a[j, j] - a[i, i]) / 2
            turn = np.eye(len(a), dtype=LONG)
            turn[i, i] = turn[j, j] = np.cos(angle)
            turn[i, j], turn[j, i] = np.sin(angle), -np.sin(angle)
            a, vectors = turn.T @ a @ turn, vectors @ turn
    return (vectors / np.sqrt(np.diag(a))) @ vectors.T


def iterated(sigma, iterations):
    trace = np.trace(sigma)
    p = np.eye(len(sigma), dtype=LONG)
    for _ in range(iterations):
        p = (3 * p - p @ p @ p @ (sigma / trace)) / 2
    return p / np.sqrt(trace)


def whitened(layer, x):
    """Decorrelated BN (zca) or IterNorm (newton), one group of channels after the other."""
    x = wide(x)
    rows = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)  # channels x values
    size, out = layer.group_size, np.empty_like(rows)
    for g in range(len(rows) // size):
        part = slice(g * size, (g + 1) * size)
        if layer.training or layer.running_mean is None:
            centred = rows[part] - rows[part].mean(1, keepdims=True)
            sigma = centred @ centred.T / centred.shape[1] + LONG(layer.eps) * np.eye(size, dtype=LONG)
            w = inverse_root(sigma) if layer.method == "zca" else iterated(sigma, layer.iterations)
        else:
            centred = rows[part] - wide(layer.running_mean)[part, None]
            w = wide(layer.running_whitener)[g]
        out[part] = w @ centred
    xhat = np.moveaxis(out.reshape(x.shape[1], x.shape[0], *x.shape[2:]), 0, 1)
    return activate(affine(layer, xhat, (1, -1, *[1] * (x.ndim - 2))), layer.activation)


def evo_b0(layer, x):
    x = wide(x)
    stored = wide(layer.running_var).reshape(1, -1, 1, 1)
    var = x.var((0, 2, 3), keepdims=True) if layer.training else stored
    eps, v = LONG(layer.eps), wide(layer.v).reshape(1, -1, 1, 1)
    below = np.maximum(np.sqrt(var + eps), v * x + np.sqrt(x.var((2, 3), keepdims=True) + eps))
    return affine(layer, x / below, (1, -1, 1, 1))


def evo_s0(layer, x):
    x = wide(x)
    groups = x.reshape(x.shape[0], layer.groups, -1)
    std = np.sqrt(groups.var(2, keepdims=True) + LONG(layer.eps))
    v = wide(layer.v).reshape(1, -1, 1, 1)
    bent = x / (1 + exp(-v * x))
    return affine(layer, (bent.reshape(groups.shape) / std).reshape(x.shape), (1, -1, 1, 1))


def switchable(layer, x):
    x = wide(x)
    over = [(2, 3), (1, 2, 3), (0, 2, 3)]  # instance, layer, batch
    means, variances = ([f(x, o, keepdims=True) for o in over] for f in (np.mean, np.var))
    if not layer.training and layer.running_mean is not None:
        means[2], variances[2] = (wide(t).reshape(1, -1, 1, 1) for t in (layer.running_mean, layer.running_var))

    def mixed(weight, statistics):
        shares = np.exp(wide(weight) - wide(weight).max())
        return sum(share * s for share, s in zip(shares / shares.sum(), statistics, strict=True))

    mean, var = mixed(layer.mean_weight, means), mixed(layer.var_weight, variances)
    xhat = (x - mean) / np.sqrt(var + LONG(layer.eps))
    return activate(affine(layer, xhat, (1, -1, 1, 1)), layer.activation)


def moving_statistics(layer, x):
    """Variance and ratio of the next batch, per channel."""
    square, eps = np.square(wide(x)).mean((0, 2, 3)), LONG(layer.eps)
    if layer.running_var is None:
        return square, np.ones_like(square)
    seen, size = int(layer.num_batches_tracked), layer.buffer_size
    ring = wide(layer.recent_var)
    ring[seen % size] = square
    var = square if seen < max(size, layer.warmup) else ring.mean(0)
    ratio = np.clip(np.sqrt((var + eps) / (wide(layer.running_var) + eps)), LONG(1) / 5, 5)
    return var, ratio if seen >= max(1000, layer.warmup) else np.ones_like(var)


def moving(layer, x):
    if layer.training or layer.running_var is None:
        var, ratio = moving_statistics(layer, x)
    else:
        var, ratio = wide(layer.running_var), LONG(1)
    scale = (ratio / np.sqrt(var + LONG(layer.eps))).reshape(1, -1, 1, 1)
    return activate(affine(layer, wide(x) * scale, (1, -1, 1, 1)), layer.activation)
