"""Going through batches, and taking the statistics of what the norms are given on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normkit import checks
from normkit.batches import Forward, each_batch, feed, in_evaluation
from normkit.errors import ArgumentError, NonFiniteError, NormkitError, ShapeError
from normkit.layers.norm_layer import NormLayer
from normkit.moments import Moments
from normkit.surgery.no_updates import uncompiled
from normkit.surgery.norms import Norm
from normkit.surgery.statistics.tally import ALONE, Method, Tally, group_of, moments_of, over_ranks

Progress = Callable[[int], None]
_NO_MORE = object()


class BatchError(NormkitError, RuntimeError):
    """A batch that could not be had, or on which the model does not run."""


class _Enough(BaseException):
    """Ends a forward that has shown what was wanted; no `except Exception` inside a model stops it."""


class Batches:
    """Batches, with the way to run a model on them. Errors say which batch they come from."""

    def __init__(
        self, batches: Iterable[Any], forward: Forward | None = None, progress: Progress | None = None
    ) -> None:
        self._batches, self._forward, self._progress = batches, forward, progress
        self._total = 0

    def check(self) -> None:
        """Raise if there are none."""
        each_batch(self._batches)

    def run(self, model: nn.Module, use: Callable[[Any], None] = lambda output: None) -> int:
        """Run the model on each batch, give the output to `use`, and return how many batches there were."""
        number = 0
        with _numbered(0):
            each = each_batch(self._batches)
        while True:
            with _numbered(number):
                batch = next(each, _NO_MORE)
                if batch is _NO_MORE:
                    return number
                self._run_one(model, batch, use)
            number += 1
            self._total += 1
            if self._progress is not None:
                self._progress(self._total)

    def _run_one(self, model: nn.Module, batch: Any, use: Callable[[Any], None]) -> None:
        try:
            use(feed(model, batch, self._forward))
        except _Enough:
            return


@contextmanager
def _numbered(number: int) -> Iterator[None]:
    """Say in errors which batch it was."""
    try:
        yield
    except ArgumentError:  # about the call, not about one batch
        raise
    except NormkitError as error:
        raise type(error)(f"batch {number} (the first is 0): {error}") from error
    except Exception as error:
        raise BatchError(
            f"batch {number} (the first is 0) failed: {type(error).__name__}: {error} The model is as it was."
        ) from error


def gather(
    model: nn.Module, norms: Sequence[Norm], batches: Batches, method: Method = "pooled"
) -> tuple[dict[str, Tally], int]:
    """Run the model in evaluation, but let these norms see batch statistics; return those, by name, and the batches.

    Each norm normalizes what it is given with the statistics of just that, as in training, and its own are put back in
    the end. Norms that never ran are left out.
    """
    tallies = {norm.name: Tally(method) for norm in norms}

    def take(norm: Norm, x: Tensor, mask: Tensor | None) -> None:
        batch = _moments(norm, x, mask)
        _check_enough(norm, batch, x)
        tallies[norm.name].add(*batch)
        _use(norm.layer, batch[0])

    with _running(model), _own_statistics_back(norms), _hooked(norms, take):
        count = batches.run(model)
    return {name: tally for name, tally in tallies.items() if tally.calls}, count


def gather_last(model: nn.Module, norm: Norm, batches: Batches, method: Method) -> tuple[Tally, int]:
    """As `gather` for one norm, with all others in evaluation; forwards end where it has been seen."""
    tally = Tally(method)

    def take(norm: Norm, x: Tensor, mask: Tensor | None) -> None:
        batch = _moments(norm, x, mask)
        if method == "paper":
            _check_enough(norm, batch, x)
        tally.add(*batch)
        raise _Enough

    with _running(model), _hooked([norm], take):
        count = batches.run(model)
    return tally, count


def visits(model: nn.Module, norms: Sequence[Norm], batches: Batches) -> dict[str, int]:
    """How often each norm runs in a forward, at most, in the order in which they first run."""
    most: dict[str, int] = {}
    now: dict[str, int] = {}

    def count(norm: Norm, x: Tensor, mask: Tensor | None) -> None:
        now[norm.name] = now.get(norm.name, 0) + 1
        most[norm.name] = max(most.get(norm.name, 0), now[norm.name])

    with _running(model), _hooked(norms, count):
        batches.run(model, lambda output: now.clear())
    return most


@contextmanager
def _running(model: nn.Module) -> Iterator[None]:
    with in_evaluation(model), uncompiled():
        yield


@contextmanager
def _hooked(norms: Sequence[Norm], take: Callable[[Norm, Tensor, Tensor | None], None]) -> Iterator[None]:
    """Show `take` what each norm is given, behind all hooks that may change it."""

    def showing(norm: Norm) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return lambda layer, args, kwargs: take(norm, *_given(norm, args, kwargs))

    handles = [norm.layer.register_forward_pre_hook(showing(norm), with_kwargs=True) for norm in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _own_statistics_back(norms: Sequence[Norm]) -> Iterator[None]:
    own = [(norm.layer, dict(norm.layer._buffers)) for norm in norms]
    try:
        yield
    finally:
        for layer, buffers in own:
            layer._buffers.update(buffers)


def _given(norm: Norm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """A layer's input, and its mask as it broadcasts against that."""
    x = args[0] if args else kwargs.get("input", kwargs.get("x"))
    features = feature_shape(norm.layer)
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[1 : 1 + len(features)] != features:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"{shown(norm)} needs an input (N, {', '.join(map(str, features))}, ...); got {got}.")
    mask = kwargs.get("mask")
    if mask is not None and not isinstance(norm.layer, NormLayer):
        raise ArgumentError(
            f"{shown(norm)} is called with a mask, and whether it marks what counts or what does not is "
            "not known. Use normkit's layer."
        )
    return x, checks.position_mask(mask, x, shown(norm))


