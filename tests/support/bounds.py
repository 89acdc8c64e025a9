"""How far from float64 a result may lie: the one home of the bound that every backend keeps for float32 and half.

Against float64 on the same input, an error is at most twice torch's own, or a number of units in the last place of the
largest term, whichever is more. The largest term is the largest magnitude that enters the sum in question, among all
values that share statistics:

    output        |xhat * gamma| + |beta| + |residual|, or what an activation makes of their sum
    dx            the three terms of (g - mean(g) - xhat * mean(g * xhat)) / sqrt(var + eps), each by itself
    dweight,      what is summed has n terms of either sign, whose partial sums grow to the root of the sum of their
    dbias         squares; or the sum, where that is more
    running_mean  what is left of the stored mean, the largest |x| times the momentum, or their sum
    running_var   what is left of the stored variance, the largest (x - mean)^2 times the momentum, or their sum
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.activations import ACTIVATIONS

UNITS = {
    "output": 8,
    "dx": 16,
    "dweight": 16,
    "dbias": 16,
    "dresidual": 16,
    "running_mean": 4,
    "running_var": 24,
}


def ulp(size: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between numbers of a type at magnitudes of this size; infinite where the size is not finite."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(size.double().abs())
    half = torch.where(size == 0, 0.0, torch.full_like(size, info.eps / 2, dtype=torch.float64))
    spacing = torch.ldexp(half, exponent).clamp(min=info.smallest_normal * info.eps)
    return torch.where(size.isfinite() & (size.abs() <= info.max), spacing, torch.inf)


class Bound(NamedTuple):
    """What a result is in float64, and what it may be off by."""

    what: str  # a key of UNITS
    truth: Tensor
    largest: Tensor  # term; broadcasts against the truth
    unsure: Tensor | float = 0.0  # what the sign of a value that is zero but for rounding may change

    def allowed(self, dtype: torch.dtype, torchs: Tensor | None = None) -> Tensor:
        """The largest error that this type may show, element by element; `torchs` is torch's own result."""
        units = UNITS[self.what] * ulp(self.largest, dtype) + self.unsure
        if torchs is None:
            return units
        return units.clamp(min=2 * self.errors(torchs).max().item())

    def errors(self, found: Tensor) -> Tensor:
        """How far each element is off: where only one of the two is finite or NaN, as far as can be."""
        value = found.detach().double().reshape(self.truth.shape)
        same = (value == self.truth) | (value.isnan() & self.truth.isnan())
        return torch.where(same, 0.0, (value - self.truth).abs().nan_to_num(nan=torch.inf, posinf=torch.inf))

    def units_of(self, found: Tensor) -> float:
        """The largest error, in units in the last place of the largest term: what a table of errors shows."""
        return (self.errors(found) / ulp(self.largest, found.dtype)).max().item()

    def check(self, found: Tensor, torchs: Tensor | None = None, terms: torch.dtype | None = None) -> None:
        """Raise AssertionError if a result, in the type it has, lies further off than is allowed.

        `terms` is the type of what is summed, where that is less: torch rounds the gradient behind an activation to
        half precision, and then sums it into a parameter's gradient in float32.
        """
        assert found.numel() == self.truth.numel(), f"{self.what}: {tuple(found.shape)}, not {tuple(self.truth.shape)}"
        if not found.numel():
            return
        errors, allowed = self.errors(found), self.allowed(terms or found.dtype, torchs).expand(self.truth.shape)
        if (errors <= allowed).all():
            return
        worst = (errors - allowed).nan_to_num(nan=0.0, posinf=torch.inf).argmax()
        by_torch = "" if torchs is None else f", torch's by at most {self.errors(torchs).max().item():.3g}"
        error, most = errors.flatten()[worst], allowed.flatten()[worst]
        raise AssertionError(
            f"{self.what} in {found.dtype} is off by {error:.3g}, where {most:.3g} is allowed "
            f"({UNITS[self.what]} units of the largest term's last place{by_torch}); "
            f"{self.units_of(found):.3g} units at worst, {int((errors > allowed).sum())} of {errors.numel()} values."
        )


@dataclass(frozen=True)
class Step:
    """A forward and a backward, in the tensors that a kernel gets; weight and bias broadcast against x."""

    x: Tensor
    over: tuple[int, ...]  # dimensions that share statistics
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    mask: Tensor | None = None  # broadcasts against x
    activation: str | None = None
    centred: bool = True
    stored: tuple[Tensor, Tensor] | None = None  # mean and variance to normalize with, which broadcast against x
    dy: Tensor | None = None
    running: tuple[Tensor, Tensor] | None = None  # mean and variance before a step of training
    momentum: float = 0.1


