"""Running a model over batches, and taking the statistics of what its norms are given.

Norms that are to normalize with the statistics of each batch stay in evaluation: a hook that runs before their forward
puts the batch's statistics into their buffers, as if stored. So nothing is updated, whatever a layer's own update is,
and a BatchRenorm does not correct towards what it stores. The buffers get their own content back at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normkit import checks
from normkit.batches import Forward, each_batch, feed, in_evaluation
from normkit.errors import ArgumentError, NonFiniteError, NormkitError, ShapeError
from normkit.hooks import BeforeForward, hooked
from normkit.layers.norm_layer import NormLayer
from normkit.moments import Moments, PopulationMethod
from normkit.surgery.no_updates import uncompiled
from normkit.surgery.norms import Norm, channels_second
from normkit.surgery.statistics.tally import ALONE, Tally, group_of, moments_of, over_ranks

Progress = Callable[[int], None]
_NO_MORE = object()


class BatchError(NormkitError, RuntimeError):
    """A batch that could not be loaded, or on which the model does not run."""


class _Enough(BaseException):
    """Ends a forward early. A BaseException, so that no `except Exception` inside a model catches it."""


class Batches:
    """Batches, and how to run a model on them. Errors say which batch they come from."""

    def __init__(
        self, batches: Iterable[Any], forward: Forward | None = None, progress: Progress | None = None
    ) -> None:
        self._batches, self._forward, self._progress = batches, forward, progress
        self._total = 0

    def check(self) -> None:
        """Raise if there are none."""
        each_batch(self._batches)

    def run(self, model: nn.Module, use: Callable[[Any], None] = lambda output: None) -> int:
        """Run the model on each batch, pass the output to `use`, and return the number of batches."""
        number = 0
        with numbered(0):
            each = each_batch(self._batches)
        while True:
            with numbered(number):
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
def numbered(number: int) -> Iterator[None]:
    """Say in errors which batch they are about."""
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
    model: nn.Module, norms: Sequence[Norm], batches: Batches, method: PopulationMethod = "pooled"
) -> tuple[dict[str, Tally], int]:
    """Run the model in evaluation, but with batch statistics in these norms; return their tallies by name.

    Also returns the number of batches. Norms that never ran are left out.
    """
    tallies = {norm.name: Tally(method) for norm in norms}

    def take(norm: Norm, x: Tensor, mask: Tensor | None) -> None:
        batch = finite_moments(norm, x, mask)
        _check_enough(norm, batch, x)
        tallies[norm.name].add(*batch)
        as_if_stored(norm.layer, batch[0])

    with _running(model), own_statistics_back(norms), showing(norms, take):
        count = batches.run(model)
    return {name: tally for name, tally in tallies.items() if tally.calls}, count


def gather_last(model: nn.Module, norm: Norm, batches: Batches, method: PopulationMethod) -> tuple[Tally, int]:
    """As `gather` for one norm, with all others in evaluation; each forward ends at this norm."""
    tally = Tally(method)

    def take(norm: Norm, x: Tensor, mask: Tensor | None) -> None:
        batch = finite_moments(norm, x, mask)
        if method == "paper":
            _check_enough(norm, batch, x)
        tally.add(*batch)
        raise _Enough

    with _running(model), showing([norm], take):
        count = batches.run(model)
    return tally, count


def visits(model: nn.Module, norms: Sequence[Norm], batches: Batches) -> dict[str, int]:
    """The largest number of times that each norm runs in a forward, in the order in which they first run."""
    most: dict[str, int] = {}
    now: dict[str, int] = {}

    def count(norm: Norm, x: Tensor, mask: Tensor | None) -> None:
        now[norm.name] = now.get(norm.name, 0) + 1
        most[norm.name] = max(most.get(norm.name, 0), now[norm.name])

    with _running(model), showing(norms, count):
        batches.run(model, lambda output: now.clear())
    return most


@contextmanager
def _running(model: nn.Module) -> Iterator[None]:
    with in_evaluation(model), uncompiled():
        yield


def showing(norms: Sequence[Norm], take: Callable[[Norm, Tensor, Tensor | None], None]) -> AbstractContextManager[None]:
    """Call `take` with the input and mask of each norm, after all hooks that may change them."""

    def show(norm: Norm) -> BeforeForward:
        return lambda layer, args, kwargs: take(norm, *given(norm, args, kwargs))

    return hooked(before=[(norm.layer, show(norm)) for norm in norms])


@contextmanager
def own_statistics_back(norms: Sequence[Norm]) -> Iterator[None]:
    """Give the norms their own buffers back at the end of the block."""
    own = [(norm.layer, dict(norm.layer._buffers)) for norm in norms]
    try:
        yield
    finally:
        for layer, buffers in own:
            layer._buffers.update(buffers)


def given(norm: Norm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """A layer's input, with the channels in the second dimension, and its mask as it broadcasts against that."""
    x = args[0] if args else kwargs.get("input", kwargs.get("x"))
    features = feature_shape(norm.layer)
    mask = kwargs.get("mask")
    if isinstance(x, Tensor):
        mask = channels_second(norm, mask) if isinstance(mask, Tensor) and mask.dim() == x.dim() else mask
        x = channels_second(norm, x)
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[1 : 1 + len(features)] != features:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"{norm.title} needs an input (N, {', '.join(map(str, features))}, ...); got {got}.")
    if mask is not None and not isinstance(norm.layer, NormLayer):
        raise ArgumentError(
            f"{norm.title} is called with a mask, and it is not known whether that marks what counts or "
            "what does not. Use normkit's layer."
        )
    return x, checks.position_mask(mask, x, norm.title)


