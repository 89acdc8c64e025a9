"""Layer and RMS norms as the models of other libraries write them, and modules that only look like one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Weighted(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps


class Llama(Weighted):
    """In float32, and multiplied by its weight in the type of the input."""

    def forward(self, hidden):
        return self.weight * rms(hidden.float(), self.variance_epsilon).to(hidden.dtype)


class T5(Weighted):
    """Only the mean square is in float32."""

    def forward(self, hidden):
        squares = hidden.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(squares + self.variance_epsilon))


class Gemma(nn.Module):
    """Its weight is what gamma has more than one."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return (rms(x.float(), self.eps) * (1.0 + self.weight.float())).type_as(x)


class Gated(Weighted):
    """A norm, unless it is called with a gate."""

    def forward(self, hidden, gate=None):
        hidden = hidden if gate is None else hidden * F.silu(gate)
        return self.weight * rms(hidden, self.variance_epsilon)


class Weightless(nn.Module):
    """Of any size."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return rms(x, self.eps)


class Olmo(nn.Module):
    """Without parameters, of one size, and with an eps that it does not keep."""

    def __init__(self, size):
        super().__init__()
        self.normalized_shape = (size,)

    def forward(self, x):
        return F.layer_norm(x.float(), self.normalized_shape, eps=2e-4).to(x.dtype)


class Unsaid(nn.Module):
    """Its eps is torch's choice."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight)


class Lengths(nn.Module):
    """Without an eps, and with a weight of another name."""

    def __init__(self, size):
        super().__init__()
        self.g = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.normalize(x, dim=-1) * len(self.g) ** 0.5 * self.g


class Deberta(Weighted):
    def __init__(self, size, eps=1e-7):
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden):
        wide = hidden.float()
        centered = wide - wide.mean(-1, keepdim=True)
        out = centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * out.to(hidden.dtype) + self.bias


class FixedBeta(nn.Module):
    """A beta that does not learn is a buffer."""

    def __init__(self, size):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))
        self.register_buffer("beta", torch.zeros(size))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.gamma, self.beta, 1e-5)


class Cohere(Weighted):
    def forward(self, hidden):
        return F.layer_norm(hidden.float(), hidden.shape[-1:], None, None, self.variance_epsilon).to(
            hidden.dtype
        ) * self.weight.to(hidden.dtype)


class OnePlus(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)


class Float32Only(nn.LayerNorm):
    """It casts its input, and its parameters not."""

    def forward(self, x):
        return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps).to(x.dtype)


class Permuted(nn.LayerNorm):
    """Of maps, as torchvision, timm and ConvNeXt write it."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class EitherFormat(nn.LayerNorm):
    def __init__(self, size, data_format, **options):
        super().__init__(size, **options)
        self.data_format = data_format

    def forward(self, x):
        if self.data_format == "channels_last":
            return super().forward(x)
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Maps(nn.Module):
    """Of maps, as SAM and ViTDet write it."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x):
        centered = x - x.mean(1, keepdim=True)
        normalized = centered / torch.sqrt(centered.pow(2).mean(1, keepdim=True) + self.eps)
        return self.weight[:, None, None] * normalized + self.bias[:, None, None]


class Sequences(nn.LayerNorm):
    """Of (N, C, L)."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 1)).permute(0, 2, 1)


class WithActivation(Weighted):
    """A norm, dropout that does nothing and an activation, as timm's norm-act classes."""

    def __init__(self, size, act):
        super().__init__(size)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x):
        return self.act(self.drop(self.weight * rms(x, self.variance_epsilon)))


@dataclass(frozen=True)
class LookAlike:
    """A norm of `size` channels, the shape of an input, and what `describe` says besides the usual."""

    build: Callable[[int], nn.Module]
    shape: tuple[int, ...]
    says: dict[str, Any] = field(default_factory=dict)


SIZE = 7
_LAST, _MAPS = (2, 5, SIZE), (2, SIZE, 3, 4)
_RMS = {"kind": "rms", "affine": "scale"}
_LAYER = {"kind": "layer", "affine": True}
_FIRST = {"channels_first": True, "normalized_shape": None, "num_features": SIZE}

