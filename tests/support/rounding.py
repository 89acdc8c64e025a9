"""How far two results may lie apart that were computed in another order: one in double, the other in a type's lanes.

Those of float64 are double; all others are float, with sums that are added to one in double now and then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normkit.activations import ACTIVATIONS
from support.problems import Problem

DOUBLE = 1e-13  # what sums of a few thousand doubles lose at most, relative to their terms
FLOAT = 4 * 2.0**-24  # what four roundings to float lose
LANES = 16 * 2.0**-24  # what a formula in float lanes loses, relative to its largest term: sixteen roundings at most
FAR = 4.0  # standard deviations from the mean, at most, of what values are summed about


def neighbours(t: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of this type next below and above, in double; infinity is next to the largest."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize]
    bits, low = t.contiguous().view(kind).long(), torch.iinfo(kind).min
    order = torch.where(bits < 0, low - bits, bits)  # ascends as the numbers do
    most = torch.tensor(torch.inf, dtype=t.dtype).view(kind).long()
    steps = ((order + d).clamp(-most, most) for d in (-1, 1))
    below, above = (torch.where(o < 0, low - o, o).to(kind).view(t.dtype).double() for o in steps)
    return below, above


def assert_rounded_alike(
    found: Tensor, expected: Tensor, slack: Tensor, what: str, lanes: torch.dtype = torch.float32
) -> None:
    """Neighbours in their type at most, or no further apart than `slack`; NaN in the same places.

    Where the slack is not finite, neither is something that the result is made of: it is enough if both or neither are.
    """
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    if not expected.is_floating_point():
        assert torch.equal(found, expected), what
        return
    below, above = neighbours(expected)
    most = torch.finfo(found.dtype).max
    value = found.double().clamp(-most, most)  # where the slack reaches past the largest number, infinity is as near
    near = (value >= below - slack) & (value <= above + slack)
    good = torch.where(expected.isnan(), found.isnan(), near)
    good |= ~slack.isfinite() & (found.isfinite() == expected.isfinite())
    # Terms of either sign that are too large for the lanes they are added in: infinity less infinity.
    good |= (slack > torch.finfo(lanes).max) & ~found.isfinite()
    if not good.all():
        at = tuple((~good).nonzero()[0].tolist())
        text = f"{what}{list(at)} is {found[at].item()!r}, not {expected[at].item()!r}"
        allowed = slack.expand(found.shape)[at].item()
        raise AssertionError(f"{text}; so are {int((~good).sum())} of {tuple(found.shape)}; slack {allowed:.1e}")


def slack_of(p: Problem) -> dict[str, Tensor]:
    """What rounding on the way alone may change in each result: first-order errors of every term of the formulas.

    It is far below a result's own rounding, but where large terms cancel or where an activation has its kink.
    """
    x, dy, residual = (_view(p, p.tensors.get(name)) for name in ("x", "dy", "residual"))
    weight, bias = (_per_channel(p, p.tensors.get(name), other) for name, other in (("weight", 1.0), ("bias", 0.0)))
    residual = x if p.residual_is_x else residual
    over, centred = _over(p), p.family != "rms"

    def average(t: Tensor) -> Tensor:
        return t.mean(over, keepdim=True)

    if p.own_statistics:
        mean = average(x) if centred else torch.zeros_like(average(x))
        var, size = average((x - mean).square()), x.abs().amax(over, keepdim=True)
    else:
        mean, var = (_per_channel(p, p.tensors[name], 0.0) for name in ("mean", "var"))
        size = x.abs() + mean.abs()
    inverse_std = (var + p.eps).rsqrt()
    xhat = (x - mean) * inverse_std
    lanes = DOUBLE if p.tensors["x"].dtype is torch.float64 else LANES
    relative = lanes + DOUBLE * size * inverse_std  # a mean is as exact as its values are large
    e_xhat = relative * (1 + xhat.abs())
    if p.own_statistics and centred:
        e_xhat = e_xhat + lanes * xhat.abs().amax(over, keepdim=True).clamp(max=FAR)
    z = xhat * weight + bias + residual
    e_z = weight.abs() * e_xhat + lanes * ((xhat * weight).abs() + bias.abs() + residual.abs())
    dz, e_dz = _behind_activation(p, dy, z, e_z, lanes)
    g, e_g = dz * weight, e_dz * weight.abs()
    e_dx, terms = e_g, g.abs()
    if p.own_statistics:
        e_dx = e_g + average(e_g) + xhat.abs() * average(e_g * xhat.abs() + g.abs() * e_xhat)
        e_dx = e_dx + e_xhat * average((g * xhat).abs())
        terms = terms + average(g.abs()) + xhat.abs() * average((g * xhat).abs())
    of_scale = relative if p.own_statistics else lanes  # stored statistics do not depend on x, which may be NaN
    e_dx = inverse_std * (e_dx + (of_scale + lanes) * terms)
    if p.residual_is_x:  # two gradients, each rounded before they are added
        e_dx = e_dx + e_dz + torch.finfo(p.tensors["x"].dtype).eps * (inverse_std * terms + dz.abs())
    e_dweight = e_dz * xhat.abs() + dz.abs() * e_xhat + lanes * (dz * xhat).abs()
    e_dbias = e_dz + lanes * dz.abs()
    shape = p.tensors["x"].shape
    e_y = 1.2 * e_z if p.activation is None else 1.2 * e_z + lanes * ACTIVATIONS[p.activation].function(z).abs()
    slack = {"y": e_y.reshape(shape), "dx": e_dx.reshape(shape), "dresidual": e_dz.reshape(shape)}
    like = _per_channel(p, torch.empty(p.own), 0.0).shape
    slack |= {n: e.sum_to_size(like).reshape(p.own) for n, e in (("dweight", e_dweight), ("dbias", e_dbias))}
    return slack | _slack_of_stored(p, x, mean, size)


def _behind_activation(p: Problem, dy: Tensor, z: Tensor, e_z: Tensor, lanes: float) -> tuple[Tensor, Tensor]:
    """The gradient of what enters the activation, and its error."""
    if p.activation is None:
        return dy, lanes * dy.abs()
    dz = dy * ACTIVATIONS[p.activation].slope(z)
    if "relu" not in p.activation:
        return dz, dy.abs() * (e_z + lanes)  # no slope changes faster than its argument
    # At the kink, and for NaN, the slope is either. It may be told from the output, as torch's is: then the kink is as
    # wide as what becomes zero there.
    output = torch.finfo(p.tensors["x"].dtype)
    is_clear = z.abs() > e_z.clamp(min=output.smallest_normal * output.eps)
    return dz, dy.abs() * (~is_clear + lanes)


def _slack_of_stored(p: Problem, x: Tensor, mean: Tensor, size: Tensor) -> dict[str, Tensor]:
    if "mean" not in p.tensors or not p.own_statistics:
        return {}
    old_mean, old_var = (p.tensors[name].double().abs() for name in ("mean", "var"))
    spread = (x - mean).abs().amax(_over(p), keepdim=True)
    is_double = p.tensors["x"].dtype is torch.float64
    lanes, lost = (DOUBLE if is_double else LANES), torch.finfo(torch.float64 if is_double else torch.float32).tiny
    new = [t.amax(0).reshape(p.own) for t in (size, spread, spread.square() + size.square() * DOUBLE)]
    return {
        "mean": DOUBLE * (old_mean + new[0]) + lanes * new[1],
        "var": 4 * DOUBLE * old_var + 4 * lanes * new[2] + lost,  # a square may be too small for a lane
    }


# ---- the shapes in which the formulas are the same for all families --------------------------------------------------


def _is_grouped(p: Problem) -> bool:
    return p.family in ("group", "instance") and p.own_statistics


def _over(p: Problem) -> tuple[int, ...]:
    rank, own = p.tensors["x"].dim(), len(p.own)
    if _is_grouped(p):
        return tuple(range(2, rank + 1))
    return tuple(range(rank - own, rank)) if p.family in ("layer", "rms") else (0, *range(1 + own, rank))


def _view(p: Problem, t: Tensor | None) -> Tensor:
    t = torch.zeros(p.tensors["x"].shape) if t is None else t
    return (t.unflatten(1, (p.groups, -1)) if _is_grouped(p) else t).double()


def _per_channel(p: Problem, t: Tensor | None, other: float) -> Tensor:
    t = torch.full(p.own, other) if t is None else t
    rank = p.tensors["x"].dim()
    if p.family in ("layer", "rms"):
        return t.reshape(*[1] * (rank - len(p.own)), *p.own).double()
    own = (p.groups, p.own[0] // p.groups) if _is_grouped(p) else tuple(p.own)
    return t.reshape(1, *own, *[1] * (rank - 1 - len(p.own))).double()
