"""A mode that follows a mask through the operators of a model, and gives it to those that must know it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from normkit import functional
from normkit.batches import tensors_in
from normkit.errors import ShapeError
from normkit.surgery.masked.known import Known
from normkit.surgery.masked.operators import OPERATORS, Operator, Options, bound, is_pointwise, padding_of
from normkit.surgery.masked.windows import Run, run_hiding

_STATISTICS = ("input", "running_mean", "running_var", "weight", "bias")
_NORMS: dict[Any, tuple[Callable[..., Tensor], Sequence[str]]] = {
    F.batch_norm: (functional.batch_norm, (*_STATISTICS, "training", "momentum", "eps")),
    F.instance_norm: (functional.instance_norm, (*_STATISTICS, "use_input_stats", "momentum", "eps")),
    F.group_norm: (functional.group_norm, ("input", "num_groups", "weight", "bias", "eps")),
}


class Follow(TorchFunctionMode):
    """Gives torch's norms the mask, and hides padded positions from operators that would read them beside real ones.

    Attributes:
        known: the lengths of this call of the model.
        paused: more than 0 while a norm of ours runs: it has its mask, and its operators do not concern us.
        norms: how many norms of torch have been computed with their mask, or needed none.
    """

    def __init__(self, known: Known, where: Callable[[], str]) -> None:
        super().__init__()
        self.known, self.paused, self.norms = known, 0, 0
        self._where = where

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func in _NORMS:
            outputs = self._normalized(func, args, kwargs)
        elif func in OPERATORS:
            outputs = self._followed(func, OPERATORS[func], args, kwargs)
        else:
            outputs = func(*args, **kwargs)
        if isinstance(outputs, Tensor | tuple | list):
            self.known.inherit(tensors_in(outputs), tensors_in((args, kwargs)))
        return outputs

    def mask_for_norm(self, x: Tensor, *, across: bool) -> Tensor | None:
        """The mask for the input of a norm, (N, 1, ...); None if there is nothing to mask.

        `across` says whether its statistics are of all examples together.
        """
        dims, batch_size = self.known.dims(x), self.known.given.batch_size
        if x.shape[0] != batch_size:
            if across or self.known.own(x, [x.shape[dim] for dim in dims]):
                raise ShapeError(
                    f"{self._where()} was given {tuple(x.shape)}, a batch of {x.shape[0]}; the mask is for a batch of "
                    f"{batch_size}, and which of these are padding cannot be told. Mask the parts of the model before "
                    "and after this layer, and give it its own mask."
                )
            return None
        extent = self.known.extent(x, self._where()) if x.dim() > 2 else None  # (N, C): all values count
        return None if extent is None else extent.on(x, dims).expand(batch_size, 1, *x.shape[2:])

    def _normalized(self, func: Any, args: Any, kwargs: Options) -> Any:
        ours, names = _NORMS[func]
        options = bound(names, args, kwargs)
        uses_own = options.get("training", False) if func is F.batch_norm else options.get("use_input_stats", True)
        mask = self.mask_for_norm(options["input"], across=func is F.batch_norm) if uses_own else None
        self.norms += 1
        return func(*args, **kwargs) if mask is None else ours(**options, mask=mask)

    def _followed(self, func: Any, operator: Operator, args: Any, kwargs: Options) -> Any:
        options = bound(operator.names, args, kwargs)

        def run(x: Tensor) -> Any:
            return func(x, *args[1:], **kwargs) if args else func(**{**kwargs, "input": x})

        if operator.kind == "pad":
            return self._padded(operator, options, run)
        return self._windowed(func, operator, options, run)

    def _windowed(self, func: Any, operator: Operator, options: Options, run: Run) -> Any:
        x: Tensor = options["input"]
        dims, who = self.known.dims(x), self._where()
        reads_one = operator.kind == "convolution" and all(is_pointwise(options, dim - 2) for dim in dims)
        if x.shape[0] != self.known.given.batch_size or x.dim() < 3 or reads_one:
            return run(x)
        before = self.known.extent(x, who)
        steps = [operator.step(options, dim - 2) for dim in dims]
        after = None if before is None else self.known.after(before, steps, func.__name__, who)
        if before is None or after is None:
            return run(x)
        y = run_hiding(operator.kind, run, options, dims, before, after)
        self.known.mark(tensors_in(y), after)
        return y

    def _padded(self, operator: Operator, options: Options, run: Run) -> Any:
        """What a model appends comes after the real positions: in a padded batch, it is written over the padding."""
        x: Tensor = options["input"]
        dims = self._padded_dims(x, options)
        found = self.known.own(x, [x.shape[dim] for dim in dims])
        if len(found) != 1:
            return run(x)
        steps = [operator.step(options, dim - x.dim()) for dim in dims]
        after = self.known.after(found[0], steps, f'pad(mode="{options.get("mode")}")', self._where())
        if after is None:
            return run(x)
        appends = any(padding_of(options, dim - x.dim())[1] > 0 for dim in dims)
        y = run(torch.where(found[0].on(x, dims), x, options.get("value") or 0) if appends else x)
        self.known.mark([y], after)
        return y

    def _padded_dims(self, x: Tensor, options: Options) -> tuple[int, ...]:
        """The masked dimensions of what is padded, if they are: those of maps, or else that of (N, L) or (N, L, C)."""
        if x.dim() < 2 or x.shape[0] != self.known.given.batch_size:
            return ()
        in_lines = (1,) if x.dim() < 4 and len(self.known.given.sizes) == 1 else ()
        for dims in (self.known.dims(x), in_lines):
            if any(any(padding_of(options, dim - x.dim())) for dim in dims):
                return dims
        return ()
