"""Putting other norms in the place of those a model has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from normkit.batches import Forward
from normkit.errors import ArgumentError
from normkit.spec import describe
from normkit.surgery.norms import AFFINE, UNKNOWN, survey
from normkit.surgery.operation import Operation, Skip, become, operation
from normkit.surgery.replace import fit
from normkit.surgery.replace.carry import Replacement, chosen, label, replacement
from normkit.surgery.replace.sites import Site, sites
from normkit.surgery.replace.targets import Choice, Classes, TargetName, Wanted, wanted
from normkit.surgery.replace.torch_classes import in_torch_classes
from normkit.surgery.result import Surgery


def convert(
    model: nn.Module,
    to: TargetName | Choice | None = None,
    example: Any = None,
    *,
    forward: Forward | None = None,
    calibrate: Iterable[Any] | None = None,
    classes: Classes = "normkit",
    inplace: bool = False,
    **options: Any,
) -> Surgery:
    """Put other norms in the place of all that can be replaced.

    "batch", "sync", "frozen", "renorm" and "ghost" are the same function in evaluation, and turn into one another
    without loss: options, statistics, gamma and beta, activation and mode are kept. The others normalize something
    else: they keep gamma and beta, or get those that bring each layer's outputs closest to the old ones (`calibrate`).

    Args:
        model: of any kind; it may itself be a norm.
        to: "batch", "sync", "frozen", "renorm", "ghost", "group", "instance", "layer", "rms", "filter-response", or a
            function of a NormSpec that returns the new module, or None to leave this one alone. A norm that it
            returns gets the old one's gamma, beta and statistics where it has places of their shape.
            Without it, and with classes="torch", every norm keeps its function.
        example: a batch on which to measure parity, and to see the shapes of inputs that a class leaves open.
        forward: forward(model, batch) instead of the usual way to run a model on a batch.
        calibrate: batches to fit gamma and beta on, where the function cannot be kept.
        classes: whose classes the new layers are: ours, or torch's own, with activations as modules after them.
        inplace: change the model itself, not a copy.
        options: for the new layers: eps, momentum, groups, chunk_size, r_max and so on, as the target takes them.
    """
    if to is None:
        _must_keep_all(classes, {"calibrate": calibrate} if calibrate is not None else options)
        return in_torch_classes(model, example, forward, inplace)
    asked = _asked(to, classes, options)
    with operation(model, inplace) as op:
        before = op.trace(example, forward)
        found = survey(op.model)
        planned = _plan(op, sites(op.model, found.norms, example, forward), asked, calibrate is not None)
        for name, layer in found.unknown.items():
            op.skip(name, label(layer), UNKNOWN)
        notes = _calibrated(op.model, planned, calibrate, forward)
        for one, note in zip(planned, notes, strict=True):
            op.change(one.site.name, one.what, "; ".join([*one.notes, note]))
            become(one.site.layer, one.whole)
        return op.result(before, example, forward)


def _must_keep_all(classes: str, options: dict[str, Any]) -> None:
    """Check a request without a target: that for the same function in torch's classes."""
    if classes != "torch":
        raise ArgumentError(
            f"convert needs to=, what the norms are to become; got None with classes={classes!r}. To keep what they "
            'compute, in torch\'s own classes: classes="torch".'
        )
    if options:
        got = ", ".join(options)
        raise ArgumentError(
            f'convert(model, classes="torch") keeps what the norms compute, and takes no options; got {got}.'
        )


def _asked(to: TargetName | Choice, classes: str, options: dict[str, Any]) -> Wanted | Choice:
    if isinstance(to, str) or not callable(to):
        return wanted(to, classes, options)
    beside = [*options, *(["classes"] if classes != "normkit" else [])]
    if beside:
        raise ArgumentError(f"a function makes the new layers itself; got the options {', '.join(beside)} as well.")
    return to


def _plan(op: Operation, found: list[Site], asked: Wanted | Choice, calibrated: bool) -> list[Replacement]:
    """A replacement for every norm that can have one; the others are recorded as skipped."""
    planned: list[Replacement] = []
    only_batch_norms = not calibrated and any(site.spec.evaluates_as_batch_norm for site in found)
    for site in found:
        with op.attempt(site.name, label(site.layer)):
            one = _planned(site, asked, only_batch_norms)
            if any(one.layer is other.layer for other in planned):
                raise ArgumentError("to(spec) returned one module for two layers; make a new one on every call.")
            planned.append(one)
    return planned


def _planned(site: Site, asked: Wanted | Choice, only_batch_norms: bool) -> Replacement:
    if not isinstance(asked, Wanted):
        return chosen(site, asked)
    one = replacement(site, asked)
    if only_batch_norms and one.needs_statistics:  # a model that comes back from "sync" keeps its GroupNorms
        raise Skip("it stores no statistics, unlike the batch norms of this model; pass calibrate= to convert it")
    return one


def _calibrated(
    model: nn.Module, planned: list[Replacement], batches: Iterable[Any] | None, forward: Forward | None
) -> list[str]:
    """Fit the layers that change the function, if there are batches to fit on; return a remark on each."""
    if batches is None:
        return [_difference(one) for one in planned]
    changing = [one for one in planned if not one.keeps and _can_be_fitted(one)]
    seen = fit.observe(model, changing, batches, forward)
    explained = {id(changing[i]): fit.fit_(changing[i], sums) for i, sums in seen.items()}
    return [_closeness(one, explained.get(id(one))) for one in planned]


def _can_be_fitted(one: Replacement) -> bool:
    has_affine = any(one.layer._parameters.get(name) is not None for name in AFFINE)
    return describe(one.layer) is not None and (has_affine or one.needs_statistics)


def _difference(one: Replacement) -> str:
    if one.keeps:
        return "evaluation is the same"
    if one.needs_statistics:
        return "evaluation differs: its statistics are those of no batch; recalibrate, or pass calibrate="
    return "evaluation differs"


def _closeness(one: Replacement, explained: float | None) -> str:
    if one.keeps:
        return _difference(one)
    if not _can_be_fitted(one):
        return f"{_difference(one)}; it has no gamma or beta to fit"
    if explained is None:
        return f"{_difference(one)}; no batch reached it"
    return f"fitted: {explained:.1%} of the old output's variance explained"
