"""Weight normalization, with the paper's data-dependent initialization (Salimans & Kingma 2016)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrizations, parametrize

from normkit import checks
from normkit.errors import ArgumentError, NonFiniteError, ShapeError
from normkit.kernels.reference import moments, working_dtype
from normkit.layers.scaled_std_conv import ScaledStdConv2d
from normkit.moments import Moments


def weight_norm(
    module: nn.Module, name: str = "weight", dim: int | None = 0, *, data: Tensor | None = None
) -> nn.Module:
    """Split a weight into length and direction, w = g * v / ||v||: torch's parametrization, with torch's keys.

    Args:
        module: what holds the weight. It is changed in place, or not at all where an error is raised.
        name: of the weight.
        dim: the dimension that keeps its own lengths; None for one length in all, as in torch.
        data: a batch of inputs for the module, a linear layer or a convolution. Lengths and bias then start so that
            the outputs on this batch have zero mean and unit variance per output channel: with t the outputs for
            w = v / ||v|| and no bias, g = 1 / std(t) and bias = -mean(t) / std(t).

    Returns:
        The module.
    """
    weight = _weight(module, name)
    lengths = torch.norm_except_dim(weight.detach(), 2, -1 if dim is None else dim)
    if not lengths.is_meta and not lengths.all():
        empty = (lengths == 0).flatten().nonzero().flatten().tolist()
        raise ArgumentError(
            f"weight_norm needs weights with a direction; {name} is all zero at {empty[:8]} of dimension {dim}, and "
            "0 / 0 is NaN. Initialize it first, or normalize before zeroing and set g to zero instead."
        )
    if data is None:
        parametrizations.weight_norm(module, name, cast(int, dim))
        return module
    _check_module(module, name)
    _check_data(module, data)
    direction = _direction(weight, dim)
    m = _unit_moments(module, _outputs(module, direction, data), data)
    inverse_std = m.var.rsqrt()
    parametrizations.weight_norm(module, name, cast(int, dim))
    _write_(module, direction, -m.mean * inverse_std, inverse_std, dim)
    return module


def _weight(module: nn.Module, name: str) -> Tensor:
    if parametrize.is_parametrized(module, name):
        raise ArgumentError(
            f"weight_norm needs a plain {name}; that of this {type(module).__name__} is parametrized already. Take it "
            f'off first: torch.nn.utils.parametrize.remove_parametrizations(module, "{name}").'
        )
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        raise ArgumentError(f"weight_norm needs a tensor {name!r} in {type(module).__name__}; got {weight!r}.")
    return weight


def _check_module(module: nn.Module, name: str) -> None:
    kind = type(module).__name__
    if not isinstance(module, nn.Linear | _ConvNd) or isinstance(module, ScaledStdConv2d) or name != "weight":
        raise ArgumentError(
            f'weight_norm with data needs the "weight" of a linear layer or a convolution, whose outputs scale with '
            f"it; got {name!r} of {kind}. Leave data out."
        )
    if module._parameters.get("bias") is None:
        raise ArgumentError(
            f"weight_norm with data needs a bias to centre the outputs with; this {kind} has none. "
            "Build it with bias=True, or leave data out."
        )


def _check_data(module: nn.Module, data: Tensor) -> None:
    checks.floating(data, "weight_norm")
    if isinstance(module, _ConvNd):
        rank, channels = len(module.kernel_size) + 2, module.in_channels
        needed = f"(N, {channels}, {', '.join('DHW'[-rank + 2 :] if rank > 3 else 'L')})"
        good = data.dim() == rank and data.shape[1] == channels
    else:
        features = cast(nn.Linear, module).in_features
        needed = f"(N, {features}) or (N, ..., {features})"
        good = data.dim() >= 2 and data.shape[-1] == features
    if not good:
        raise ShapeError(
            f"weight_norm needs data of shape {needed}, a batch of inputs of this {type(module).__name__}; "
            f"got {tuple(data.shape)}."
        )


@torch.no_grad()
def _direction(weight: Tensor, dim: int | None) -> Tensor:
    wide = weight.to(working_dtype(weight))
    return wide / torch.norm_except_dim(wide, 2, -1 if dim is None else dim)


@torch.no_grad()
def _outputs(module: nn.Module, direction: Tensor, data: Tensor) -> Tensor:
    """The outputs for w = v / ||v|| and no bias, wide enough that only the rounding of g and bias shows later."""
    wide = working_dtype(data)
    state = {"weight": direction.to(wide), "bias": torch.zeros_like(cast(Tensor, module.bias), dtype=wide)}
    with torch.autocast(data.device.type, enabled=False):
        return cast(Tensor, functional_call(module, state, (data.detach().to(wide),)))


def _unit_moments(module: nn.Module, t: Tensor, data: Tensor) -> Moments:
    """Mean and variance of every output channel, refused where they cannot be divided by."""
    units = 1 if isinstance(module, _ConvNd) else t.dim() - 1
    m = moments(t, tuple(d for d in range(t.dim()) if d != units))
    mean, var = m.mean.flatten(), m.var.flatten()
    if t.numel() <= mean.numel():
        raise ShapeError(
            f"weight_norm needs data that gives more than 1 value per output channel; got {tuple(data.shape)}. "
            "Use a larger batch."
        )
    if not (mean.isfinite() & var.isfinite()).all():
        raise NonFiniteError("weight_norm needs finite data; the outputs on this batch hold NaN or infinity.")
    # The rounding of a sum of fan-in products; a spread below it is no spread.
    fan_in = cast(Tensor, module.weight)[0].numel()
    noise = 4 * torch.finfo(t.dtype).eps * fan_in**0.5 * data.abs().max()
    constant = (var.sqrt() <= noise).nonzero().flatten().tolist()
    if constant:
        raise ArgumentError(
            f"weight_norm needs outputs that vary over the data; output channels {constant[:8]}"
            f"{'...' if len(constant) > 8 else ''} are constant on it, and 1 / 0 is no length. "
            "Use a batch of different examples."
        )
    return Moments(mean, var, m.count)


@torch.no_grad()
def _write_(module: nn.Module, direction: Tensor, bias: Tensor, scale: Tensor, dim: int | None) -> None:
    """Set g = scale and the bias; v stays as it is wherever g has one value per output channel.

    It has not in a transposed convolution with torch's dim=0, or with groups, or with dim=None: there v takes the
    scales in, and g is its length.
    """
    transposed, groups = isinstance(module, _ConvTransposeNd), getattr(module, "groups", 1)
    held = cast(nn.Module, module.parametrizations)["weight"]  # type: ignore[index]
    g, v = held.original0, held.original1
    cast(Tensor, module.bias).copy_(bias)
    per_unit = dim is not None and dim % v.dim() == int(transposed) and (groups == 1 or not transposed) and dim != -1
    if per_unit:
        g.copy_(scale.view(g.shape))
        return
    grouped = direction.unflatten(0, (groups, -1))  # (groups, in or out, ...)
    units = scale.view(groups, 1, -1) if transposed else scale.view(groups, -1, 1)
    w = (grouped * units.view(*units.shape, *[1] * (grouped.dim() - 3))).flatten(0, 1)
    v.copy_(w)
    g.copy_(torch.norm_except_dim(w, 2, -1 if dim is None else dim))
