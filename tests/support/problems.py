"""Calls of the norms with anything that may be passed to them, for tests that compare two ways to compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import normkit as nk

ACTIVATIONS = [None, "relu", "leaky_relu", "silu", "gelu", "sigmoid", "tanh"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LARGE = [(1, 2, 20_000), (2, 1, 150, 150), (33, 40, 5, 6), (9000, 4), (2, 512, 40), (3, 1, 40, 20, 18)]


# ---- tensors -------------------------------------------------------------------------------------------------------


def _sprinkled(values: Tensor, bad: Tensor) -> Tensor:
    return torch.where(torch.rand_like(values) < 2 / max(1, values.numel()), bad, values)


KINDS = {
    "normal": lambda r: 1.5 * r,
    "far": lambda r: r + 1e3,
    "of all sizes": lambda r: r * 10.0 ** (12 * torch.rand_like(r) - 6),
    "few": lambda r: r.round().clamp(-1, 1),
    "large": lambda r: 1e30 * r,
    "tiny": lambda r: 1e-30 * r,
    "constant": lambda r: torch.full_like(r, 0.7),
    "outlier": lambda r: torch.cat([r[:1] + 1e4, r[1:]]),
    "NaN": lambda r: _sprinkled(r, r * torch.nan),
    "infinite": lambda r: _sprinkled(r, r * torch.inf),
}
TAME = ("normal", "far", "of all sizes", "few")


@st.composite
def tensors(draw, shape, dtype, kinds=tuple(KINDS), like=None, writable=False):
    """Values of some kind in memory of some layout and alignment, that of `like` or another, between other values."""
    kind = KINDS[draw(st.sampled_from(kinds))]
    values, most = kind(torch.randn(prod(shape), dtype=torch.float64)), torch.finfo(dtype).max
    values = torch.where(values.isinf(), values, values.clamp(-most, most)).to(dtype).reshape(shape)
    if like is not None and 0 not in like.stride() and draw(st.integers(0, 3)):
        memory = torch.full([like.untyped_storage().nbytes() // like.itemsize], 99.0, dtype=dtype)
        return memory.as_strided(shape, like.stride(), like.storage_offset()).copy_(values)
    return _laid_out(draw, values, writable)


def _laid_out(draw, values: Tensor, writable: bool) -> Tensor:
    rank, order = values.dim(), list(range(values.dim()))
    layout = draw(st.sampled_from(["plain"] * 5 + ["channels last"] * 5 + ["permuted", "strided", "expanded"]))
    if layout == "expanded" and values.numel() and not writable:
        return values.narrow(draw(st.integers(0, rank - 1)), 0, 1).expand(values.shape)
    if layout == "channels last" and rank > 2:
        order = [0, *range(2, rank), 1]
    elif layout == "permuted":
        order = draw(st.permutations(order))
    step, offset = 2 if layout == "strided" else 1, draw(st.integers(0, 3))
    memory = torch.full([offset + step * values.numel() + 3], 99.0, dtype=values.dtype)
    view = memory[offset:-3].view(*(values.shape[d] for d in order), step)[..., 0]
    return view.permute([order.index(d) for d in range(rank)]).copy_(values)


def copied(t: Tensor) -> Tensor:
    """The same tensor in memory of its own: as much of it, and as badly aligned."""
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride())


# ---- problems ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    family: str  # batch, group, instance, layer or rms
    tensors: dict[str, Tensor]  # x and dy, and those of weight, bias, residual, mean and var that there are
    own: Sequence[int]  # the shape of the parameters
    groups: int
    own_statistics: bool  # the input's, not the stored ones
    residual_is_x: bool
    eps: float
    momentum: float
    activation: str | None
    wants: frozenset[str]  # whose gradients
    as_layer: bool

    def __repr__(self) -> str:
        """Without the values, which are many and random."""
        tensors = {n: (tuple(t.shape), t.stride(), t.storage_offset(), t.dtype) for n, t in self.tensors.items()}
        shown = {field.name: getattr(self, field.name) for field in fields(self)} | {"tensors": tensors}
        return f"Problem({', '.join(f'{name}={value}' for name, value in shown.items())})"

    def _repr_pretty_(self, printer, cycle) -> None:  # hypothesis prints examples by this
        printer.text(repr(self))

    def leaves(self) -> dict[str, Tensor]:
        """The tensors in fresh memory, and those that want a gradient ready to get one."""
        return {name: copied(t).requires_grad_(name in self.wants) for name, t in self.tensors.items()}

    def __call__(self, leaves: dict[str, Tensor]) -> Tensor:
        x, residual = leaves["x"], leaves["x"] if self.residual_is_x else leaves.get("residual")
        if self.as_layer:
            return self._layer(leaves)(x, residual=residual)
        weight, bias, mean, var = (leaves.get(name) for name in ("weight", "bias", "mean", "var"))
        extras = {"eps": self.eps, "activation": self.activation, "residual": residual}
        if self.family == "layer":
            return nk.functional.layer_norm(x, self.own, weight, bias, **extras)
        if self.family == "rms":
            return nk.functional.rms_norm(x, self.own, weight, **extras)
        if self.family == "group":
            return nk.functional.group_norm(x, self.groups, weight, bias, **extras)
        function = getattr(nk.functional, f"{self.family}_norm")
        return function(x, mean, var, weight, bias, self.own_statistics, self.momentum, **extras)

    def _layer(self, leaves: dict[str, Tensor]) -> nn.Module:
        """The layer of this call, with these tensors for parameters and buffers."""
        layer = self._bare_layer().train(self.own_statistics)
        for name in ("weight", "bias"):
            if name in leaves:
                leaves[name] = nn.Parameter(leaves[name].detach(), name in self.wants)
            setattr(layer, name, leaves.get(name))
        if "mean" in leaves:
            layer.running_mean, layer.running_var = leaves["mean"], leaves["var"]
        return layer

    def _bare_layer(self) -> nn.Module:
        rank, options = self.tensors["x"].dim(), {"eps": self.eps, "activation": self.activation}
        if self.family in ("layer", "rms"):
            return {"layer": nk.LayerNorm, "rms": nk.RMSNorm}[self.family](self.own, **options)
        if self.family == "group":
            return nk.GroupNorm(self.groups, *self.own, **options)
        options |= {"momentum": self.momentum, "affine": True, "track_running_stats": "mean" in self.tensors}
        if len(self.own) == 3:
            return nk.PositionBatchNorm2d(*self.own, **options)
        return getattr(nk, f"{self.family.title()}Norm{max(1, rank - 2)}d")(*self.own, **options)


@st.composite
def _shapes(draw, family: str):
    """The shapes of an input and of its parameters, and a number of groups."""
    last = family in ("layer", "rms")
    if draw(st.integers(0, 9)) == 9:
        shape = draw(st.sampled_from(LARGE[:3] if family == "instance" else LARGE))
    else:
        rank = draw(st.integers(1 if last else 3 if family == "instance" else 2, 5))
        sizes = [
            st.sampled_from([2, 3, 4, 5, 7, 8, 1, 0]),
            st.integers(1, 40),
            *[st.integers(1, 40 if rank < 4 else 9)] * 3,
        ]
        shape = tuple(draw(size) for size in sizes[:rank])
    if last:
        return shape, shape[draw(st.integers(0 if len(shape) == 1 or draw(st.booleans()) else 1, len(shape) - 1)) :], 1
    if family == "batch" and len(shape) == 4 and draw(st.integers(0, 4)) == 4:
        return shape, shape[1:], 1  # a statistic for each position
    c = shape[1]
    groups = c if family == "instance" else draw(st.sampled_from([g for g in range(1, c + 1) if c % g == 0]))
    return shape, (c,), groups


@st.composite
def problems(draw, family: str, stored: bool = False):
    """A call of a norm, with the input's own statistics or with stored ones."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    shape, own, groups = draw(_shapes(family))
    dtype = draw(st.sampled_from(DTYPES[:3] * 3 + DTYPES[3:]))
    parameter = draw(st.sampled_from([torch.float32] * 4 + [dtype] * 2 + [torch.float64]))
    activation = draw(st.sampled_from(ACTIVATIONS[:3] * 5 + ACTIVATIONS[3:]))
    x = draw(tensors(shape, dtype))
    # What is not finite and meets a slope of zero: the reference multiplies, loops and torch leave it out.
    bad = () if activation == "relu" else ("NaN", "infinite")
    found = {"x": x, "dy": draw(tensors(shape, dtype, (*TAME, *bad), like=x))}
    for name in ("weight", "bias")[: 1 if family == "rms" else 2]:
        if draw(st.booleans()):
            found[name] = draw(tensors(own, parameter, TAME))
    residual = draw(st.sampled_from(["none", "none", "x", "another", "another"]))
    if residual == "another":
        found["residual"] = draw(tensors(shape, draw(st.sampled_from([dtype] * 5 + [torch.float32])), like=x))
    if stored or (family in ("batch", "instance") and draw(st.booleans())):
        statistic = draw(st.sampled_from([torch.float32, parameter]))
        found["mean"] = draw(tensors(own, statistic, TAME, writable=True))
        found["var"] = draw(tensors(own, statistic, TAME, writable=True)).abs_()
    every = frozenset({"x", "weight", "bias", "residual"})
    return Problem(
        family,
        found,
        own,
        groups,
        own_statistics=not stored,
        residual_is_x=residual == "x",
        eps=draw(st.sampled_from([1e-12, 1e-5, 1e-3, 2.0])),
        momentum=draw(st.sampled_from([0.0, 0.1, 0.37, 1.0])),
        activation=activation,
        wants=every if draw(st.booleans()) else draw(st.frozensets(st.sampled_from(sorted(every)))),
        as_layer=draw(st.booleans()),
    )
