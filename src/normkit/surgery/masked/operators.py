"""Operators of torch that read more than one position: how they change lengths, and what they see beyond the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from normkit.surgery.masked.extent import Step

Kind = Literal["convolution", "max", "average", "whole max", "whole average", "copy", "pad", "other"]
Options = Mapping[str, Any]


class Operator(NamedTuple):
    """How to read the calls of an operator.

    Attributes:
        kind: what it computes of its window.
        names: its arguments, in their order.
        step: (options, which of the positions' dimensions) -> how that length changes; None if that of a shorter
            example does not follow from the call.
    """

    kind: Kind
    names: Sequence[str]
    step: Callable[[Options, int], Step | None]


def bound(names: Sequence[str], args: Sequence[Any], kwargs: Options) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def same(length: int) -> int:
    """The step of an operator that keeps the length."""
    return length


def is_pointwise(options: Options, dim: int) -> bool:
    """Whether a convolution reads nothing but the position that it writes, along one dimension."""
    padding = options.get("padding", 0)
    pads = not isinstance(padding, str) and _at(padding, dim) > 0  # "same" pads a window of one by nothing
    return _weight_size(options, dim) == 1 and _at(options.get("stride", 1), dim) == 1 and not pads


def _convolved(options: Options, dim: int) -> Step | None:
    reach = _at(options.get("dilation", 1), dim) * (_weight_size(options, dim) - 1)
    padding = options.get("padding", 0)
    if padding == "same":
        return same
    both, stride = 0 if padding == "valid" else 2 * _at(padding, dim), _at(options.get("stride", 1), dim)
    return lambda n: (n + both - reach - 1) // stride + 1


def _transposed(options: Options, dim: int) -> Step | None:
    reach = _at(options.get("dilation", 1), dim) * (_weight_size(options, dim) - 1)
    stride, padding = _at(options.get("stride", 1), dim), _at(options.get("padding", 0), dim)
    more = _at(options.get("output_padding", 0), dim)
    return lambda n: (n - 1) * stride - 2 * padding + reach + more + 1


def _pooled(options: Options, dim: int) -> Step | None:
    size = _at(options["kernel_size"], dim)
    stride = _at(options.get("stride") or options["kernel_size"], dim)
    padding, reach = _at(options.get("padding", 0), dim), _at(options.get("dilation", 1), dim) * (size - 1)
    if not options.get("ceil_mode", False):
        return lambda n: (n + 2 * padding - reach - 1) // stride + 1

    def rounded_up(n: int) -> int:
        windows = -((reach + 1 - n - 2 * padding) // stride) + 1
        return windows - 1 if (windows - 1) * stride >= n + padding else windows  # none begins in the padding after it

    return rounded_up


def _to_one(options: Options, dim: int) -> Step | None:
    size = options["output_size"]
    size = size if isinstance(size, int) else size[dim if len(size) > 1 else 0]
    if size is None:
        return same
    return (lambda n: 1) if size == 1 else None


def _padded(options: Options, dim: int) -> Step | None:
    """`dim` counts from the end here, as in what torch is told to pad."""
    more = sum(padding_of(options, dim))
    return (lambda n: n + more) if options.get("mode", "constant") == "constant" or not more else None


def padding_of(options: Options, dim: int) -> tuple[int, int]:
    """What `pad` adds before and after a dimension, which is counted from the end: -1."""
    pad = list(options["pad"])
    first = 2 * (-dim - 1)
    return (pad[first], pad[first + 1]) if first + 1 < len(pad) else (0, 0)


def _resampled(options: Options, dim: int) -> Step | None:
    scale, is_nearest = options.get("scale_factor"), options.get("mode", "nearest") in ("nearest", "nearest-exact")
    if scale is None or not is_nearest or options.get("recompute_scale_factor"):
        return None  # what a size is a multiple of, and what a line is drawn to, depend on the padded length
    factor = scale if isinstance(scale, int | float) else scale[dim]
    return lambda n: int(n * factor)


def _unknown(options: Options, dim: int) -> Step | None:
    return None


def _at(value: Any, dim: int) -> int:
    """An option for one dimension: of a number, a sequence of one, or one for each."""
    if isinstance(value, int):
        return value
    return int(value[0] if len(value) == 1 else value[dim])


def _weight_size(options: Options, dim: int) -> int:
    weight: Tensor = options["weight"]
    return weight.shape[2 + dim]


_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_MAX = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVERAGE = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_ADAPTIVE = ("input", "output_size", "return_indices")
_INTERPOLATE = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")

_MAX_POOLS: list[Any] = [F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, torch.max_pool3d]
_MAX_POOLS += [F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices]
_AVERAGE_POOLS: list[Any] = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d]
_WHOLE_AVERAGES: list[Any] = [F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d]
_WHOLE_MAXES: list[Any] = [F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d]
_WHOLE_MAXES += [F.adaptive_max_pool1d_with_indices, F.adaptive_max_pool2d_with_indices]
_WHOLE_MAXES += [F.adaptive_max_pool3d_with_indices]
_OTHERS: list[Any] = [F.unfold, F.fold, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d]
_OTHERS += [F.max_unpool1d, F.max_unpool2d, F.max_unpool3d, F.fractional_max_pool2d, F.fractional_max_pool3d]
_OTHERS += [F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices]

OPERATORS: dict[Any, Operator] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), Operator("convolution", _CONVOLUTION, _convolved)),
    **dict.fromkeys(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        Operator("convolution", _TRANSPOSED, _transposed),
    ),
    **dict.fromkeys(_MAX_POOLS, Operator("max", _MAX, _pooled)),
    **dict.fromkeys(_AVERAGE_POOLS, Operator("average", _AVERAGE, _pooled)),
    **dict.fromkeys(_WHOLE_AVERAGES, Operator("whole average", _ADAPTIVE, _to_one)),
    **dict.fromkeys(_WHOLE_MAXES, Operator("whole max", _ADAPTIVE, _to_one)),
    F.pad: Operator("pad", ("input", "pad", "mode", "value"), _padded),
    F.interpolate: Operator("copy", _INTERPOLATE, _resampled),
    **dict.fromkeys(_OTHERS, Operator("other", ("input",), _unknown)),
}