LOOK_ALIKES = {
    "llama": LookAlike(lambda size: Llama(size, 3e-6), _LAST, {**_RMS, "eps": 3e-6}),
    "t5": LookAlike(lambda size: T5(size, 1e-3), _LAST, {**_RMS, "eps": 1e-3}),
    "gemma": LookAlike(lambda size: Gemma(size, 1e-8), _LAST, {**_RMS, "eps": 1e-8, "weight_offset": 1.0}),
    "gated": LookAlike(lambda size: Gated(size, 1e-5), _LAST, {**_RMS, "eps": 1e-5}),
    "weightless": LookAlike(
        lambda size: Weightless(1e-4), _LAST, {**_RMS, "affine": False, "eps": 1e-4, "normalized_shape": None}
    ),
    "olmo": LookAlike(Olmo, _LAST, {**_LAYER, "affine": False, "eps": 2e-4}),
    "unsaid": LookAlike(Unsaid, _LAST, {**_RMS, "eps": None}),
    "lengths": LookAlike(Lengths, _LAST, {**_RMS, "eps": 0.0, "names": ("g", "bias")}),
    "deberta": LookAlike(lambda size: Deberta(size, 1e-12), _LAST, {**_LAYER, "eps": 1e-12}),
    "fixed beta": LookAlike(FixedBeta, _LAST, {**_LAYER, "eps": 1e-5, "names": ("gamma", "beta")}),
    "cohere": LookAlike(lambda size: Cohere(size, 1e-2), _LAST, {**_LAYER, "affine": "scale", "eps": 1e-2}),
    "one plus": LookAlike(lambda size: OnePlus(size, 1e-6), _LAST, {**_LAYER, "eps": 1e-6, "weight_offset": 1.0}),
    "float32 only": LookAlike(lambda size: Float32Only(size, 1e-6), _LAST, {**_LAYER, "eps": 1e-6}),
    "permuted": LookAlike(lambda size: Permuted(size, 1e-6), _MAPS, {**_LAYER, **_FIRST, "eps": 1e-6}),
    "permuted, bare": LookAlike(
        lambda size: Permuted(size, 1e-6, elementwise_affine=False),
        _MAPS,
        {**_LAYER, **_FIRST, "affine": False, "eps": 1e-6},
    ),
    "channels first": LookAlike(
        lambda size: EitherFormat(size, "channels_first", bias=False),
        _MAPS,
        {**_LAYER, **_FIRST, "affine": "scale", "eps": 1e-5},
    ),
    "channels last": LookAlike(
        lambda size: EitherFormat(size, "channels_last"), (2, 3, 4, SIZE), {**_LAYER, "eps": 1e-5}
    ),
    "maps": LookAlike(lambda size: Maps(size, 1e-6), _MAPS, {**_LAYER, **_FIRST, "eps": 1e-6}),
    "sequences": LookAlike(lambda size: Sequences(size), (2, SIZE, 5), {**_LAYER, **_FIRST, "eps": 1e-5}),
    "with activation": LookAlike(
        lambda size: WithActivation(size, nn.SiLU()), _LAST, {**_RMS, "eps": 1e-6, "activation": "silu"}
    ),
    "with another": LookAlike(
        lambda size: WithActivation(size, nn.Softshrink()), _LAST, {**_RMS, "eps": 1e-6, "activation": "Softshrink"}
    ),
}


class OfFunction(Weighted):
    """A function of the weight and the input, which no name gives away."""

    def __init__(self, size, function):
        super().__init__(size)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def _noisy(norm, x):
    return F.dropout(norm.weight * rms(x, 1e-6), 0.5, norm.training)


def _over_all(norm, x):
    return norm.weight * x * torch.rsqrt(x.flatten(1).pow(2).mean(1).add(1e-6)).reshape(-1, *[1] * (x.dim() - 1))


# Functions of which each differs from a norm in one thing.
OTHERS = {
    "eps outside the root": lambda norm, x: norm.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3),
    "clamped": lambda norm, x: norm.weight * x * x.pow(2).mean(-1, keepdim=True).clamp(min=1e-3).rsqrt(),
    "unbiased": lambda norm, x: norm.weight * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt(),
    "uncentered deviation": lambda norm, x: norm.weight * x / (x.var(-1, keepdim=True, correction=0) + 1e-6).sqrt(),
    "mean of magnitudes": lambda norm, x: norm.weight * x / (x.abs().mean(-1, keepdim=True) + 1e-6),
    "weighted before": lambda norm, x: rms(norm.weight * x, 1e-6),
    "magnitude of the weight": lambda norm, x: norm.weight.abs() * rms(x, 1e-6),
    "two plus the weight": lambda norm, x: (2 + norm.weight) * rms(x, 1e-6),
    "half of it": lambda norm, x: 0.5 * norm.weight * rms(x, 1e-6),
    "relu inside": lambda norm, x: F.relu(norm.weight * rms(x, 1e-6)),
    "residual inside": lambda norm, x: x + norm.weight * rms(x, 1e-6),
    "dropout inside": _noisy,
    "over all dimensions": _over_all,
    "over the examples": lambda norm, x: norm.weight * x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6),
    "only a scale": lambda norm, x: norm.weight * x,
    "softmax": lambda norm, x: norm.weight * x.softmax(-1),
    "a tuple": lambda norm, x: (norm.weight * rms(x, 1e-6), x),
    "a number": lambda norm, x: rms(x, 1e-6).mean(),
    "raises": lambda norm, x: x.no_such_method(),
}
