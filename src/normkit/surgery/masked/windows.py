"""How operators that read several positions are run, so that none of them reads padding beside a real position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normkit.batches import tensors_in
from normkit.errors import UnsupportedError
from normkit.surgery.masked.extent import Extent
from normkit.surgery.masked.operators import Kind, Options

Run = Callable[[Tensor], Any]  # the operator, with another input


def run_hiding(kind: Kind, run: Run, options: Options, dims: Sequence[int], before: Extent, after: Extent) -> Any:
    """Run an operator as if every example ended with its last real position. `dims` are the masked dimensions."""
    x: Tensor = options["input"]
    real = before.on(x, dims)
    if kind == "convolution":
        return run(torch.where(real, x, 0))
    if kind in ("max", "whole max"):
        return _without_infinity(run(torch.where(real, x, -torch.inf)), after, dims)
    if kind == "average":
        return _averaged(run, options, real)
    if kind == "whole average":
        return _averaged_whole(run, x, real, [dim for dim, size in zip(dims, after.sizes, strict=True) if size == 1])
    return run(x)


def _without_infinity(outputs: Any, after: Extent, dims: Sequence[int]) -> Any:
    """The largest of no real positions is minus infinity, which later operators would make NaN of: zero instead."""
    y, *indices = tensors_in(outputs)
    y = torch.where(after.on(y, dims), y, 0)
    return (y, *indices) if indices else y


def _averaged(run: Run, options: Options, real: Tensor) -> Any:
    """Zeros stand for what is beyond the end; a pool that does not count them divides by the rest of its window."""
    x: Tensor = options["input"]
    y = run(torch.where(real, x, 0))
    counts, pads, is_cut = options.get("count_include_pad", True), _pads(options), options.get("ceil_mode", False)
    if options.get("divisor_override") is not None or not (is_cut or (pads and not counts)):
        return y
    if pads and counts:
        raise UnsupportedError(
            "an average pool with ceil_mode=True that counts its padding divides by a number that depends on the "
            "padded length, and cannot be masked. Set ceil_mode=False, or count_include_pad=False."
        )
    share = run(real.to(x.dtype).expand(x.shape[0], 1, *x.shape[2:]))
    return y / torch.where(share > 0, share, 1)


def _averaged_whole(run: Run, x: Tensor, real: Tensor, reduced: Sequence[int]) -> Tensor:
    y: Tensor = run(torch.where(real, x, 0))
    if not reduced:
        return y
    share = real.to(torch.promote_types(x.dtype, torch.float32)).mean(tuple(reduced), keepdim=True)
    return (y / torch.where(share > 0, share, 1)).to(x.dtype)


def _pads(options: Options) -> bool:
    padding = options.get("padding", 0)
    return padding > 0 if isinstance(padding, int) else any(one > 0 for one in padding)
