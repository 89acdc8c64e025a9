"""Whether batches alternate between two distributions, from their moments alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.doctor.ledger.account import Sample

FEWEST = 10  # batches that can tell
LEAST_SEPARATION = 5.0
"""Between the centers of two groups of batches, in standard deviations within a group. Two halves of one normal
distribution, cut in the middle, are 2.65 apart."""
LEAST_DISTANCE = 2.5
"""Between the two kinds of batches, in standard errors of a mean over as many examples as a batch has: no difference of
two such means, in all channels together, is that large by chance."""
_LEAST_SHARE = 0.2  # of the batches, in the smaller group: a last, small batch of an epoch is no distribution
_LEAST_SWITCHES = 1 / 8  # for each batch: a network that learns goes from one place to another once, not to and fro
_REACH = 4  # batches before and after one, among which both distributions are expected


class Mixture(NamedTuple):
    """Two groups of batches.

    Attributes:
        distance: root mean square over channels of the distance between their means, in standard deviations within a
            batch; or of that between the logarithms of their standard deviations, if that is larger.
        error: what chance may make of one batch's: one over the root of the number of examples.
        separation: how far the groups lie apart, in standard deviations of batches within a group.
        shares: the parts of the batches that are in each group, the smaller first.
        switches: how often the next batch is of the other group.
        lines: the lines of code that the batches of each group came from.
    """

    distance: float
    error: float
    separation: float
    shares: tuple[float, float]
    switches: int
    lines: tuple[list[str], list[str]]

    @property
    def is_evident(self) -> bool:
        """Whether the batches are of two kinds, in turns, and neither chance nor learning explains it."""
        return (
            self.separation >= LEAST_SEPARATION
            and self.distance >= LEAST_DISTANCE * self.error
            and self.shares[0] >= _LEAST_SHARE
        )


def mixture(samples: Sequence[Sample]) -> Mixture | None:
    """Divide batches, in their order, into two groups; None if there are too few, or they are not in turns."""
    sizes = [sample.batch_size for sample in samples if sample.batch_size]
    if len(samples) < FEWEST or not sizes:
        return None
    features = _features(samples)
    if features is None:
        return None
    along = _along_main_turn(features)
    is_upper = _upper_half(along)
    switches = int((is_upper[1:] != is_upper[:-1]).sum())
    if switches < max(3, len(samples) * _LEAST_SWITCHES):
        return None
    share = is_upper.double().mean().item()
    return Mixture(
        distance=_distance(features[is_upper].mean(0) - features[~is_upper].mean(0)),
        error=torch.tensor(sizes).double().median().rsqrt().item(),
        separation=_separation(along[is_upper], along[~is_upper]),
        shares=(min(share, 1 - share), max(share, 1 - share)),
        switches=switches,
        lines=(_lines(samples, ~is_upper), _lines(samples, is_upper)),
    )


def _features(samples: Sequence[Sample]) -> Tensor | None:
    """A row for each batch: its means in standard deviations, and the logarithms of its standard deviations."""
    mean = torch.stack([sample.moments.mean for sample in samples]).double().cpu()
    var = torch.stack([sample.moments.var for sample in samples]).double().cpu()
    usual = var.median(0).values
    alive = (usual > 0) & mean.isfinite().all(0) & var.isfinite().all(0)
    if not alive.any():
        return None
    mean, var, usual = mean[:, alive], var[:, alive], usual[alive]
    return torch.cat([mean / usual.sqrt(), (var / usual).clamp(min=1e-6).log() / 2], 1)


def _along_main_turn(features: Tensor) -> Tensor:
    """Where batches lie along the direction in which consecutive ones differ most, without what moves slowly.

    Both groups are among the neighbors of a batch: halfway between the outermost of these lies the middle, which
    learning may move as it likes.
    """
    turns = features[1:] - features[:-1]
    direction: Tensor = torch.linalg.svd(turns, full_matrices=False).Vh[0]
    along = features @ direction
    near = [along[max(0, i - _REACH) : i + _REACH + 1] for i in range(len(along))]
    return along - torch.stack([(some.min() + some.max()) / 2 for some in near])


def _upper_half(along: Tensor) -> Tensor:
    """Cut numbers in two where the sum of squares within the parts is least; say which are above the cut."""
    ordered = along.sort().values
    count = torch.arange(1, len(ordered), dtype=along.dtype)
    below = ordered.cumsum(0)[:-1]
    above = ordered.sum() - below
    between = below.square() / count + above.square() / (len(ordered) - count)  # the larger, the less is within
    return along > ordered[int(between.argmax())]


def _separation(upper: Tensor, lower: Tensor) -> float:
    within = torch.stack([(part - part.mean()).square().mean() for part in (upper, lower)]).mean().sqrt()
    return ((upper.mean() - lower.mean()) / within.clamp(min=1e-12)).item()


def _distance(gap: Tensor) -> float:
    """The larger of the root mean squares over the channels, of the means and of the logarithms."""
    return max(part.square().mean().sqrt().item() for part in gap.chunk(2))


def _lines(samples: Sequence[Sample], chosen: Tensor) -> list[str]:
    sites = (sample.site for sample, is_chosen in zip(samples, chosen.tolist(), strict=True) if is_chosen)
    return sorted({str(site) for site in sites if site is not None})
