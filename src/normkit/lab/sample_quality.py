"""How close generated images come to real ones, and how varied they are, in the features of a small classifier."""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import normkit as nk
from normkit.lab import data, models
from normkit.lab.classification import Classification
from normkit.lab.data.randomness import generator
from normkit.lab.data.transforms import standardized
from normkit.lab.data.types import DataSet
from normkit.snapshot import same_random_state

NEIGHBORS = 5
_SEED, _BATCH, _RATE, _MOMENTUM = 0, 64, 0.1, 0.9  # of the classifier's training


class Gaussian(NamedTuple):
    """A mean (D) and a covariance (D, D), in float64."""

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Gaussian:
        """The moments of features (N, D)."""
        features = features.double()
        return cls(features.mean(0), torch.cov(features.T, correction=0))


def frechet_distance(one: Gaussian, other: Gaussian) -> float:
    """|m - n|^2 + tr(S + T - 2 (S^(1/2) T S^(1/2))^(1/2)): the square of Fréchet's distance, as in FID.

    All matrices whose eigenvalues are taken are symmetric, so that these are real. Rounding makes some of those that
    are 0 negative: they count as 0, and so does a distance below it.
    """
    values, vectors = torch.linalg.eigh(one.covariance)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    shared = torch.linalg.eigvalsh(root @ other.covariance @ root).clamp_min(0).sqrt().sum()
    apart = (one.mean - other.mean).square().sum()
    return max(0.0, float(apart + one.covariance.trace() + other.covariance.trace() - 2 * shared))


class Balls:
    """A ball around each real image, up to its fifth neighbor among the others (Naeem et al. 2020)."""

    def __init__(self, features: Tensor) -> None:
        self._centers = features
        self._radii = torch.cdist(features, features).kthvalue(NEIGHBORS + 1).values  # the first is the image itself

    def coverage_and_density(self, samples: Tensor) -> tuple[float, float]:
        """The share of balls with a sample in them, and in how many balls a sample is, relative to the neighbors.

        Of two sets of one size from one distribution the density is expected to be 1, and the coverage nearly 1.
        """
        is_inside = torch.cdist(self._centers, samples) < self._radii[:, None]
        return float(is_inside.any(1).double().mean()), float(is_inside.sum()) / (NEIGHBORS * len(samples))


def variety(labels: Tensor, classes: int) -> tuple[float, float]:
    """How many classes there are among labels, as the exponential of their entropy, and the share of all that occur."""
    shares = torch.bincount(labels, minlength=classes).double() / len(labels)
    return float(torch.special.entr(shares).sum().exp()), float((shares > 0).double().mean())


class Judge:
    """A classifier of a set's own classes, in whose features images are compared with the set's test images.

    It depends on the set, the number of steps that it was trained for and that of test images, and on nothing else, so
    that what it says of different trials can be compared.
    """

    def __init__(self, found: DataSet, steps: int, images: int) -> None:
        classification = Classification(found, images)
        pixels, labels = (of[:images] for of in found.test)
        self._prepare, self._classes = standardized(found.train.pixels), classification.classes
        self._net = _trained(classification, steps)
        with torch.no_grad():
            self.accuracy = classification.accuracy(self._net)
            features, _ = self._seen(pixels)
        self._gaussian, self._balls = Gaussian.of(features), Balls(features)
        self._within = _variance_within(features, labels)
        self.images = len(pixels)
        self.real, self.noise = self.of(found.train.pixels[: self.images]), self.of(_noise(pixels))

    @torch.no_grad()
    def of(self, pixels: Tensor) -> dict[str, float]:
        """What it says of images, uint8 (N, C, H, W).

        `distance` is Fréchet's, `spread` the variance of their features over that of test images of one class, and
        `classes` and `seen` are the `variety` of the classes that it takes them for.
        """
        features, classes = self._seen(pixels)
        gaussian = Gaussian.of(features)
        coverage, density = self._balls.coverage_and_density(features)
        by_entropy, seen = variety(classes, self._classes)
        return {
            "distance": frechet_distance(gaussian, self._gaussian),
            "spread": float(gaussian.covariance.trace()) / self._within,
            "classes": by_entropy,
            "seen": seen,
            "coverage": coverage,
            "density": density,
        }

    def _seen(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The features of images, in float64, and the classes that the net takes them for."""
        features = torch.cat([self._net.features(self._prepare(some)) for some in pixels.split(500)])
        return features.double(), self._net.classifier(features).argmax(1)


@lru_cache(maxsize=2)
def judge_of(name: str, steps: int, images: int) -> Judge:
    """The judge of a set by its name; one that was trained before is not trained again."""
    return Judge(data.load(name), steps, images)


def _trained(images: Classification, steps: int) -> models.ResNet:
    with same_random_state():
        net = images.small_resnet(nk.BatchNorm2d, _SEED)
        optimizer = torch.optim.SGD(net.parameters(), lr=_RATE, momentum=_MOMENTUM, fused=True)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        for x, y in islice(images.batches(_BATCH, _SEED, 0), steps):
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(net(x), y).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def _variance_within(features: Tensor, labels: Tensor) -> float:
    """The variance of features around the mean of their class, summed over features."""
    classes = [features[labels == label] for label in labels.unique()]
    return sum(float((of - of.mean(0)).square().sum()) for of in classes) / len(features)


def _noise(like: Tensor) -> Tensor:
    """Pixels without any order."""
    return torch.randint(0, 256, like.shape, dtype=torch.uint8, generator=generator("noise", _SEED, 0))
