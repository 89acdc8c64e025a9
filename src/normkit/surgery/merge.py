"""Several models of one build as one: parameters averaged, statistics merged as moments with their counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, overload

import torch
from torch import Tensor, nn

from normkit.errors import ArgumentError, NonFiniteError
from normkit.moments import Moments
from normkit.named_layers import display_name
from normkit.surgery.checkpoint.state import check_has_values, fill, state_of
from normkit.surgery.norms import STATISTICS, Norm, norms, state_prefixes
from normkit.surgery.operation import operation
from normkit.surgery.result import Surgery

State = Mapping[str, Any]
MEAN, VAR, COUNT = STATISTICS


@overload
def merge(models: Iterable[nn.Module], weights: Iterable[float] | None = None) -> Surgery: ...
@overload
def merge(models: Iterable[State], weights: Iterable[float] | None = None) -> dict[str, Any]: ...
def merge(models: Iterable[Any], weights: Iterable[float] | None = None) -> Surgery | dict[str, Any]:
    """Make one model of several of the same build: snapshots of a run, members of a soup, clients of a round.

    Parameters are averaged. Running means and variances are merged as moments are: the variance of all data together
    has the spread of the means in it, which an average of variances leaves out. Numbers of batches are added up.
    Whatever is equal in all models stays as it is, bit for bit.

    Statistics of inner layers belong to the weights that made them. Where the models are far apart, follow with
    `recalibrate`, if there are data.

    Args:
        models: models, or their state_dicts. A state_dict does not say what its layers are: there, statistics are what
            torch calls `running_mean` and `running_var`.
        weights: of each model, such as its number of examples; they need not sum to 1. Without them parameters have
            equal weights, and statistics those of the batches that they were taken over, where all models count them.

    Returns:
        Of models, a `Surgery` whose model is a merged copy of the first; of state_dicts, a state_dict.
    """
    given = list(models)
    shares = _shares(given, weights)
    if all(isinstance(one, nn.Module) for one in given):
        return _merged_models(given, shares)
    if all(isinstance(one, Mapping) for one in given):
        for state in given:
            check_has_values(state)
        places = [key.removesuffix(VAR) for key in given[0] if key.endswith(VAR)]
        return _merged_states(given, shares, [place for place in places if f"{place}{MEAN}" in given[0]])
    kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in given))
    raise ArgumentError(f"merge needs models, or state_dicts, and not both; got {kinds}.")


def _merged_models(models: Sequence[nn.Module], shares: Sequence[float] | None) -> Surgery:
    with operation(models[0], inplace=False) as op:
        own = norms(models[0])
        for number, other in enumerate(models[1:], start=2):
            _must_have_equal_norms(own, norms(other), number)
        with_moments = {norm.name for norm in own if _stores_moments(norm)}
        places = state_prefixes(models[0], [norm.layer for norm in own if norm.name in with_moments])
        fill(op.model, _merged_states([state_of(model) for model in models], shares, places))
        for norm in own:
            if norm.name in with_moments:
                op.change(norm.name, "statistics merged", "as moments, which have the spread of the means in them")
            elif list(norm.layer.buffers()):
                why = norm.spec.stores_instead or "statistics that are not the moments of batches"
                op.change(norm.name, "averaged", f"stores {why}")
            else:
                op.change(norm.name, "averaged", "stores no statistics")
        return op.result()


def _stores_moments(norm: Norm) -> bool:
    """Whether a norm stores the means and variances of batches; one set for each domain is several of them."""
    is_fit = norm.spec.stores_batch_moments or norm.spec.kind == "domain"
    return is_fit and all(norm.layer._buffers.get(name) is not None for name in (MEAN, VAR))


def _must_have_equal_norms(own: Sequence[Norm], theirs: Sequence[Norm], number: int) -> None:
    specs = {norm.name: norm.spec for norm in theirs}
    for norm in own:
        other = specs.get(norm.name)
        for what in ("kind", "eps", "num_groups"):
            mine, its = getattr(norm.spec, what), getattr(other, what, None)
            if mine != its:
                raise ArgumentError(
                    f"merge needs models of one build; {display_name(norm.name)} has {what} {mine} in the first and "
                    f"{its} in model {number}."
                )


def _merged_states(states: Sequence[State], shares: Sequence[float] | None, places: Iterable[str]) -> dict[str, Any]:
    """One state of several; `places` are the prefixes of the layers whose statistics are moments."""
    _must_be_alike(states)
    merged = {key: _averaged([state[key] for state in states], shares) for key in states[0]}
    for place in places:
        merged |= _merged_statistics(states, shares, place)
    for key in merged:
        if key.rpartition(".")[2] == COUNT:
            merged[key] = sum(state[key].to(merged[key].device) for state in states)
    return merged


def _averaged(values: Sequence[Any], shares: Sequence[float] | None) -> Any:
    """The average of tensors of numbers; of anything else, and of whole numbers, the first."""
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    if not (first.is_floating_point() or first.is_complex()) or all(_same(first, other) for other in values[1:]):
        return first.detach().clone()
    wide = torch.promote_types(first.dtype, torch.float32)
    parts = shares or [1 / len(values)] * len(values)
    total = sum(part * value.detach().to(first.device, wide) for part, value in zip(parts, values, strict=True))
    assert isinstance(total, Tensor)
    return total.to(first.dtype)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other.to(one.device, one.dtype))


def _merged_statistics(states: Sequence[State], shares: Sequence[float] | None, place: str) -> dict[str, Tensor]:
    """The statistics of one layer, over the data of all."""
    mean, var = (states[0][f"{place}{name}"] for name in (MEAN, VAR))
    wide = torch.promote_types(mean.dtype, torch.float32)
    if all(_same(first, state[f"{place}{name}"]) for name, first in ((MEAN, mean), (VAR, var)) for state in states):
        return {}
    counts = _counts(states, shares, place, mean)
    means, variances = ([state[f"{place}{name}"].to(mean.device, wide) for state in states] for name in (MEAN, VAR))
    whole = reduce(Moments.merge, map(Moments, means, variances, counts))
    return {f"{place}{MEAN}": whole.mean.to(mean.dtype), f"{place}{VAR}": whole.var.to(var.dtype)}


def _counts(states: Sequence[State], shares: Sequence[float] | None, place: str, like: Tensor) -> list[Tensor]:
    """How much the statistics of each state weigh."""
    if shares is not None:
        least = min(share for share in shares if share > 0)  # moments of less than one value count as one
        return [torch.tensor(share / least, device=like.device) for share in shares]
    counted = [state[f"{place}{COUNT}"] for state in states if f"{place}{COUNT}" in state]
    if len(counted) < len(states) or not any(count.any() for count in counted):
        return [torch.ones((), device=like.device)] * len(states)
    return [count.to(like.device).reshape(*count.shape, *[1] * (like.dim() - count.dim())) for count in counted]


def _must_be_alike(states: Sequence[State]) -> None:
    first = states[0]
    for number, state in enumerate(states, start=1):
        missing, extra = [key for key in first if key not in state], [key for key in state if key not in first]
        if missing or extra:
            who = f"model {number} has no {missing[0]}" if missing else f"the first has no {extra[0]}"
            raise ArgumentError(f"merge needs models of one build; {who}, which the other has.")
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if value.shape != first[key].shape:
                raise ArgumentError(
                    f"merge needs models of one build; {key} has shape {tuple(first[key].shape)} in the first and "
                    f"{tuple(value.shape)} in model {number}."
                )
            if value.is_floating_point() and not value.isfinite().all():
                raise NonFiniteError(
                    f"{key} of model {number} has NaN or infinity in it, which would be in the average. Leave that "
                    "model out."
                )


def _shares(models: Sequence[Any], weights: Iterable[float] | None) -> list[float] | None:
    """The part of each model in the whole; None without weights."""
    if not models:
        raise ArgumentError("merge needs at least one model; got none.")
    if weights is None:
        return None
    given = list(weights)
    if len(given) != len(models):
        raise ArgumentError(f"weights needs one number for each of {len(models)} models; got {len(given)}.")
    for weight in given:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ArgumentError(f"weights must be numbers, 0 or more; got {weight!r}.")
    total = math.fsum(given)
    if total == 0:
        raise ArgumentError("weights are all 0: nothing would be left.")
    return [weight / total for weight in given]
