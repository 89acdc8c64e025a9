"""Recognizing norms by what they compute: a copy of a module runs on random inputs, and is compared with a norm.

A layer or RMS norm is gamma * n + beta, where n is the input, with or without its mean, over sqrt(its variance or mean
square + eps). For large inputs eps does not show: the straight line of the outputs over n, channel by channel, gives
gamma and beta, if there is one. Inputs of all scales then give eps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from normkit.snapshot import same_random_state
from normkit.spec.candidate import (
    State,
    any_size,
    bare_copy,
    device_of,
    fingerprint,
    may_be_tried,
    numbers_in,
    sizes_of,
    state_of,
)
from normkit.spec.norm_spec import NormSpec, affine_of

Kind = Literal["rms", "layer"]
_KINDS: tuple[Kind, ...] = ("rms", "layer")

TOLERANCE = 1e-5  # relative to the largest output: many norms compute in float32 whatever their input
_SAME_VECTOR = 1e-4  # of gamma and beta, which come from a fit
_SAME_EPS = 1e-2  # of two values of eps, of which one was measured
_LARGE = 2.0**10  # a scale of inputs at which no eps shows
_SCALES = (-7.5, 1.0)  # logarithms of the least and the largest scale at which it is looked for
_MACHINE_EPSILONS = tuple(torch.finfo(kind).eps for kind in (torch.float32, torch.float64))  # what None is to torch
_MOST_REMEMBERED = 512

_remembered: WeakKeyDictionary[type[nn.Module], dict[Hashable, NormSpec | None]] = WeakKeyDictionary()


def recognized(module: nn.Module) -> NormSpec | None:
    """The norm that a module of another library computes, by trial; None if it computes something else.

    The module itself does not run. What was found is remembered for modules of its class with equal attributes.
    """
    if not may_be_tried(module):
        return None
    key = fingerprint(module)
    if key is None:
        return _tried(module)
    found = _remembered.setdefault(type(module), {})
    if key not in found:
        if len(found) >= _MOST_REMEMBERED:
            found.clear()
        found[key] = _tried(module)
    return found[key]


def computed(spec: NormSpec, module: nn.Module, x: Tensor) -> Tensor:
    """What a layer or RMS norm over one dimension computes by its description, without activation, in float64."""
    dim = 1 if spec.channels_first else -1
    eps = torch.finfo(x.dtype).eps if spec.eps is None else spec.eps
    values = _normalized(x.double().movedim(dim, -1), "layer" if spec.subtracts_mean else "rms", eps)
    weight, bias = (getattr(module, name, None) for name in spec.names)
    if spec.affine in (True, "scale") and weight is not None:
        values = values * (weight.detach().double() + spec.weight_offset)
    if spec.affine in (True, "shift") and bias is not None:
        values = values + bias.detach().double()
    return values.movedim(-1, dim)


def _tried(module: nn.Module) -> NormSpec | None:
    with _without_effects(device_of(module)):
        for dtype in (torch.float64, torch.float32):  # a layer that casts its input, but not its weight, takes float32
            for size in sizes_of(module):
                for arrangement in _arrangements(size or any_size(module)):
                    try:
                        found = _Trial(module, dtype, size, arrangement).found()
                    except Exception:  # whatever other code raises for an input that it does not take
                        continue
                    if found is not None:
                        return found
    return None


@contextmanager
def _without_effects(device: torch.device) -> Iterator[None]:
    """Run other code in full precision, without gradients and warnings, seen by no mode of torch that is active."""
    with ExitStack() as stack:
        stack.enter_context(torch._C._DisableTorchDispatch())
        stack.enter_context(same_random_state())
        stack.enter_context(torch.no_grad())
        if torch.amp.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


class Arrangement(NamedTuple):
    """How rows of channels are put into an input: the sizes of its other dimensions, and where the channels go."""

    outer: tuple[int, ...]
    channels_first: bool

    def tensor(self, rows: Tensor) -> Tensor:
        """Rows (R, C) as an input."""
        found = rows.reshape(*self.outer, rows.shape[1])
        return found.movedim(-1, 1).contiguous() if self.channels_first else found

    def rows(self, tensor: Tensor) -> Tensor:
        """An output as rows."""
        last = tensor.movedim(1, -1) if self.channels_first else tensor
        return last.reshape(-1, last.shape[-1])


def _arrangements(size: int) -> list[Arrangement]:
    """Inputs of the ranks that norms take; none of their other dimensions has the size of the channels.

    Not (N, C): there a norm over channels and positions together looks like one over channels.
    """
    a, b, c, d = [other for other in (2, 4, 3, 5, 6) if other != size][:4]
    last = [(a, b), (a, b, c)]
    second = [(a, b, c), (a, b), (a, b, c, d)]
    return [Arrangement(outer, False) for outer in last] + [Arrangement(outer, True) for outer in second]


class _Trial:
    """One way to run a module: a type, a number of channels, None for any, and a shape of inputs.

    Random values are drawn on the CPU, compared there in float64, and are exact in the type of the trial.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, size: int | None, arrangement: Arrangement) -> None:
        self._module, self._dtype, self._size, self._arrangement = module, dtype, size, arrangement
        self._channels = size or any_size(module)
        self._count = math.prod(arrangement.outer)
        self._generator = torch.Generator().manual_seed(0)
        self._device = device_of(module)
        self._state: State = {name: self._vector() for name in state_of(module)}
        self._twin = self._copy(with_children=False)

    def found(self) -> NormSpec | None:
        """The norm that the module is; None if it is none of those we know."""
        rows = self._rows(torch.full((self._count,), _LARGE, dtype=torch.float64, device="cpu"))
        outputs = self._run(self._twin, rows)
        for kind in _KINDS:
            line = _line(_normalized(rows, kind), outputs)
            spec = None if line is None else self._named(kind, *line)
            if spec is not None and self._stays(rows, outputs):
                return spec
        return None

    def _vector(self) -> Tensor:
        """Values of both signs, none near zero."""
        sizes = self._drawn(torch.rand, self._channels) + 0.5
        return self._exact(sizes * self._drawn(torch.randn, self._channels).sign())

    def _rows(self, scales: Tensor) -> Tensor:
        """Random rows (R, C) of these scales, each with a mean of its own."""
        noise = self._drawn(torch.randn, len(scales), self._channels)
        means = self._drawn(torch.randn, len(scales), 1)
        return self._exact((noise + 0.5 * means) * scales[:, None])

    def _drawn(self, draw: Callable[..., Tensor], *shape: int) -> Tensor:
        return draw(shape, generator=self._generator, dtype=torch.float64, device="cpu")

    def _exact(self, values: Tensor) -> Tensor:
        return values.to(self._dtype).double()

    def _copy(self, *, with_children: bool) -> nn.Module:
        state = {name: values.to(self._device, self._dtype) for name, values in self._state.items()}
        return bare_copy(self._module, state, with_children=with_children)

    def _tensor(self, rows: Tensor) -> Tensor:
        """An input of its own memory, which the module may overwrite."""
        return self._arrangement.tensor(rows).to(self._device, self._dtype, copy=True)

    def _run(self, twin: nn.Module, rows: Tensor) -> Tensor:
        """What the module makes of rows, as rows. Not called: hooks are not part of its function."""
        x = self._tensor(rows)
        y = twin.forward(x)
        if not isinstance(y, Tensor) or y.shape != x.shape or not y.is_floating_point():
            raise TypeError
        return self._arrangement.rows(y.cpu()).double()

    def _named(self, kind: Kind, gamma: Tensor, beta: Tensor) -> NormSpec | None:
        """The norm with these gamma and beta, if they are the module's tensors or none, and with the eps it shows."""
        weight, offset = self._weight(gamma)
        bias = self._called(beta)
        is_scaled = not _same(gamma, torch.ones_like(gamma))
        is_shifted = not _same(beta, torch.zeros_like(beta), gamma)
        if (weight is None and is_scaled) or (bias is None and is_shifted):
            return None
        eps = self._eps(kind, gamma, beta)
        if eps is None:
            return None
        first = self._arrangement.channels_first
        return NormSpec(
            kind=kind,
            over=("C",),
            uses="batch",
            affine=affine_of(weight is not None, bias is not None),
            eps=None if eps in _MACHINE_EPSILONS else eps,
            num_features=self._size if first else None,
            normalized_shape=None if first or self._size is None else (self._size,),
            channels_first=first,
            weight_offset=offset,
            names=(weight or "weight", bias or "bias"),
            exact=False,
        )

    def _weight(self, gamma: Tensor) -> tuple[str | None, float]:
        """What the module calls its gamma, and what it adds to that."""
        for offset in (0.0, 1.0):
            name = self._called(gamma - offset)
            if name is not None:
                return name, offset
        return None, 0.0

    def _called(self, values: Tensor) -> str | None:
        return next((name for name, own in self._state.items() if _same(values, own)), None)

    def _eps(self, kind: Kind, gamma: Tensor, beta: Tensor) -> float | None:
        """The eps that explains the outputs for inputs of all scales; None if there is none."""
        rows = self._rows(torch.logspace(*_SCALES, self._count, dtype=torch.float64, device="cpu"))
        outputs, full = self._run(self._twin, rows), gamma * _normalized(rows, kind)
        squares = _centered(rows, kind).square().mean(1)
        share = ((outputs - beta) * full).sum(1) / full.square().sum(1)  # sqrt(square / (square + eps))
        clearest = (share.square() - 0.5).abs().argmin()  # where eps is about as large as the mean square
        measured = float(squares[clearest] * (share[clearest].square().reciprocal() - 1))
        eps = 0.0 if (share - 1).abs().max() <= TOLERANCE else self._said(measured)
        return eps if _agree(outputs, gamma * _normalized(rows, kind, eps) + beta) else None

    def _said(self, measured: float) -> float:
        """The eps that the module keeps, or a round number, in the place of the measured one."""
        said = (*numbers_in(self._module, float), *_MACHINE_EPSILONS, float(f"{measured:.1e}"))
        return next((eps for eps in said if abs(eps - measured) <= _SAME_EPS * measured), measured)

    def _stays(self, rows: Tensor, outputs: Tensor) -> bool:
        """Whether training changes nothing, and children only follow the norm, one after the other."""
        if not _agree(self._run(self._twin.train(), rows), outputs):
            return False
        if not self._twin._modules:
            return True
        whole, followed = self._copy(with_children=True), self._tensor(outputs)
        for child in whole.children():
            followed = child(followed)
        expected = self._arrangement.rows(followed.cpu()).double()
        return all(_agree(self._run(whole.train(mode), rows), expected) for mode in (False, True))


def _centered(rows: Tensor, kind: Kind) -> Tensor:
    """Each row without its mean, for a layer norm."""
    return rows - rows.mean(-1, keepdim=True) if kind == "layer" else rows


def _normalized(rows: Tensor, kind: Kind, eps: float = 0.0) -> Tensor:
    """Each row, centered for a layer norm, over its root mean square."""
    centered = _centered(rows, kind)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()


def _line(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Slope and intercept of y over x for each column, by least squares; None if y is not on such lines."""
    centered = x - x.mean(0)
    slope = (centered * y).sum(0) / centered.square().sum(0)
    intercept = y.mean(0) - slope * x.mean(0)
    return (slope, intercept) if _agree(y, slope * x + intercept) else None


def _agree(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() <= TOLERANCE * b.abs().max()).all())


def _same(a: Tensor, b: Tensor, size: Tensor | None = None) -> bool:
    """Whether two vectors are the same up to the error of a fit to outputs that are as large as `size`, or as b."""
    largest = (b if size is None else size).abs().max()
    return bool(((a - b).abs() <= _SAME_VECTOR * largest).all())
