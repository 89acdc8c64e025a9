"""Normalizations of (N, C, H, W) that end in a function of their own, which is more than an activation.

    sigmoid: y = x * sigmoid(v * x) * weight / deviation of the group + bias          (EvoNorm S0, Liu et al. 2020)
    largest: y = x * weight / max(deviation of the batch, v * x + deviation of the instance) + bias    (EvoNorm B0)
    cut off: y = max(x * weight / deviation of the instance + bias, v)                (FRN, Singh & Krishnan 2020)

Deviations are made of the moments of groups of channels, by operators on tensors of their size, which autograd
differentiates; an instance is a group of one channel. The passes over x are those of C++ loops, or operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from normkit.kernels import native, reference
from normkit.kernels.autograd import gradients_of
from normkit.kernels.core import loops
from normkit.kernels.plans import Plan
from normkit.kernels.reference import Recipe
from normkit.moments import Moments

Kind = Literal["sigmoid", "largest", "cut off"]

_KINDS = {"sigmoid": 0, "largest": 1, "cut off": 2}
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SUMS, _COEFFICIENTS = 5, 8  # of every run: kGateSums and kGateCoefficients in csrc/job.h


class Terms(NamedTuple):
    """A function, apart from x."""

    kind: Kind
    groups: int  # of channels that share moments
    centred: bool  # else they are about zero
    weight: Tensor | None
    bias: Tensor | None
    v: Tensor | None  # None: what cuts nothing off
    # What is divided by, of shape (N, groups) or (groups,), from the moments, (N, groups), and from parameters. Called
    # again for second derivatives, so it must not write anything.
    deviations: Callable[..., tuple[Tensor, ...]]
    parameters: tuple[Tensor, ...] = ()

    @property
    def recipe(self) -> Recipe:
        """The moments of `grouped` that are wanted."""
        return Recipe((2, 3, 4), 0.0, None, self.centred)

    def grouped(self, x: Tensor) -> Tensor:
        """The input with its channels in groups: (N, groups, channels of a group, H, W)."""
        return cast(Tensor, x.unflatten(1, (self.groups, x.shape[1] // self.groups)))


def takes(x: Tensor) -> bool:
    """Whether there are loops for values of this type."""
    return x.dtype in _TYPES


def by_loops(x: Tensor, terms: Terms, plan: Plan) -> tuple[Tensor, Moments]:
    """Return the output and the moments, which `plan` goes over."""
    kept: list[Moments] = []
    y = Gate.apply(x, terms.weight, terms.bias, terms.v, terms, plan, kept, *terms.parameters)
    return y, kept[0]


def by_operators(wide: Tensor, moments: Moments, terms: Terms) -> Tensor:
    """Return the output for x and its moments in the type to work in, which is also the output's."""
    size = wide.shape[1] // terms.groups
    found = terms.deviations(moments, *terms.parameters)
    first, *others = (_maps(_of_channels(d.to(wide.dtype), size)) for d in found)
    v = None if terms.v is None else _maps(terms.v.to(wide.dtype))
    z = wide
    if v is not None and terms.kind == "sigmoid":
        z = z * torch.sigmoid(v * z)
    if v is not None and terms.kind == "largest":
        first = torch.maximum(first, v * z + others[0])
    z = z / first
    if terms.weight is not None:
        z = z * _maps(terms.weight)
    if terms.bias is not None:
        z = z + _maps(terms.bias)
    return z if v is None or terms.kind != "cut off" else torch.maximum(z, v)


def by_reference(x: Tensor, terms: Terms) -> tuple[Tensor, Moments]:
    """As `by_loops`, by the reference's operators in its type."""
    wide, over = x.to(reference.working_dtype(x)), terms.recipe.over
    moments = reference.without(over, reference.moments(terms.grouped(wide), over, centred=terms.centred))
    return by_operators(wide, moments, terms).to(x.dtype), moments.detach()


def _of_channels(t: Tensor, size: int) -> Tensor:
    """What groups of this many channels have, (..., groups), for each channel."""
    return t if size == 1 else t.unsqueeze(-1).expand(*t.shape, size).flatten(-2)


def _maps(t: Tensor) -> Tensor:
    """A tensor of channels, or of examples and channels, as it broadcasts against x."""
    return t.reshape(*t.shape, 1, 1)


