"""Carrying out a plan: fold, run the model again, and undo the folds after which it computes something else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.batches import in_evaluation, tensors_in
from normkit.errors import NormkitError
from normkit.hooks import hooked
from normkit.kernels import select
from normkit.named_layers import named_layers
from normkit.snapshot import Snapshot, untouched
from normkit.spec import is_tried
from normkit.surgery.fold.absorb import absorb
from normkit.surgery.fold.dataflow import Flow, outputs_of
from normkit.surgery.fold.plan import Fold, FoldPlan
from normkit.surgery.operation import Skip
from normkit.surgery.parity import difference

# Units in the last place of the largest value by which the output of a folded layer may move: more than in `parity`,
# because all weights of the layer are rounded anew and their errors add up over its inputs ...
FOLD_ROUNDING = 256
COARSE = 0.125  # ... but never more than this share of the largest value, whatever the type


def apply(model: nn.Module, plan: FoldPlan, run: Callable[[], Any]) -> list[Fold]:
    """Fold what is planned and proves sound, and return it; the reasons for the rest are added to the plan's.

    `run` runs the model on the example.
    """
    folds = list(plan.folds.values())
    proof = _Proof(model, plan, run)
    kept = proof.sound(folds, [])
    if len(kept) < len(folds):
        proof.refold(kept)
    for fold in folds:
        if fold not in kept:  # and not found unsound by itself: a norm that it depends on was
            plan.reasons.setdefault(fold.norm.name, f"{' and '.join(sorted(fold.through))} could not be folded")
    return kept


class _Proof:
    """Finds by bisection the folds that leave the model computing what it did."""

    def __init__(self, model: nn.Module, plan: FoldPlan, run: Callable[[], Any]) -> None:
        self._model, self._flow, self._reasons, self._run = model, plan.flow, plan.reasons, run
        self._original = Snapshot(model)

    def sound(self, folds: list[Fold], with_: list[Fold]) -> list[Fold]:
        """Those of `folds` that are sound, together with others that are known to be."""
        names = {fold.norm.name for fold in (*with_, *folds)}
        folds = [fold for fold in folds if fold.through <= names]
        problem = self._problem([*with_, *folds]) if folds else None
        if problem is None:
            return folds
        if len(folds) == 1:
            self._reasons[folds[0].norm.name] = problem
            return []
        half = len(folds) // 2
        first = self.sound(folds[:half], with_)
        return first + self.sound(folds[half:], with_ + first)

    def refold(self, folds: list[Fold]) -> None:
        """Restore the model, and fold these."""
        self._original.restore()
        absorb(folds)

    def _problem(self, folds: list[Fold]) -> str | None:
        try:
            self.refold(folds)
            self._prove(folds)
        except NormkitError as problem:
            return str(problem)
        return None

    def _prove(self, folds: list[Fold]) -> None:
        """Run the folded model, and compare the outputs of each place that should be as they were.

        An output that is right is replaced by the original one, so that rounding does not add up and every fold is
        judged by itself.
        """
        compared = _compared(self._model, self._flow, _places(folds))
        with untouched(self._model), in_evaluation(self._model), select.backend("reference"), compared:
            outputs = outputs_of(self._run())
        _compare(_Place("the model's output", 0.0, 0.0), self._flow.outputs, outputs)


class _Place(NamedTuple):
    """A layer whose output must be as it was, and the largest bias and coarsest type of the hosts it depends on."""

    name: str
    bias: float
    eps: float


def _places(folds: list[Fold]) -> list[_Place]:
    """Where to compare: at norms folded into hosts before them, and at the hosts after the others."""
    meant = {name for fold in folds for name in fold.meant}
    taken = {host for fold in folds if fold.hosts_are == "before" for host in fold.channels}
    places: dict[str, _Place] = {}
    for fold in folds:
        hosts = [p.call.where for host in fold.channels if host not in taken for p in host.products]
        for name in {fold.norm.name} if fold.hosts_are == "before" else set(hosts):
            biases = [bias.abs().max().item() for host in fold.channels if (bias := host.bias_now) is not None]
            eps = max(torch.finfo(kind).eps for kind in _dtypes(fold))
            other = places.get(name, _Place(name, 0.0, 0.0))
            places[name] = _Place(name, max(other.bias, *biases, 0.0), max(other.eps, eps))
    return [place for name, place in places.items() if name not in meant]


def _dtypes(fold: Fold) -> set[torch.dtype]:
    """The types that take part in a fold. Norms that others wrote may compute in float32 whatever their input."""
    of_norm = {torch.float32} if fold.keeps_norm and is_tried(fold.norm.layer) else set()
    return of_norm.union(*(host.dtypes for host in fold.channels))


def _compared(model: nn.Module, flow: Flow, places: list[_Place]) -> AbstractContextManager[None]:
    """Compare the outputs of layers with the recorded ones, and put these in their place."""
    layers = dict(named_layers(model))
    return hooked(after=[(layers[place.name], _Comparison(place, flow.results[place.name])) for place in places])


class _Comparison:
    """A forward hook that has the recorded results of all calls of a layer."""

    def __init__(self, place: _Place, results: list[list[Tensor]]) -> None:
        self._place, self._results, self._calls = place, results, 0

    def __call__(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._calls == len(self._results):
            raise Skip(f"folded, {self._place.name} would run more often")
        before, after = self._results[self._calls], tensors_in(output)
        self._calls += 1
        _compare(self._place, before, after)
        for old, new in zip(before, after, strict=True):
            with suppress(RuntimeError):  # what cannot be written to, such as an expanded tensor, stays as it is
                new.copy_(old)


def _compare(place: _Place, before: list[Tensor], after: list[Tensor]) -> None:
    if [t.shape for t in before] != [t.shape for t in after]:
        raise Skip(f"folded, {place.name} would have other shapes")
    for old, new in zip(before, after, strict=True):
        gap, relative = difference(old, new)
        if gap > _limit(old, place):
            raise Skip(f"folded, {place.name} would move by {gap:.2g} ({relative:.2g} relative)")


def _limit(before: Tensor, place: _Place) -> float:
    """How far rounding alone may move values."""
    if not before.is_floating_point() or before.numel() == 0:
        return 0.0
    eps = max(place.eps, torch.finfo(before.dtype).eps)
    size = before.abs().nan_to_num(0.0, 0.0, 0.0).max().item() + place.bias
    return float(min(FOLD_ROUNDING * eps, COARSE) * size)
