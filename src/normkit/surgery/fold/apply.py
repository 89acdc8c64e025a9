"""Folding what can be folded, and taking back what then turns out not to compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.batches import Forward, in_evaluation, tensors_in
from normkit.errors import NormkitError
from normkit.kernels import select
from normkit.named_layers import named_layers
from normkit.snapshot import Snapshot, untouched
from normkit.surgery.fold.absorb import absorb
from normkit.surgery.fold.affine_map import PER_CHANNEL
from normkit.surgery.fold.dataflow import Flow, outputs_of, watch
from normkit.surgery.fold.hosts import hosts
from normkit.surgery.fold.plan import Fold, Plan
from normkit.surgery.fold.routes import Obstacle
from normkit.surgery.norms import Norm
from normkit.surgery.parity import difference, run_example

ROUNDING = 256  # units in the last place, of the largest value, that a folded layer's output may move, ...
COARSE = 0.125  # ... but never more than this part of it, in whatever type


class Folding:
    """Find what can be folded, fold it, and take back what turns out not to compute the same."""

    def __init__(self, model: nn.Module, found: list[Norm], example: Any, forward: Forward | None) -> None:
        self.model = model
        self._run: Callable[[], Any] = lambda: run_example(model, example, forward)
        watched = {norm.name: norm.layer for norm in found if norm.spec.kind in PER_CHANNEL}
        self.flow = watch(model, watched, example, forward)
        self.plan = Plan(self.flow, hosts(model, self.flow))
        with untouched(model), torch.no_grad():
            self.reasons = self.plan.find(found)
        self._snapshot = Snapshot(model)

    def run(self) -> list[Fold]:
        """Fold, and return what was folded."""
        folds = list(self.plan.folds.values())
        kept = self._sound(folds, [])
        if len(kept) < len(folds):
            self._do(kept)
        for fold in folds:
            if fold not in kept:  # nor found unsound by itself: a norm that it depends on was
                self.reasons.setdefault(fold.norm.name, f"{' and '.join(sorted(fold.through))} could not be folded")
        return kept

    def _sound(self, folds: list[Fold], with_: list[Fold]) -> list[Fold]:
        """Those folds that, with others that are, leave the model computing what it did."""
        names = {fold.norm.name for fold in (*with_, *folds)}
        folds = [fold for fold in folds if fold.through <= names]
        problem = self._problem([*with_, *folds]) if folds else None
        if problem is None:
            return folds
        if len(folds) == 1:
            self.reasons[folds[0].norm.name] = problem
            return []
        half = len(folds) // 2
        first = self._sound(folds[:half], with_)
        return first + self._sound(folds[half:], with_ + first)

    def _problem(self, folds: list[Fold]) -> str | None:
        try:
            self._do(folds)
            self._prove(folds)
        except NormkitError as problem:
            return str(problem)
        return None

    def _do(self, folds: list[Fold]) -> None:
        """Put the model back, and fold these."""
        self._snapshot.restore()
        absorb(folds)

    def _prove(self, folds: list[Fold]) -> None:
        """Run the folded model, and compare what comes out of each place that should be as it was.

        What was right then goes on exactly as it was, so that rounding does not add up and every fold is judged alone.
        """
        compared = _compared(self.model, self.flow, _places(folds))
        with untouched(self.model), in_evaluation(self.model), select.backend("reference"), compared:
            outputs = outputs_of(self._run())
        _compare(_Place("the model's output", 0.0, 0.0), self.flow.outputs, outputs)


class _Place(NamedTuple):
    """A layer whose output must be what it was, and the largest bias and coarsest type of what was folded for it."""

    name: str
    bias: float
    eps: float


def _places(folds: list[Fold]) -> list[_Place]:
    meant = {name for fold in folds for name in fold.meant}
    taken = {host for fold in folds if fold.after for host in fold.channels}
    places: dict[str, _Place] = {}
    for fold in folds:
        behind = [p.call.where for host in fold.channels if host not in taken for p in host.products]
        for name in {fold.norm.name} if fold.after else set(behind):
            biases = [bias.abs().max().item() for host in fold.channels if (bias := host.bias_now) is not None]
            eps = max(torch.finfo(kind).eps for host in fold.channels for kind in host.dtypes)
            other = places.get(name, _Place(name, 0.0, 0.0))
            places[name] = _Place(name, max(other.bias, *biases, 0.0), max(other.eps, eps))
    return [place for name, place in places.items() if name not in meant]


@contextmanager
def _compared(model: nn.Module, flow: Flow, places: list[_Place]) -> Iterator[None]:
    """Compare what comes out of layers with what did before, and put that in its place."""
    layers = dict(named_layers(model))
    handles = [
        layers[place.name].register_forward_hook(_Comparison(place, flow.results[place.name])) for place in places
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Comparison:
    """A forward hook that has the results of all calls."""

    def __init__(self, place: _Place, results: list[list[Tensor]]) -> None:
        self._place, self._results, self._calls = place, results, 0

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._calls == len(self._results):
            raise Obstacle(f"folded, {self._place.name} would run more often")
        before, after = self._results[self._calls], tensors_in(output)
        self._calls += 1
        _compare(self._place, before, after)
        for old, new in zip(before, after, strict=True):
            with suppress(RuntimeError):  # what cannot be written, such as an expanded tensor, goes on as it came
                new.copy_(old)


def _compare(place: _Place, before: list[Tensor], after: list[Tensor]) -> None:
    if [t.shape for t in before] != [t.shape for t in after]:
        raise Obstacle(f"folded, {place.name} would have other shapes")
    for old, new in zip(before, after, strict=True):
        gap, relative = difference(old, new)
        if gap > _limit(old, place):
            raise Obstacle(f"folded, {place.name} would move by {gap:.2g} ({relative:.2g} relative)")


def _limit(before: Tensor, place: _Place) -> float:
    """How far rounding alone may move values."""
    if not before.is_floating_point() or before.numel() == 0:
        return 0.0
    eps = max(place.eps, torch.finfo(before.dtype).eps)
    size = before.abs().nan_to_num(0.0, 0.0, 0.0).max().item() + place.bias
    return float(min(ROUNDING * eps, COARSE) * size)