def feature_shape(layer: nn.Module) -> torch.Size:
    """The shape of one set of statistics: one value per channel, or per channel and position."""
    stored = layer._buffers["running_var"]
    assert stored is not None
    return stored.shape


def batch_moments(norm: Norm, x: Tensor, mask: Tensor | None) -> tuple[Moments, int]:
    """The moments that a norm takes of its input, over all ranks if they are synchronized, and of how many examples."""
    batch, examples = moments_of(x, feature_shape(norm.layer), mask), x.shape[0]
    group = group_of(norm)
    return (batch, examples) if group is ALONE else over_ranks(batch, examples, group)


def finite_moments(norm: Norm, x: Tensor, mask: Tensor | None) -> tuple[Moments, int]:
    """As `batch_moments`; NaN and infinity are an error."""
    batch, examples = batch_moments(norm, x, mask)
    good = batch.mean.isfinite() & batch.var.isfinite()
    if not good.all():
        bad = (~good).flatten().nonzero().flatten().tolist()
        where = f"{bad[:8]}{'...' if len(bad) > 8 else ''}"
        raise NonFiniteError(
            f"{norm.title} needs finite input; its statistics are NaN or infinite in channels {where}. "
            "The model is as it was. Look for the first layer or example that overflows."
        )
    return batch, examples


def _check_enough(norm: Norm, batch: tuple[Moments, int], x: Tensor) -> None:
    if not has_variance(batch[0]):
        raise ShapeError(
            f"{norm.title} needs more than 1 value per channel, to have a variance; got input {tuple(x.shape)}. Use "
            "larger batches (a DataLoader's drop_last=True drops a last one of 1), or recalibrate(exact=True), which "
            "never normalizes a batch by itself."
        )


def has_variance(batch: Moments) -> bool:
    """Whether every channel has more than one value."""
    count = batch.count
    return (int(count.min()) if isinstance(count, Tensor) else count) > 1


def as_if_stored(layer: nn.Module, batch: Moments) -> None:
    """Put a batch's statistics where the layer, which is in evaluation, looks for its stored ones."""
    for name, value in (("running_mean", batch.mean), ("running_var", batch.var)):
        stored = layer._buffers.get(name)
        if stored is not None:
            layer._buffers[name] = value.to(stored).contiguous()
