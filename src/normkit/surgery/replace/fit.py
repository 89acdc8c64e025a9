"""Fitting gamma and beta, and statistics where there were none, so that a new norm starts close to the old one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.batches import Forward, each_batch, in_evaluation
from normkit.errors import NonFiniteError
from normkit.hooks import BeforeForward, hooked
from normkit.kernels import select
from normkit.layers.batch import PositionBatchNorm2d
from normkit.layers.domain import DomainBatchNorm
from normkit.layers.rms import ScaleNorm
from normkit.moments import Moments
from normkit.named_layers import display_name
from normkit.snapshot import untouched
from normkit.spec import describe
from normkit.surgery.parity import run_example
from normkit.surgery.replace.builders import frozen_twin
from normkit.surgery.replace.carry import AS_BATCH_NORM, Replacement
from normkit.surgery.replace.foreign import plain
from normkit.surgery.replace.sites import first_tensor
from normkit.surgery.replace.stored_forms import copy_to_parts_, write_statistics_

# An input whose variance is below this share of its mean square is constant: all that varies is rounding, which moves
# values by a few units in the last place.
CONSTANT = (64 * torch.finfo(torch.float64).eps) ** 2


class Line(NamedTuple):
    """The straight lines through pairs (x, y), one per channel, and the share of y's variance they explain."""

    slope: Tensor
    intercept: Tensor
    explained: float


class Pairs(NamedTuple):
    """Statistics over pairs of a normalized input x and an old output y, per channel, in float64."""

    x: Moments
    y: Moments
    covariance: Tensor
    batches: int

    @classmethod
    def of(cls, x: Tensor, y: Tensor, over: Sequence[int]) -> Pairs:
        """The statistics of one batch, whose values share a channel over these dimensions."""
        of_x, of_y = (select.moments(values, tuple(over)) for values in (x, y))
        shape = [1 if d in over else n for d, n in enumerate(x.shape)]
        products = (x - of_x.mean.reshape(shape)) * (y - of_y.mean.reshape(shape))
        return cls(of_x, of_y, products.mean(tuple(over)), 1)

    def merge(self, other: Pairs) -> Pairs:
        """The statistics of all pairs together; the covariance is combined as `Moments.merge` combines variances."""
        count = self.x.count + other.x.count
        share, other_share = self.x.count / count, other.x.count / count
        gaps = (other.x.mean - self.x.mean) * (other.y.mean - self.y.mean)
        covariance = share * self.covariance + other_share * other.covariance + share * other_share * gaps
        return Pairs(self.x.merge(other.x), self.y.merge(other.y), covariance, self.batches + other.batches)

    @property
    def are_finite(self) -> bool:
        """Whether no value was NaN or infinite."""
        values = (self.x.mean, self.x.var, self.y.mean, self.y.var)
        return all(bool(value.isfinite().all()) for value in values)

    def standardized(self, mean: Tensor, std: Tensor) -> Pairs:
        """The statistics of (x - mean) / std and y."""
        x = Moments((self.x.mean - mean) / std, self.x.var / std.square(), self.x.count)
        return self._replace(x=x, covariance=self.covariance / std)

    def fit(self, slope: bool, intercept: bool, in_common: bool = False) -> Line:
        """Least squares of y = a * x + b; without a slope a is one, without an intercept b is zero.

        `in_common`: one slope for all channels, without an intercept.
        """
        square = self.x.var + self.x.mean.square()
        spread = self.x.var if intercept else square
        together = self.covariance if intercept else self.covariance + self.x.mean * self.y.mean
        if in_common:
            square, spread, together = (t.sum().expand(t.shape) for t in (square, spread, together))
        moves = spread > CONSTANT * square
        a = torch.where(moves, together / spread.where(moves, 1), 0) if slope else torch.ones_like(square)
        b = self.y.mean - a * self.x.mean if intercept else torch.zeros_like(square)
        about_mean = self.y.var - 2 * a * self.covariance + a.square() * self.x.var
        error = (about_mean.clamp(min=0) + (self.y.mean - a * self.x.mean - b).square()).sum().item()
        total = self.y.var.sum().item()
        return Line(a, b, max(0.0, 1 - error / total) if total else 1.0)


