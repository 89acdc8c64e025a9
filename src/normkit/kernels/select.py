"""The only place that chooses how something is computed, and that says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from normkit.errors import ArgumentError, BackendError
from normkit.kernels import autograd, core, native, plans, reference
from normkit.kernels.plans import Plan
from normkit.kernels.reference import Recipe
from normkit.moments import Moments
from normkit.tracing import is_exporting, is_ordinary, is_recomputing, is_transformed_or_dual

Backend = Literal["auto", "native", "reference"]

_requested: Backend = "auto"


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Ask for a backend inside the block: "auto" takes the C++ loops where they fit; the others run or raise."""
    global _requested
    if name not in get_args(Backend):
        raise ArgumentError(f"backend must be one of {get_args(Backend)}; got {name!r}.")
    before, _requested = _requested, name
    try:
        yield
    finally:
        _requested = before


def status() -> dict[str, str]:
    """Return which kernels are in use, and why not the C++ loops if they are not."""
    if core.WHY_NOT is not None:
        return {"backend": "reference", "why": core.WHY_NOT}
    threads = "torch's" if core.HAS_THREADS else "one: this build of torch does not lend its own"
    return {"backend": "native", "instruction set": core.instruction_set(), "threads": threads}


def moments(x: Tensor, over: tuple[int, ...], mask: Tensor | None = None) -> Moments:
    """Return the moments of x over the dimensions `over`, without them."""
    recipe = Recipe(over, 0.0)
    differentiated = torch.is_grad_enabled() and x.requires_grad
    plan = None if differentiated else plan_for(x, recipe, mask=mask)
    if plan is not None:
        return native.moments(x, plan)
    return _without(over, reference.moments(x, over, mask))


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
        y, both = autograd.normalize(x, weight, bias, residual, plan, inplace)
        return y, plan.moments(both)
    if stays_whole(x, recipe, weight, bias, residual, mask):
        y, (mean, var) = torch.ops.normkit.normalize(x, weight, bias, residual, *recipe)
        return y, Moments(mean, var, reference.count_values(x, recipe.over))
    weight, bias = recipe.view(weight), recipe.view(bias)
    if mask is not None:
        # Padding may hold anything; but no gradient of zero removes a NaN from a sum.
        x = torch.where(mask | x.isfinite(), x, 0)
    if torch.compiler.is_compiling() or is_exporting():
        # The compiler derives and fuses the backward itself, from operators that it can see through; so must exporters.
        y, m = reference.normalize(x, weight, bias, residual, mask, recipe)
        return y, _without(recipe.over, m._replace(mean=m.mean.detach(), var=m.var.detach()))
    y, mean, var = reference.Normalize.apply(x, weight, bias, residual, mask, recipe)
    return y, _without(recipe.over, Moments(mean, var, reference.count_values(x, recipe.over, mask)))


