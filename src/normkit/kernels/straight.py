"""A layer's call without options, straight to torch's operator: with a small tensor, Python takes most of the time.

None leaves a call, and any error in it, to the general way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from normkit.kernels.fused import finish

_has_cudnn: Callable[[], bool] = torch._C._get_cudnn_enabled  # torch.backends.cudnn.enabled, without its Python


def batch_norm_step_(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    momentum: float,
    ranks: Sequence[int],
    eps: float,
    activation: str | None,
) -> Tensor | None:
    """A batch norm's step of training."""
    shape = x.shape
    channels = shape[1] if len(shape) in ranks else 0
    # More than one value per channel; float32 statistics; and no bias alone, for the sake of second derivatives.
    if x.numel() <= channels or mean.dtype is not torch.float32 or (weight is None and bias is not None):
        return None
    if channels == 0 or mean.shape != (channels,):
        return None
    try:
        z = torch.batch_norm(x, weight, bias, mean, var, True, momentum, eps, _has_cudnn())
    except RuntimeError:
        return None
    count.add_(1)
    return z if activation is None else finish(z, None, activation)


def batch_norm_evaluated(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    ranks: Sequence[int],
    eps: float,
    activation: str | None,
) -> Tensor | None:
    """A batch norm's evaluation, without a gradient or with one."""
    if x.dim() not in ranks or mean.dtype is not torch.float32 or x.shape[1:2] != mean.shape:
        return None
    if (weight is None and bias is not None) or mean.requires_grad or var.requires_grad:
        return None
    try:
        z = torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, _has_cudnn())
    except RuntimeError:
        return None
    return z if activation is None else finish(z, None, activation)


def group_norm_call(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    channels: int,
    eps: float,
    activation: str | None,
) -> Tensor | None:
    """A group norm's call, or an instance norm's, whose groups are single channels."""
    shape = x.shape
    if len(shape) < 2 or shape[1] != channels or x.numel() <= shape[0] * groups or not _is_direct(x, weight, bias):
        return None
    if x.is_cpu and not x.requires_grad and not x.is_contiguous():  # see `fused`
        return None
    try:
        if groups == channels:
            z = torch.instance_norm(x, weight, bias, None, None, True, 0.0, eps, _has_cudnn())
        else:
            z = torch.group_norm(x, groups, weight, bias, eps, _has_cudnn())
    except RuntimeError:
        return None
    return z if activation is None else finish(z, None, activation)


def layer_norm_call(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized: tuple[int, ...],
    eps: float,
    activation: str | None,
) -> Tensor | None:
    """A layer norm's call; the operator checks sizes itself."""
    if not _is_direct(x, weight, bias):
        return None
    try:
        z = torch.layer_norm(x, normalized, weight, bias, eps, _has_cudnn())
    except RuntimeError:
        return None
    return z if activation is None else finish(z, None, activation)


def layer_norm_as_groups(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized: tuple[int, ...],
    eps: float,
    activation: str | None,
) -> Tensor | None:
    """The same, each line as an example that is one group: the parameters' gradients are summed one line after another.

    Of four dimensions the operator would take some for channels_last; and a backward of the parameters alone ends the
    process (torch 2.13).
    """
    if weight is None or bias is None or not (weight.shape == bias.shape == normalized == x.shape[-1:]):
        return None
    if x.dim() > 3 or x.numel() == 0 or not x.is_contiguous() or not _is_direct(x, weight, bias):
        return None
    if torch.is_grad_enabled() and not x.requires_grad:
        return None
    channels = normalized[0]
    try:
        z = torch.native_group_norm(x, weight, bias, x.numel() // channels, channels, 1, 1, eps)[0]
    except RuntimeError:
        return None
    return z if activation is None else finish(z, None, activation)


def layer_norm_of_examples(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized: tuple[int, ...],
    eps: float,
    activation: str | None,
) -> Tensor | None:
    """The same with a weight and a bias of each example."""
    shape = x.shape[0], *normalized
    if weight is None or bias is None or weight.shape != shape or bias.shape != shape or bias.dtype is not x.dtype:
        return None
    z = layer_norm_call(x, None, None, normalized, eps, None)
    if z is None or weight.dtype is not x.dtype:
        return None
    view = shape[0], *(1,) * (x.dim() - len(shape)), *normalized
    z = torch.addcmul(bias.reshape(view), z, weight.reshape(view))
    return z if activation is None else finish(z, None, activation)


def rms_norm_call(
    x: Tensor, weight: Tensor | None, normalized: tuple[int, ...], eps: float, activation: str | None
) -> Tensor | None:
    """A root mean square norm's call."""
    if not _is_direct(x, weight, None):
        return None
    try:
        z = torch.rms_norm(x, normalized, weight, eps)
    except RuntimeError:
        return None
    return z if activation is None else finish(z, None, activation)


def _is_direct(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the operators within an example take tensors as they are: of one type, no bias alone, no autocast."""
    dtype = x.dtype
    if dtype is not torch.float32 and (x.is_cpu or dtype is torch.float64):
        return False
    if weight is None:
        return bias is None and not torch._C._is_any_autocast_enabled()
    return weight.dtype is dtype and not torch._C._is_any_autocast_enabled()
