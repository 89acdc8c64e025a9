"""Normalization of weights."""

import numpy as np

from support.formulas import LONG, wide


def scaled_std_conv(activation_gain=1):
    """Every output channel's kernel with mean zero and length one, times the gains; then a plain convolution."""

    def run(layer, x):
        w = wide(layer.weight)
        fan_in = w[0].size
        mean, var = w.mean((1, 2, 3), keepdims=True), w.var((1, 2, 3), keepdims=True)
        w = LONG(activation_gain) * wide(layer.gain) * (w - mean) / np.sqrt(np.maximum(var * fan_in, LONG(layer.eps)))
        y = convolve(wide(x), w, layer.padding, layer.stride, layer.groups)
        return y if layer.bias is None else y + wide(layer.bias).reshape(1, -1, 1, 1)

    return run


def convolve(x, w, padding, stride, groups):
    """Cross-correlation, one kernel position and one group of channels at a time."""
    x = np.pad(x, [(0, 0), (0, 0), *[(p, p) for p in padding]])
    (height, width), (dy, dx) = w.shape[2:], stride
    rows, columns = (x.shape[2] - height) // dy + 1, (x.shape[3] - width) // dx + 1
    inputs, outputs = np.split(x, groups, 1), np.split(w, groups, 0)
    found = []
    for part, kernels in zip(inputs, outputs, strict=True):
        y = np.zeros((x.shape[0], len(kernels), rows, columns), LONG)
        for i in range(height):
            for j in range(width):
                seen = part[:, :, i : i + rows * dy : dy, j : j + columns * dx : dx]
                y = y + (seen[:, None] * kernels[None, :, :, i, j, None, None]).sum(2)
        found.append(y)
    return np.concatenate(found, 1)


def skip_init(layer, x):
    return wide(layer.alpha) * wide(x)