def bounds_of(step: Step) -> dict[str, Bound]:
    """Every result of a step, in float64, with its bound; by the names of UNITS."""
    x, over = step.x.detach().double(), step.over
    mean, var, count = _statistics(step, x)
    inverse_std = (var + step.eps).rsqrt()
    xhat = (x - mean) * inverse_std
    weight, bias = _wide(step.weight, x, 1.0), _wide(step.bias, x, 0.0)
    residual = _wide(step.residual, x, 0.0)
    z = xhat * weight + bias + residual
    terms = ((xhat * weight).abs() + bias.abs() + residual.abs()).amax(over, keepdim=True)
    y = z if step.activation is None else ACTIVATIONS[step.activation].function(z)
    found = {"output": Bound("output", y, torch.maximum(terms, y.abs().amax(over, keepdim=True)))}
    if step.running is not None:
        found |= _running(step, x, mean, var, count)
    if step.dy is not None:
        e_z = Bound("output", z, terms).allowed(step.x.dtype)
        found |= _gradients(step, xhat, weight, inverse_std, z, count, e_z)
    return found


def _statistics(step: Step, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    counted = torch.ones_like(x, dtype=torch.bool) if step.mask is None else step.mask.expand(x.shape)
    count = counted.double().sum(step.over, keepdim=True).clamp(min=1)
    if step.stored is not None:
        return step.stored[0].detach().double(), step.stored[1].detach().double(), count
    kept = torch.where(counted, x, 0)
    mean = kept.sum(step.over, keepdim=True) / count
    if not step.centred:
        mean = torch.zeros_like(mean)
    var = torch.where(counted, x - mean, 0).square().sum(step.over, keepdim=True) / count
    return mean, var, count


def _running(step: Step, x: Tensor, mean: Tensor, var: Tensor, count: Tensor) -> dict[str, Bound]:
    assert step.running is not None
    counted = torch.ones_like(x, dtype=torch.bool) if step.mask is None else step.mask.expand(x.shape)
    m, bessel = step.momentum, count / (count - 1)
    old_mean, old_var = (t.detach().double().reshape(mean.shape) * (1 - m) for t in step.running)
    largest_x = torch.where(counted, x, 0).abs().amax(step.over, keepdim=True)
    largest_square = torch.where(counted, x - mean, 0).square().amax(step.over, keepdim=True)
    new_mean, new_var = old_mean + m * mean, old_var + m * bessel * var
    return {
        "running_mean": Bound("running_mean", new_mean, _largest(old_mean, m * largest_x, new_mean)),
        "running_var": Bound("running_var", new_var, _largest(old_var, m * bessel * largest_square, new_var)),
    }


def _gradients(
    step: Step, xhat: Tensor, weight: Tensor, inverse_std: Tensor, z: Tensor, count: Tensor, e_z: Tensor
) -> dict[str, Bound]:
    assert step.dy is not None
    over, dy = step.over, step.dy.detach().double()
    dz = dy if step.activation is None else dy * ACTIVATIONS[step.activation].slope(z)
    # Within its own rounding of the kink a ReLU's slope is either of two; no other slope changes faster than z.
    either = torch.zeros_like(dy)
    if step.activation is not None:
        has_kink = step.activation in ("relu", "leaky_relu")
        either = dy.abs() * ((z.abs() <= e_z) if has_kink else e_z)
    g, e_g = dz * weight, either * weight.abs()
    own = g * inverse_std
    of_mean = of_xhat = unsure = torch.zeros_like(own)
    if step.stored is None:
        counted = torch.ones_like(xhat, dtype=torch.bool) if step.mask is None else step.mask.expand(xhat.shape)
        of_xhat = torch.where(counted, xhat * (g * xhat).sum(over, keepdim=True) / count * inverse_std, 0)
        unsure = xhat.abs() * (e_g * xhat.abs()).sum(over, keepdim=True) / count
        if step.centred:
            of_mean = torch.where(counted, g.sum(over, keepdim=True) / count * inverse_std, 0)
            unsure = unsure + e_g.sum(over, keepdim=True) / count
    dx = own - of_mean - of_xhat
    found = {
        "dx": Bound("dx", dx, _largest(own, of_mean, of_xhat).amax(over, keepdim=True), (unsure + e_g) * inverse_std),
        "dresidual": Bound("dresidual", dz, dz.abs().amax(over, keepdim=True), either),
    }
    for name, parameter, terms, e_terms in (
        ("dweight", step.weight, dz * xhat, either * xhat.abs()),
        ("dbias", step.bias, dz, either),
    ):
        if parameter is not None:
            found[name] = _of_sum(name, terms, e_terms, parameter)
    return found


def _of_sum(what: str, terms: Tensor, e_terms: Tensor, parameter: Tensor) -> Bound:
    shape = parameter.shape
    total, walked = terms.sum_to_size(shape), terms.square().sum_to_size(shape).sqrt()
    return Bound(what, total, _largest(total, walked), e_terms.sum_to_size(shape))


def _largest(*terms: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*terms)).abs().amax(0)


def _wide(t: Tensor | None, x: Tensor, otherwise: float) -> Tensor:
    return torch.full((1,) * x.dim(), otherwise, dtype=torch.float64) if t is None else t.detach().double()


def bound_of_any(what: str, truth: Tensor, *terms: Tensor) -> Bound:
    """The bound of a layer of another formula: its largest term is the largest of its results or of what is given."""
    sizes = [t.detach().double().abs().max() for t in (truth, *terms) if t.numel()]
    return Bound(what, truth.detach().double(), torch.stack(sizes).amax() if sizes else torch.zeros(()).double())