def normalize_stored(
    x: Tensor,
    recipe: Recipe,
    stored: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """Normalize x with statistics that are already known."""
    if not (torch.is_grad_enabled() and (stored.mean.requires_grad or stored.var.requires_grad)):
        plan = plan_for(x, recipe, weight, bias, residual)
        if plan is not None:
            return autograd.normalize_stored(x, stored, weight, bias, residual, plan)
        if stays_whole(x, recipe, weight, bias, residual):
            tensors = (x, weight, bias, residual, stored.mean, stored.var)
            return cast(Tensor, torch.ops.normkit.normalize_stored(*tensors, *recipe)[0])
    return reference.normalize_stored(x, recipe, stored, weight, bias, residual)


def normalize_and_update_(
    x: Tensor,
    recipe: Recipe,
    stored: Moments,
    momentum: float | Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    inplace: bool = False,
) -> Tensor | None:
    """Return what `normalize` does and move the stored statistics along, or do nothing if the C++ loops cannot."""
    plan = plan_for(x, recipe, weight, bias, residual)
    update = None if plan is None else native.update_of(stored, momentum)  # who reads pointers asks first who watches
    if plan is None or update is None:
        return None
    y, _ = autograd.normalize(x, weight, bias, residual, plan, inplace, update)
    native.count_update(stored)
    return y


# ---- ordinary calls: of a small tensor, questions take most of the time. None leaves a call, and what may be wrong
# with it, to the long way. Their callers know that x is a plain tensor and that nothing is being compiled.


def layer_call(
    plan_of: Callable[..., Plan | None], x: Tensor, weight: Tensor | None, bias: Tensor | None, *terms: Any
) -> Tensor | None:
    """A layer's call with statistics of x, planned by one of `plans`."""
    plan = _plan_of_layer(plan_of, x, weight, bias, *terms)
    return None if plan is None else autograd.call(x, weight, bias, plan)


def batch_norm_step_(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
    momentum: float,
    *terms: Any,
) -> Tensor | None:
    """A batch norm's step of training, as `normalize_and_update_`."""
    if is_recomputing() or not _is_plain_memory(mean, var) or mean.is_inference():
        return None
    if count.dtype is not torch.int64 or not count.is_cpu:
        return None
    plan = _plan_of_layer(plans.of_batch, x, weight, bias, mean.shape, *terms)
    if plan is None:
        return None
    update = (mean.data_ptr(), var.data_ptr(), count.data_ptr(), False, momentum)
    y = autograd.call(x, weight, bias, plan, update)
    torch._C._increment_version((mean, var, count))
    return y


def batch_norm_evaluated(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, *terms: Any
) -> Tensor | None:
    """A batch norm's evaluation without a gradient."""
    if torch.is_grad_enabled() or not _is_plain_memory(mean, var):
        return None
    plan = _plan_of_layer(plans.of_batch, x, weight, bias, mean.shape, *terms)
    return None if plan is None else native.evaluate(x, weight, bias, None, mean, var, plan)


def _is_plain_memory(mean: Tensor, var: Tensor) -> bool:
    """Whether running statistics are as a new layer has them."""
    return (
        type(mean) is type(var) is Tensor
        and mean.dtype is var.dtype is torch.float32
        and mean.is_cpu
        and mean.is_contiguous()
        and var.is_contiguous()
    )


def _plan_of_layer(
    plan_of: Callable[..., Plan | None], x: Tensor, weight: Tensor | None, bias: Tensor | None, *terms: Any
) -> Plan | None:
    if (
        _requested == "reference"
        or core.WHY_NOT is not None
        or not x.is_cpu
        or not (weight is None or weight.dtype is torch.float32)
        or not (bias is None or bias.dtype is torch.float32)
        or not is_ordinary()
    ):
        return None
    weight_shape, bias_shape = None if weight is None else weight.shape, None if bias is None else bias.shape
    return plan_of(x.dtype, x.shape, x.stride(), weight_shape, bias_shape, *terms)


class GradientHalves(NamedTuple):
    """The backward of `normalize` in two: what is summed, and how the sums, once shared, spread over x."""

    recipe: Recipe
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None  # this and the output: only where an activation follows the residual
    y: Tensor | None
    mask: Tensor | None
    moments: Moments

    def sums(self, dy: Tensor) -> Tensor:
        """Sums of dz, the gradient behind the activation, and of dz * xhat, for each statistic."""
        plan = self._planned()
        if plan is not None:
            return native.backward_sums(dy, self.x, self.weight, self.bias, self.y, self.moments, plan)
        back, over = self._reference(dy), self.recipe.over
        return torch.stack([back.dz.sum(over), (back.dz * back.xhat).sum(over)])

    def spread(self, dy: Tensor, sums: Tensor, wants_dresidual: bool) -> tuple[Tensor, Tensor | None]:
        """The gradients of x and of the residual, with the sums of everyone who shares the statistics."""
        plan = self._planned()
        if plan is not None:
            return native.backward_apply(
                dy, self.x, self.weight, self.bias, self.y, self.moments, plan, sums, wants_dresidual
            )
        back, weight = self._reference(dy), self.recipe.view(self.weight)
        kept = [1 if d in self.recipe.over else n for d, n in enumerate(self.x.shape)]
        of_g, of_g_xhat = (s.reshape(kept) if weight is None else s.reshape(kept) * weight for s in sums)
        count = torch.as_tensor(self.moments.count).expand(self.moments.mean.shape).reshape(kept)
        dx = back.dx((of_g, of_g_xhat), count, self.mask, self.recipe.centred).to(self.x.dtype)
        return dx, back.dz.to(dy.dtype) if wants_dresidual else None

    def _planned(self) -> Plan | None:
        return plan_for(self.x, self.recipe, self.weight, self.bias, self.residual, self.mask)

    def _reference(self, dy: Tensor) -> reference.Backward:
        kept = [1 if d in self.recipe.over else n for d, n in enumerate(self.x.shape)]
        wide = reference.working_dtype(self.x)
        m = Moments(self.moments.mean.to(wide).reshape(kept), self.moments.var.to(wide).reshape(kept), 0)
        weight, bias = self.recipe.view(self.weight), self.recipe.view(self.bias)
        return reference.Backward.of(dy, self.x, weight, bias, self.residual, m, self.recipe)


def plan_for(
    x: Tensor,
    recipe: Recipe,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Plan | None:
    """Return how the C++ loops are to go over x, or None to leave them out."""
    if _requested == "reference":
        return None
    found = plans.plan(x, recipe, weight, bias, residual, mask)
    if not isinstance(found, str):
        return found
    if _requested == "native" and not stays_whole(x, recipe, weight, bias, residual, mask):
        raise BackendError(f'The C++ loops were asked for and cannot run: {found}. Ask for backend "auto".')
    return None


def exports_whole() -> bool:
    """Whether exported graphs are to hold our operators: only if asked, because they then run only beside normkit."""
    return _requested == "native"


def stays_whole(
    x: Tensor,
    recipe: Recipe,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mask: Tensor | None = None,
) -> bool:
    """Whether the graph being recorded gets an operator of `whole`, which then finds a plan for the tensors it meets.

    A compiler must be able to follow this with tensors that have types but neither memory nor, perhaps, sizes.
    """
    if torch.compiler.is_exporting():
        wanted = exports_whole()
    else:
        wanted = torch.compiler.is_compiling() and _requested != "reference" and type(x) in (Tensor, torch.nn.Parameter)
    return (
        wanted
        and mask is None
        and not is_transformed_or_dual()
        and plans.takes(x, recipe.activation, weight, bias, residual)
    )


def _without(over: tuple[int, ...], kept: Moments) -> Moments:
    """Moments that kept the dimensions `over`, without them."""
    mean, var, count = kept
    if isinstance(count, Tensor):
        count = count.expand(mean.shape).squeeze(over)
    return Moments(mean.squeeze(over), var.squeeze(over), count)
