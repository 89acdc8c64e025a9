"""Statistics within an example."""

import numpy as np

from support.formulas import LONG, activate, affine, wide


def layer_norm(layer, x):
    """Equation 3 of Ba, Kiros & Hinton: mean and deviation over the features of one example."""
    x = wide(x)
    over = tuple(range(-len(layer.normalized_shape), 0))
    xhat = (x - x.mean(over, keepdims=True)) / np.sqrt(x.var(over, keepdims=True) + LONG(layer.eps))
    return activate(affine(layer, xhat, layer.normalized_shape), layer.activation)


def rms_norm(layer, x):
    """Equation 4 of Zhang & Sennrich: no mean is taken away, and there is no beta."""
    eps = LONG(layer.eps)
    x = wide(x)
    over = tuple(range(-len(layer.normalized_shape), 0))
    xhat = x / np.sqrt((x * x).mean(over, keepdims=True) + eps)
    return activate(affine(layer, xhat, layer.normalized_shape), layer.activation)


def scale_norm(layer, x):
    """Equation 5 of Nguyen & Salazar, g x / |x|; eps is added to the mean square, so dim * eps to the square."""
    x = wide(x)
    length = np.sqrt((x * x).sum(-1, keepdims=True) + x.shape[-1] * LONG(layer.eps))
    return activate(wide(layer.weight) * x / length, layer.activation)


def layer_norm_of_maps(layer, x):
    """Equation 3 of Ba, Kiros & Hinton, the features being the channels at one position of (N, C, H, W)."""
    x = wide(x)
    xhat = np.empty_like(x)
    for n, h, w in np.ndindex(x.shape[0], *x.shape[2:]):
        values = x[n, :, h, w]
        xhat[n, :, h, w] = (values - values.mean()) / np.sqrt(values.var() + LONG(layer.eps))
    return activate(affine(layer, xhat, per_channel(x)), layer.activation)


def rms_norm_of_maps(layer, x):
    """Equation 4 of Zhang & Sennrich, likewise."""
    x = wide(x)
    xhat = np.empty_like(x)
    for n, h, w in np.ndindex(x.shape[0], *x.shape[2:]):
        values = x[n, :, h, w]
        xhat[n, :, h, w] = values / np.sqrt((values * values).mean() + LONG(layer.eps))
    return activate(affine(layer, xhat, per_channel(x)), layer.activation)


def group_norm(layer, x):
    """Section 3.1 of Wu & He, one example and one group of channels at a time."""
    x = wide(x)
    size = x.shape[1] // layer.num_groups
    xhat = np.empty_like(x)
    for n in range(x.shape[0]):
        for first in range(0, x.shape[1], size):
            values = x[n, first : first + size]
            xhat[n, first : first + size] = (values - values.mean()) / np.sqrt(values.var() + LONG(layer.eps))
    return activate(affine(layer, xhat, per_channel(x)), layer.activation)


def instance_norm(layer, x):
    """Equation 4 of Ulyanov et al.; where statistics are tracked, evaluation uses the stored ones."""
    x = wide(x)
    over = tuple(range(2, x.ndim))
    if layer.training or not layer.track_running_stats:
        mean, var = x.mean(over, keepdims=True), x.var(over, keepdims=True)
    else:
        mean, var = (wide(t).reshape(per_channel(x)) for t in (layer.running_mean, layer.running_var))
    xhat = (x - mean) / np.sqrt(var + LONG(layer.eps))
    return activate(affine(layer, xhat, per_channel(x)), layer.activation)


def filter_response_norm(layer, x):
    """Equations 1 to 4 of Singh & Krishnan: FRN, and the thresholded linear unit where the layer has a tau."""
    x = wide(x)
    nu2 = (x * x).mean((2, 3), keepdims=True)
    eps = LONG(layer.eps) if isinstance(layer.eps, float) else wide(layer.eps).reshape(per_channel(x))
    y = affine(layer, x / np.sqrt(nu2 + np.abs(eps)), per_channel(x))
    return y if layer.tau is None else np.maximum(y, wide(layer.tau).reshape(per_channel(x)))


def local_response_norm(layer, x):
    """Section 3.3 of Krizhevsky et al., with torch's alpha, which is divided by the size of the neighbourhood."""
    x = wide(x)
    y = np.empty_like(x)
    for c in range(x.shape[1]):
        first = c - layer.size // 2
        near = x[:, max(0, first) : first + layer.size]
        y[:, c] = x[:, c] / (layer.k + LONG(layer.alpha) / layer.size * (near * near).sum(1)) ** LONG(layer.beta)
    return y


def per_channel(x):
    return (1, x.shape[1], *[1] * (x.ndim - 2))
