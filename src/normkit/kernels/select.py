"""The only place that chooses between the C++ loops, torch's own operators and the reference, and that says why.

What neither the loops nor torch have, and computes with `reference` itself, asks `leave_to_reference` first. Calls of
layers without options have a shorter way, to the first two alone: see `layer_calls`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from normkit.errors import ArgumentError, BackendError
from normkit.kernels import autograd, core, fused, gate, masked, mixed, moving, native, plans, reference
from normkit.kernels.mixed import Mix, Mixed
from normkit.kernels.plans import Plan
from normkit.kernels.reference import Recipe
from normkit.moments import Moments
from normkit.tracing import is_exporting, is_transformed_or_dual

Backend = Literal["auto", "native", "torch", "reference"]

_requested: ContextVar[Backend] = ContextVar("normkit backend", default="auto")
requested_eagerly = _requested.get  # as `requested`, for code that is not being compiled
_guarded = threading.local()  # has the same `name`, if not "auto": torch.compile can guard this, but not a ContextVar


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Ask for a backend inside the block: the others than "auto" run or raise.

    "auto" takes the C++ loops where they can run, else torch's operators, else, where torch has none, the reference.
    Other threads keep their own choice. The backward of a call that was not compiled uses the choice of its forward.
    """
    if name not in get_args(Backend):
        raise ArgumentError(f"backend must be one of {get_args(Backend)}; got {name!r}.")
    before = _requested.set(name)
    _guard(name)
    try:
        yield
    finally:
        _requested.reset(before)
        _guard(_requested.get())


def _guard(name: Backend) -> None:
    if name == "auto":
        vars(_guarded).pop("name", None)  # as in a thread that never asked, so that code compiled there serves
    else:
        _guarded.name = name


def requested() -> Backend:
    """Return the backend asked for around this call."""
    if torch.compiler.is_compiling():
        return cast(Backend, getattr(_guarded, "name", "auto"))
    return _requested.get()


def leave_to_reference(what: object) -> None:
    """Let the reference compute `what`, which it alone can; raise if another backend was asked for by name."""
    asked = requested()
    if asked == "native":
        refuse_loops(f"there are none for {what}")
    if asked == "torch":
        _refuse_torch(what)


def refuse_loops(why: str) -> None:
    """Raise: the loops were asked for by name, and cannot run."""
    raise BackendError(f'The C++ loops were asked for and cannot run: {why}. Ask for backend "auto".')


def _refuse_torch(what: object) -> None:
    raise BackendError(f'Torch\'s own operators were asked for and have none for {what}. Ask for backend "auto".')


def status() -> dict[str, str]:
    """Return which kernels are in use, and why: on this CPU, and on the accelerator that torch has found, if any."""
    if core.WHY_NOT is not None:
        found = {"backend": "torch", "why": core.WHY_NOT}
    else:
        found = {"backend": "native", "instruction set": core.instruction_set(), "threads": core.threads()}
    accelerator = _accelerator()
    if accelerator is not None:
        found[f"backend on {accelerator}"] = "torch: the C++ loops run on CPUs"
    return found


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else device.type


def moments(x: Tensor, over: tuple[int, ...], mask: Tensor | None = None, centred: bool = True) -> Moments:
    """Return the moments of x over the dimensions `over`, without them."""
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    if needs_grad and requested() == "native":
        refuse_loops("there are none for moments with a gradient")
    if not needs_grad and (plan := plan_for(x, Recipe(over, 0.0, None, centred), mask=mask)) is not None:
        return native.moments(x, plan, mask)
    is_differentiated = mask is not None and (needs_grad or is_transformed_or_dual())
    if centred and takes_torch("moments of a mask with a gradient" if is_differentiated else None):
        return fused.moments(x, over, mask)
    return reference.without(over, reference.moments(x, over, mask, centred))


def normalize(
    x: Tensor,
    recipe: Recipe,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Moments]:
    """Normalize x with its own moments over the dimensions `recipe.over`; they come back detached and without those.

    Asked to work in place, the loops do so where the backward can work the input out from the output.
    """
    plan = plan_for(x, recipe, weight, bias, residual, mask)
    if plan is not None:
        mask = None if mask is None else mask.contiguous()
        y, both, _ = autograd.normalize(x, weight, bias, residual, plan, inplace, mask=mask)
        return y, plan.moments(both, mask)
    if stays_whole(x, recipe, weight, bias, residual, mask):
        y, (mean, var) = torch.ops.normkit.normalize(x, weight, bias, residual, *recipe)
        return y, Moments(mean, var, reference.count_values(x, recipe.over))
    if takes_torch(fused.why_not(x, recipe, mask)):
        return fused.normalize(x, recipe, weight, bias, residual, mask, inplace)
    weight, bias = recipe.view(weight), recipe.view(bias)
    if mask is not None:
        # Padding may hold anything; but no gradient of zero removes a NaN from a sum.
        x = torch.where(mask | x.isfinite(), x, 0)
    if torch.compiler.is_compiling() or is_exporting():
        # The compiler derives and fuses the backward itself, from operators that it can see through; so must exporters.
        y, m = reference.normalize(x, weight, bias, residual, mask, recipe)
        return y, reference.without(recipe.over, m.detach())
    y, mean, var = reference.Normalize.apply(x, weight, bias, residual, mask, recipe)
    return y, reference.without(recipe.over, Moments(mean, var, reference.count_values(x, recipe.over, mask)))