def observe(
    model: nn.Module, replacements: Sequence[Replacement], batches: Iterable[Any], forward: Forward | None
) -> dict[int, Pairs]:
    """Run the unchanged model over all batches, and compare what each replacement computes with the old layer.

    Each replacement gets the inputs of the layer that it will replace. By its index in the sequence; replacements whose
    layer did not run are left out.
    """
    seen: dict[int, Pairs] = {}
    hooks = [(one.site.layer, _comparing(one, index, seen)) for index, one in enumerate(replacements)]
    with untouched(model), in_evaluation(model), hooked(before=hooks):
        for batch in each_batch(batches):
            run_example(model, batch, forward)
    return seen


def _comparing(one: Replacement, index: int, seen: dict[int, Pairs]) -> BeforeForward:
    """A hook that passes a layer's input through the old norm and the new one, both without what follows them."""
    old = _compared(one)
    new = None if one.needs_statistics else _normalizing_only(one.layer)

    def compare(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_tensor(args, kwargs)
        if x is not None:
            x = x.detach().double()
            pairs = Pairs.of(x if new is None else new.forward(x), old.forward(x), _shared(one.layer, x))
            seen[index] = seen[index].merge(pairs) if index in seen else pairs

    return compare


def _compared(one: Replacement) -> nn.Module:
    """What the new layer is to come close to: the old one without its activation, unless that is replaced too."""
    copied = copy.deepcopy(one.source).double().eval()
    spec = describe(one.layer)
    if spec is not None and spec.activation == "evo":
        return copied
    return plain(copied, frozen_twin(one.site))


@torch.no_grad()
def _normalizing_only(layer: nn.Module) -> nn.Module:
    """A copy with gamma at one, beta at zero and nothing after them."""
    bare = plain(layer).double().eval()
    for name, value in (("weight", 1), ("bias", 0)):
        parameter = bare._parameters.get(name)
        if parameter is not None:
            parameter.fill_(value)
    if isinstance(bare, DomainBatchNorm):  # every domain has the same statistics
        bare.domain = 0
        bare.get_buffer("num_batches_tracked").clamp_(min=1)  # or it would refuse to be evaluated
    if "tau" in bare._parameters:
        bare._parameters["tau"] = None
    return bare


def _shared(layer: nn.Module, x: Tensor) -> list[int]:
    """The dimensions over which an input shares gamma and beta."""
    spec = describe(layer)
    if spec is None or not spec.is_over_last:
        return [d for d in range(x.dim()) if d != 1]
    return list(range(x.dim() - len(spec.normalized_shape or (1,))))


@torch.no_grad()
def fit_(one: Replacement, seen: Pairs) -> float | None:
    """Set the new layer's gamma and beta, and its statistics if it has none; return the share they explain.

    None where gamma and beta stay: a layer that without statistics computes nothing to fit them to.
    """
    _must_be_finite(one, seen)
    if one.needs_statistics:
        mean, var = seen.x.mean, seen.x.unbiased_var if seen.x.count > 1 else seen.x.var
        write_statistics_(one.layer, mean, var, seen.batches)
        if not _is_line(one.layer):
            return None
        seen = seen.standardized(mean, (var + one.layer.eps).sqrt())  # type: ignore[operator]
    spec = describe(one.layer)
    assert spec is not None
    weight, bias = (one.layer._parameters.get(name) for name in spec.names)
    line = seen.fit(weight is not None, bias is not None, in_common=isinstance(one.layer, ScaleNorm))
    for parameter, value in ((weight, line.slope - spec.weight_offset), (bias, line.intercept)):
        if parameter is not None:
            parameter.copy_(_as_parameter(one.layer, parameter, value))
    copy_to_parts_(one.layer)
    return line.explained


def _is_line(layer: nn.Module) -> bool:
    """Whether a layer's evaluation is a straight line for each channel, with the statistics that it was given."""
    spec = describe(layer)
    return spec is not None and spec.kind in AS_BATCH_NORM


def _as_parameter(layer: nn.Module, parameter: Tensor, per_channel: Tensor) -> Tensor:
    if isinstance(layer, ScaleNorm):
        return per_channel[:1]
    if isinstance(layer, PositionBatchNorm2d):
        return per_channel[:, None, None]
    return per_channel.expand(parameter.shape)  # of a domain norm, the same for every domain


def _must_be_finite(one: Replacement, seen: Pairs) -> None:
    if not seen.are_finite:
        raise NonFiniteError(
            f"calibrate needs finite values; on these batches {display_name(one.site.name)!r} sees NaN or infinity. "
            "Leave out the batch that has them, or look for the layer that overflows."
        )