class Gate(torch.autograd.Function):
    """Two passes forward, over moments and output; two backward, over sums and gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        v: Tensor | None,
        terms: Terms,
        plan: Plan,
        kept: list[Moments],
        *parameters: Tensor,
    ) -> Tensor:
        """Return the output, and leave the moments in `kept`."""
        dense, own = x.contiguous(), native.moments(terms.grouped(x), plan)
        kept.append(own)
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (own.mean, own.var, *parameters)]
            found = terms.deviations(Moments(leaves[0], leaves[1], own.count), *leaves[2:])
            stds = [_of_channels(d, x.shape[1] // terms.groups) for d in found]
        ctx.small = leaves, stds  # a graph of its own, of tensors as small as the statistics
        ctx.terms, ctx.own = terms, own
        ctx.coefficients = _coefficients(x, v, weight, bias, [d.detach() for d in stds])
        ctx.save_for_backward(dense, weight, bias, v, *parameters)
        y = torch.empty_like(dense)
        _run(terms.kind, dense, None, y, None, ctx.coefficients)
        return native.like(y, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight, bias, v and the parameters."""
        x, weight, bias, v, *parameters = ctx.saved_tensors
        wants, kind, size = ctx.needs_input_grad, ctx.terms.kind, x.shape[1] // ctx.terms.groups
        if torch.is_grad_enabled():  # to be differentiated again, everything must be made of operators

            def again(x: Tensor, weight: Any, bias: Any, _: None, v: Any, *parameters: Tensor) -> Tensor:
                terms = ctx.terms._replace(weight=weight, bias=bias, v=v, parameters=parameters)
                return by_reference(x, terms)[0]

            wanted = (*wants[:3], False, wants[3], *wants[7:])
            found = gradients_of(again, wanted, grads[0], x, weight, bias, None, v, *parameters)
            return *found[:3], found[4], None, None, None, *found[5:]
        dy, k, own = native.like(grads[0], x), ctx.coefficients, ctx.own
        sums = k.new_empty(*x.shape[:2], _SUMS)
        _run(kind, x, dy, None, sums, k)
        of_dz, of_u, *rest = sums.unbind(2)
        w, first = k[..., 1], k[..., 3]
        if kind == "largest":
            dweight, dv = of_u, -rest[2] * w
            of_stds: tuple[Tensor, ...] = (-rest[0] * w, -rest[1] * w)
        else:
            dweight = of_u / first
            dv = rest[0] * w / first if kind == "sigmoid" else rest[0]
            of_stds = (-dweight * w / first,)
        # Each value has a share in the gradients of its group's moments: level + slope * (x - mean), with the mean as
        # float lanes have it.
        leaves, stds = ctx.small
        own_stds = [(s, d.sum_to_size(s.shape)) for s, d in zip(stds, of_stds, strict=True) if s.requires_grad]
        made, of_made = zip(*own_stds, strict=True)  # not those that are stored
        found = torch.autograd.grad(made, leaves, of_made, allow_unused=True, retain_graph=True)
        dmean, dvar, *own_d = (torch.zeros_like(t) if d is None else d for d, t in zip(found, leaves, strict=True))
        slope, mean = 2 * dvar / own.count, own.mean.to(torch.float32).to(own.mean.dtype)
        level = slope * (mean - own.mean)
        if ctx.terms.centred:  # else the mean is zero whatever x is
            level = level + dmean / own.count
        k = torch.cat([k[..., :5], *(_of_channels(t, size).unsqueeze(2) for t in (level, slope, mean))], 2)
        dx = torch.empty_like(x)
        _run(kind, x, dy, dx, None, k)
        of_affine = [
            d.sum(0).to(t.dtype) if wanted else None
            for d, t, wanted in zip((dweight, of_dz, dv), (weight, bias, v), wants[1:4], strict=True)
        ]
        return dx, *of_affine, None, None, None, *(d.to(p.dtype) for d, p in zip(own_d, parameters, strict=True))


def _coefficients(
    x: Tensor, v: Tensor | None, weight: Tensor | None, bias: Tensor | None, stds: list[Tensor]
) -> Tensor:
    k = torch.zeros(*x.shape[:2], _COEFFICIENTS, dtype=torch.float64)
    k[..., 0] = -torch.inf if v is None else v.detach()
    k[..., 1] = 1.0 if weight is None else weight.detach()
    if bias is not None:
        k[..., 2] = bias.detach()
    for i, std in enumerate(stds):
        k[..., 3 + i] = std
    return k


def _run(kind: Kind, x: Tensor, dy: Tensor | None, out: Tensor | None, sums: Tensor | None, k: Tensor) -> None:
    pointers = (0 if t is None else t.data_ptr() for t in (x, dy, out, sums, k))
    runs = x.shape[0] * x.shape[1]
    loops.gate(_TYPES[x.dtype], _KINDS[kind], runs, x.numel() // runs, *pointers)