def normalized(
    x: Tensor,
    recipe: Recipe,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """As `normalize`, for callers that have no use for the moments, which cost some operators a pass of their own."""
    plan = plan_for(x, recipe, weight, bias, residual)
    whole = plan is not None or stays_whole(x, recipe, weight, bias, residual)
    if not whole and takes_torch(fused.why_not(x, recipe)):
        return fused.normalized(x, recipe, weight, bias, residual)
    return normalize(x, recipe, weight=weight, bias=bias, residual=residual)[0]


def normalize_stored(
    x: Tensor,
    recipe: Recipe,
    stored: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """Normalize x with statistics that are already known."""
    if torch.is_grad_enabled() and (stored.mean.requires_grad or stored.var.requires_grad):
        if requested() == "native":
            refuse_loops("there are none for stored statistics with a gradient")
    elif (plan := plan_for(x, recipe, weight, bias, residual)) is not None:
        return autograd.normalize_stored(x, stored, weight, bias, residual, plan)
    elif stays_whole(x, recipe, weight, bias, residual):
        tensors = (x, weight, bias, residual, stored.mean, stored.var)
        return cast(Tensor, torch.ops.normkit.normalize_stored(*tensors, *recipe)[0])
    if takes_torch():
        return fused.normalize_stored(x, recipe, stored, weight, bias, residual)
    return reference.normalize_stored(x, recipe, stored, weight, bias, residual)


def normalize_mixed(
    x: Tensor,
    recipe: Recipe,
    mix: Mix,
    parameters: Sequence[Tensor] = (),
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None = None,
) -> Mixed:
    """Normalize x with what `mix` makes of its moments and of these parameters; gradients flow through both."""
    if mask is not None:
        x, mask = torch.where(mask | x.isfinite(), x, 0), mask.contiguous()
    plan = plan_for(x, recipe, weight, bias, residual, mask)
    if plan is not None:
        return mixed.by_loops(x, weight, bias, residual, mask, plan, mix, parameters)
    if requested() == "native":
        refuse_loops("there are none for compiled code here")
    why_not = None if mask is None and recipe.centred else "these statistics with a mask or about zero"
    if not _is_better_by_reference(x) and takes_torch(why_not):
        own = fused.moments(x, recipe.over)
        used = mix(own, *parameters)
        return Mixed.of(fused.normalize_stored(x, recipe, used, weight, bias, residual), own, used)
    return mixed.by_reference(x, weight, bias, residual, mask, recipe, mix, parameters)


def normalize_among(
    x: Tensor,
    recipe: Recipe,
    others: Moments,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
) -> Mixed:
    """Normalize x with its moments and those of others, merged; gradients flow through its own."""
    if mask is None and isinstance(others.count, int):
        plan = plan_for(x, recipe, weight, bias, residual)
        if plan is not None:
            return mixed.merged_by_loops(x, weight, bias, residual, plan, others)
    return normalize_mixed(x, recipe, others.merge, weight=weight, bias=bias, residual=residual, mask=mask)


def normalize_known(
    x: Tensor,
    recipe: Recipe,
    own: Moments,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """As `normalize`, of x whose moments are already known; gradients flow through them all the same."""
    plan = None if mask is not None else plan_for(x, recipe, weight, bias, residual)
    if plan is None:
        return normalize(x, recipe, weight=weight, bias=bias, residual=residual, mask=mask)[0]
    return autograd.normalize_known(x, own, weight, bias, residual, plan)


def _is_better_by_reference(x: Tensor) -> bool:
    """Whether a formula is left to the reference: in float64 it takes no longer, and loses fewer digits."""
    return x.dtype is torch.float64 and requested() == "auto"


def normalize_moving(
    x: Tensor,
    recipe: Recipe,
    used: moving.Statistics,
    ring: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """Normalize x, (N, C, H, W), with statistics of the last batches; the backward has some too, in a ring."""
    plan = plan_for(x, recipe, weight, bias, residual)
    if plan is not None:
        return moving.by_loops(x, used, ring, weight, bias, residual, plan)
    leave_to_reference("moving averages here")
    z = moving.by_operators(x.to(reference.working_dtype(x)), used, ring, recipe.eps)
    weight, bias = recipe.view(weight), recipe.view(bias)
    return reference.finish(z if weight is None else z * weight, bias, residual, recipe.activation).to(x.dtype)


def gated(x: Tensor, terms: gate.Terms) -> tuple[Tensor, Moments]:
    """Return a function of x, (N, C, H, W), and the moments of its groups of channels, (N, groups) and detached."""
    grouped, recipe = terms.grouped(x), terms.recipe
    plan = plan_for(grouped, recipe)
    if plan is not None and gate.takes(x):
        return gate.by_loops(x, terms, plan)
    if requested() == "native":
        refuse_loops(f"there are none for {x.dtype}" if plan is not None else "there are none for compiled code here")
    if not _is_better_by_reference(x) and takes_torch():
        wide = x.to(masked.statistics_dtype(x))
        if recipe.centred:
            own = fused.moments(grouped, recipe.over)
        else:
            square = terms.grouped(wide).square().mean(recipe.over)
            own = Moments(torch.zeros_like(square), square, reference.count_values(grouped, recipe.over))
        return gate.by_operators(wide, own, terms).to(x.dtype), own.detach()
    return gate.by_reference(x, terms)


def normalize_and_update_(
    x: Tensor,
    recipe: Recipe,
    stored: Moments,
    momentum: float | Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    nonfinite: str = "propagate",
    refuse: Callable[[Moments], None] | None = None,
    inplace: bool = False,
) -> Tensor | None:
    """Return what `normalize` does and move the stored statistics along, or do nothing if no backend can do both.

    Moments that are not finite go to `refuse`, which raises, if `nonfinite` is "raise".
    """
    plan = plan_for(x, recipe, weight, bias, residual, mask)
    if plan is not None:
        update = native.update_of(*stored, momentum, nonfinite)
        if update is None:
            return None
        mask = None if mask is None else mask.contiguous()
        y, both, outcome = autograd.normalize(x, weight, bias, residual, plan, inplace, update, mask)
        if outcome == native.NON_FINITE and refuse is not None:
            refuse(plan.moments(both, mask))
        native.count_update(*stored)
        return y
    whole = stays_whole(x, recipe, weight, bias, residual, mask)
    if mask is not None or nonfinite != "propagate" or whole or not takes_torch(fused.why_not(x, recipe)):
        return None
    return fused.normalize_and_update_(x, recipe, stored, momentum, weight, bias, residual, inplace)


def renormalize(
    x: Tensor,
    recipe: Recipe,
    stored: Moments,
    momentum: float | Tensor | None,
    limits: Callable[[], tuple[float, float]] | None,
    correction: Tensor | None = None,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None,
    nonfinite: str = "propagate",
    refuse: Callable[[Moments], None] | None = None,
) -> tuple[Tensor, Moments, Tensor] | None:
    """Return a batch renormalized within limits, its moments, and r and d as (2, C); and move the stored statistics.

    With a correction that is given, nothing moves. None, and nothing done, if the loops cannot.
    """
    plan = plan_for(x, recipe, weight, bias, residual, mask)
    if plan is None:
        return None
    update = native.NO_UPDATE if limits is None else native.update_of(*stored, momentum, nonfinite)
    if update is None:
        return None
    mask = None if mask is None else mask.contiguous()
    if limits is None:
        assert correction is not None
        renorm = native.Renorm(correction)
    else:
        empty = torch.empty(2, plan.statistics, dtype=torch.float64)
        renorm = native.Renorm(empty, (stored.mean, stored.var), limits())
    y, both, outcome = autograd.normalize(x, weight, bias, residual, plan, False, update, mask, renorm)
    own = plan.moments(both, mask)
    if outcome == native.NON_FINITE and refuse is not None:
        refuse(own)
    if limits is not None:
        native.count_update(*stored)
    return y, own, renorm.correction


def takes_torch(why_not: str | None = None) -> bool:
    """Whether torch's operators compute a call that the loops do not, unless there is a reason that they cannot.

    What compilers and exporters record stays made of the reference's operators, which they fuse, or write out, whole.
    """
    asked = requested()
    if asked == "torch" and why_not is not None:
        _refuse_torch(why_not)
    if asked == "auto" and (torch.compiler.is_compiling() or is_exporting()):
        return False
    return asked != "reference" and why_not is None


def plan_for(
    x: Tensor,
    recipe: Recipe,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Plan | None:
    """Return how the C++ loops are to go over x, or None to leave them out."""
    asked = requested()
    if asked in ("reference", "torch"):
        return None
    found = plans.plan(x, recipe, weight, bias, residual, mask)
    if not isinstance(found, str):
        return found
    if asked == "native" and not stays_whole(x, recipe, weight, bias, residual, mask):
        refuse_loops(found)
    return None


def exports_whole() -> bool:
    """Whether exported graphs are to hold our operators: only if asked, because they then run only with normkit."""
    return requested() == "native"


def stays_whole(
    x: Tensor,
    recipe: Recipe,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None = None,
) -> bool:
    """Whether the graph being recorded gets an operator of `ops`, which plans for the tensors it gets when it runs.

    A compiler must be able to follow this with tensors that have types but neither memory nor, perhaps, sizes.
    """
    if torch.compiler._is_exporting_flag:  # see tracing.is_exporting
        wanted = exports_whole()
    else:
        is_plain = type(x) in (Tensor, torch.nn.Parameter)
        wanted = torch.compiler.is_compiling() and requested() not in ("reference", "torch") and is_plain
    return (
        wanted
        and mask is None
        and not is_transformed_or_dual()
        and plans.takes(x, recipe.activation, weight, bias, residual)
    )