def shown(norm: Norm) -> str:
    """What to call a norm in errors."""
    return f"{norm.name or 'the model itself'} ({type(norm.layer).__name__})"


def feature_shape(layer: nn.Module) -> torch.Size:
    """The shape of one set of statistics: one value per channel, or per channel and position."""
    stored = layer._buffers["running_var"]
    assert stored is not None
    return stored.shape


def _moments(norm: Norm, x: Tensor, mask: Tensor | None) -> tuple[Moments, int]:
    batch, examples = moments_of(x, feature_shape(norm.layer), mask), x.shape[0]
    group = group_of(norm)
    if group is not ALONE:
        batch, examples = over_ranks(batch, examples, group)
    good = batch.mean.isfinite() & batch.var.isfinite()
    if not good.all():
        bad = (~good).flatten().nonzero().flatten().tolist()
        where = f"{bad[:8]}{'...' if len(bad) > 8 else ''}"
        raise NonFiniteError(
            f"{shown(norm)} needs finite input; its statistics are NaN or infinite in channels {where}. "
            "The model is as it was. Look for the first layer or example that overflows."
        )
    return batch, examples


def _check_enough(norm: Norm, batch: tuple[Moments, int], x: Tensor) -> None:
    count = batch[0].count
    if (int(count.min()) if isinstance(count, Tensor) else count) <= 1:
        raise ShapeError(
            f"{shown(norm)} needs more than 1 value per channel, to have a variance; got input {tuple(x.shape)}. Use "
            "larger batches (a DataLoader's drop_last=True drops a last one of 1), or recalibrate(exact=True), which "
            "never normalizes a batch by itself."
        )


def _use(layer: nn.Module, batch: Moments) -> None:
    """Put a batch's statistics where the layer, which is in evaluation, takes its own from.

    So it normalizes as in training, and needs not know: nothing is written, nothing corrected towards what is stored.
    """
    for name, value in (("running_mean", batch.mean), ("running_var", batch.var)):
        stored = layer._buffers.get(name)
        if stored is not None:
            layer._buffers[name] = value.to(stored).contiguous()
