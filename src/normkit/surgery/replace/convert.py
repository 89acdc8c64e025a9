"""Putting other norms in the place of those a model has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from normkit.batches import Forward
from normkit.errors import ArgumentError
from normkit.spec import describe
from normkit.surgery.norms import UNKNOWN, Survey, stored_moments
from normkit.surgery.operation import Operation, become, operation
from normkit.surgery.replace import fit
from normkit.surgery.replace.carry import Replacement, chosen, label, replacement
from normkit.surgery.replace.domains import can_be_evaluated, in_first_domain
from normkit.surgery.replace.sites import Site, sites
from normkit.surgery.replace.stored_forms import keeps_statistics
from normkit.surgery.replace.targets import Choice, Classes, TargetName, Wanted, wanted
from normkit.surgery.replace.torch_classes import take_torch_classes
from normkit.surgery.result import Surgery
from normkit.surgery.selection import Patterns


def convert(
    model: nn.Module,
    to: TargetName | Choice | None = None,
    example: Any = None,
    *,
    forward: Forward | None = None,
    calibrate: Iterable[Any] | None = None,
    classes: Classes = "normkit",
    only: Patterns | None = None,
    skip: Patterns | None = None,
    inplace: bool = False,
    **options: Any,
) -> Surgery:
    """Put other norms in the place of all that can be replaced.

    "batch", "sync", "frozen", "renorm", "ghost", "shuffled", "accumulated" and "split" are the same function in
    evaluation, and turn into one another without loss: options, statistics, gamma and beta, activation and mode are
    kept. So do "domain", "whitened" and "position", which start as that function. The others normalize something else:
    they keep gamma and beta, or get those that bring each layer's outputs closest to the old ones (`calibrate`).

    "sync" and "frozen" take layers with batch statistics, and "sync" none that are frozen, unless `only` names others.

    Args:
        model: of any kind; it may itself be a norm.
        to: "batch", "sync", "frozen", "renorm", "ghost", "shuffled", "accumulated", "split", "domain", "moving",
            "whitened", "switchable", "position", "group", "instance", "layer", "rms", "scale", "dyt", "derf",
            "filter-response", "evo-b0", "evo-s0", or a function of a NormSpec that returns the new module, or None to
            leave this one alone. A norm that it returns gets the old one's gamma, beta and statistics where it has
            places of their shape.
            Without it, and with classes="torch", every norm keeps its function.
        example: a batch on which to measure parity, and to see the shapes of inputs that a class leaves open.
        forward: forward(model, batch) instead of the usual way to run a model on a batch.
        calibrate: batches to fit gamma and beta on, where the function cannot be kept.
        classes: whose classes the new layers are: ours, or torch's own, with activations as modules after them.
        only: names or shell patterns of layers: only these, and what is inside them.
        skip: names or shell patterns of layers to leave alone, with what is inside them.
        inplace: change the model itself, not a copy.
        options: for the new layers: eps, momentum, groups, chunk_size, r_max and so on, as the target takes them.
    """
    if to is None:
        _must_keep_all(classes, {"calibrate": calibrate} if calibrate is not None else options)
    asked = None if to is None else _asked(to, classes, options, example)
    with operation(model, inplace, only, skip) as op:
        before = op.trace(example, forward)
        found = op.survey()
        if asked is None:
            take_torch_classes(op, found, example, forward)
            return op.result(before, example, forward)
        planned = _plan(op, found, sites(op.model, found.norms, example, forward), asked, calibrate is not None)
        notes = _calibrated(op.model, planned, calibrate, forward)
        for one, note in zip(planned, notes, strict=True):
            op.change(one.site.name, one.what, "; ".join([*one.notes, note]))
            become(one.site.layer, one.whole)
        made = [one.site.layer for one in planned]
        with in_first_domain(made):
            return op.result(before if can_be_evaluated(made) else None, example, forward)


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


def _asked(to: TargetName | Choice, classes: str, options: dict[str, Any], example: Any) -> Wanted | Choice:
    if isinstance(to, str) or not callable(to):
        asked = wanted(to, classes, options)
        if to == "position" and example is None:
            raise ArgumentError('convert to "position" needs example=, to see the height and width of the maps.')
        return asked
    beside = [*options, *(["classes"] if classes != "normkit" else [])]
    if beside:
        raise ArgumentError(f"a function makes the new layers itself; got the options {', '.join(beside)} as well.")
    return to


def _plan(
    op: Operation, found: Survey, places: Sequence[Site], asked: Wanted | Choice, calibrated: bool
) -> list[Replacement]:
    """A replacement for every norm that is to have one, and can; the others are recorded as skipped."""
    passed_by = _passed_by(places, asked, calibrated)
    meant = op.ask(found, [*_expected(places, asked, passed_by), *_expected_unknown(found, asked, passed_by)])
    planned: list[Replacement] = []
    for site in places:
        if site.name in passed_by and site.name not in meant:
            op.skip(site.name, label(site.layer), passed_by[site.name])
            continue
        with op.attempt(site.name, label(site.layer)):
            one = replacement(site, asked) if isinstance(asked, Wanted) else chosen(site, asked)
            if any(one.layer is other.layer for other in planned):
                raise ArgumentError("to(spec) returned one module for two layers; make a new one on every call.")
            planned.append(one)
    for name, layer in found.unknown.items():
        op.skip(name, label(layer), UNKNOWN)
    return planned


def _passed_by(places: Sequence[Site], asked: Wanted | Choice, calibrated: bool) -> dict[str, str]:
    """The layers that such a conversion is not about, unless they are named, and why."""
    if not isinstance(asked, Wanted):
        return {}
    only_batch_norms = not calibrated and any(site.spec.evaluates_as_batch_norm for site in places)
    reasons = {}
    for site in places:
        if asked.to in ("sync", "frozen") and not site.has_batch_statistics:
            reasons[site.name] = f'"{asked.to}" is for layers with batch statistics; only= may name others'
        elif asked.to == "sync" and site.is_frozen:
            reasons[site.name] = "is frozen, and would move again; unfreeze it, or name it in only="
        elif only_batch_norms and asked.target.is_across and not _has_statistics(site):
            reasons[site.name] = (
                "it stores no statistics, unlike the batch norms of this model; name it in only=, or pass calibrate="
            )
    return reasons


def _has_statistics(site: Site) -> bool:
    return site.has_batch_statistics or stored_moments(site.layer) is not None


def _expected(places: Sequence[Site], asked: Wanted | Choice, passed_by: Collection[str]) -> list[str]:
    """The layers whose conversion the caller counts on: not those on weights, nor what a function never sees."""
    return [
        site.name
        for site in places
        if site.name not in passed_by
        and (site.spec.has_gamma if isinstance(asked, Wanted) else site.spec.is_replaceable)
    ]


def _expected_unknown(found: Survey, asked: Wanted | Choice, passed_by: Collection[str]) -> list[str]:
    """Of the norms that are not known: all, or those with statistics where the conversion is about these."""
    if not isinstance(asked, Wanted):
        return []
    is_about_statistics = asked.to in ("sync", "frozen") or bool(passed_by)
    return [name for name, layer in found.unknown.items() if keeps_statistics(layer) or not is_about_statistics]


def _calibrated(
    model: nn.Module, planned: list[Replacement], batches: Iterable[Any] | None, forward: Forward | None
) -> list[str]:
    """Fit the layers that change the function, if there are batches to fit on; return a remark on each."""
    if batches is None:
        return [_difference(one) for one in planned]
    changing = [one for one in planned if not one.keeps and _can_be_fitted(one)]
    seen = fit.observe(model, changing, batches, forward)
    explained = {id(changing[i]): fit.fit_(changing[i], sums) for i, sums in seen.items()}
    return [_closeness(one, id(one) in explained, explained.get(id(one))) for one in planned]


def _can_be_fitted(one: Replacement) -> bool:
    spec = describe(one.layer)
    has_affine = spec is not None and any(one.layer._parameters.get(name) is not None for name in spec.names)
    return spec is not None and (has_affine or one.needs_statistics)


def _difference(one: Replacement) -> str:
    if one.keeps:
        return "evaluation is the same"
    if one.needs_statistics:
        return "evaluation differs: its statistics are those of no batch; recalibrate, or pass calibrate="
    return "evaluation differs"


def _closeness(one: Replacement, was_seen: bool, explained: float | None) -> str:
    if one.keeps:
        return _difference(one)
    if not _can_be_fitted(one):
        return f"{_difference(one)}; it has no gamma or beta to fit"
    if not was_seen:
        return f"{_difference(one)}; no batch reached it"
    if explained is None:
        return "evaluation differs; statistics of the batches, gamma and beta as they were"
    return f"fitted: {explained:.1%} of the old output's variance explained"
