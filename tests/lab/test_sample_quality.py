"""Distances have their closed forms; coverage, density, spread and classes are what they are defined as."""

import math

import numpy as np
import pytest
import torch

from normkit.lab import data
from normkit.lab.sample_quality import NEIGHBORS, Balls, Gaussian, Judge, frechet_distance, judge_of, variety

EPS = torch.finfo(torch.float64).eps


def covariance(size, least=0.5):
    """Symmetric, with eigenvalues from `least` on."""
    factor = torch.randn(size, size, dtype=torch.float64)
    return factor @ factor.T / size + least * torch.eye(size, dtype=torch.float64)


def gaussian(covariance, mean=None):
    return Gaussian(torch.zeros(len(covariance), dtype=torch.float64) if mean is None else mean, covariance)


def orthogonal(size):
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q


# ---- Fréchet's distance


def test_the_moments_are_those_of_the_features():
    features = torch.randn(50, 4) * torch.tensor([1.0, 2.0, 0.1, 30.0]) + 5
    found = Gaussian.of(features)
    assert found.mean.dtype == found.covariance.dtype == torch.float64
    np.testing.assert_allclose(found.mean, features.double().numpy().mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(features.double().numpy().T, bias=True), rtol=1e-9, atol=1e-9)


def test_one_dimension():
    one = Gaussian(torch.tensor([1.0]).double(), torch.tensor([[4.0]]).double())
    other = Gaussian(torch.tensor([-2.0]).double(), torch.tensor([[9.0]]).double())
    assert frechet_distance(one, other) == pytest.approx(9 + 1)  # (1 + 2)^2 + (2 - 3)^2


def test_common_axes():
    axes = orthogonal(5)
    one, other = torch.rand(2, 5, dtype=torch.float64) + 0.5
    found = frechet_distance(gaussian(axes * one @ axes.T), gaussian(axes * other @ axes.T))
    assert found == pytest.approx(float((one.sqrt() - other.sqrt()).square().sum()), rel=1e-9, abs=1e-12)


def test_two_dimensions_without_common_axes():
    """The root of a product of 2x2 matrices has the trace sqrt(tr + 2 sqrt(det))."""
    one, other = covariance(2), covariance(2)
    root = ((one @ other).trace() + 2 * (one.det() * other.det()).sqrt()).sqrt()
    expected = float(one.trace() + other.trace() - 2 * root)
    assert frechet_distance(gaussian(one), gaussian(other)) == pytest.approx(expected, rel=1e-9, abs=1e-11)


def test_any_dimension_without_common_axes():
    """A positive T is the shortest way from N(0, S) to N(0, TST): E|x - Tx|^2 = tr (1 - T) S (1 - T)."""
    size = 6
    start, way = covariance(size), covariance(size)
    mean, other_mean = torch.randn(2, size, dtype=torch.float64)
    left = torch.eye(size, dtype=torch.float64) - way
    expected = float((left @ start @ left).trace() + (mean - other_mean).square().sum())
    one, other = gaussian(start, mean), gaussian(way @ start @ way, other_mean)
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(other, one) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rank", [0, 1, 3, 8])
def test_equal_distributions_are_at_no_distance(rank):
    """Also if features depend on each other: eigenvalues of 0 come out as eps, and their roots as its root."""
    factor = torch.randn(8, rank, dtype=torch.float64)
    one = gaussian(factor @ factor.T, torch.randn(8, dtype=torch.float64))
    size = max(1.0, float(one.covariance.trace()))
    assert 0 <= frechet_distance(one, one) <= 2 * 8 * math.sqrt(64 * EPS) * size


def test_a_single_point_is_at_the_distance_of_mean_and_variance():
    one = gaussian(covariance(4), torch.randn(4, dtype=torch.float64))
    point = Gaussian.of(torch.randn(1, 4).expand(30, 4))
    expected = float((one.mean - point.mean).square().sum() + one.covariance.trace())
    bound = 2 * 4 * math.sqrt(64 * EPS) * float(one.covariance.trace())
    assert frechet_distance(one, point) == pytest.approx(expected, abs=bound)
    assert frechet_distance(point, one) == pytest.approx(expected, abs=bound)


# ---- coverage and density


def test_coverage_and_density_are_counted():
    real, samples = torch.randn(30, 3).double(), torch.randn(40, 3).double() * 1.5
    inside = torch.zeros(30, 40)
    for i, center in enumerate(real):
        radius = sorted(float((center - other).norm()) for j, other in enumerate(real) if j != i)[NEIGHBORS - 1]
        inside[i] = torch.tensor([float((center - sample).norm()) < radius for sample in samples])
    coverage, density = Balls(real).coverage_and_density(samples)
    assert coverage == pytest.approx(float(inside.any(1).double().mean()))
    assert density == pytest.approx(float(inside.sum()) / (NEIGHBORS * 40))


def test_a_point_covers_little_and_may_be_dense():
    real = torch.randn(200, 2).double()
    coverage, density = Balls(real).coverage_and_density(real.mean(0).expand(50, 2))
    assert coverage < 0.25
    assert density == pytest.approx(coverage * 200 / NEIGHBORS)  # all samples are in the same balls
    assert Balls(real).coverage_and_density(real)[0] == 1.0
    assert Balls(real).coverage_and_density(real + 100)[0] == 0.0


# ---- the judge


@pytest.fixture(scope="module")
def images():
    return data.load("fashion-mini")


@pytest.fixture(scope="module")
def judge():
    return judge_of("fashion-mini", 10, 200)


def test_test_images_are_what_images_are_compared_with(judge, images):
    pixels, labels = images.test.pixels[:200], images.test.labels[:200]
    found = judge.of(pixels)
    assert 0 <= found["distance"] < 1e-4 * judge.of(255 - pixels)["distance"]
    assert found["coverage"] == 1.0
    of_classes = [(labels == label).nonzero().flatten() for label in labels.unique()]
    within = sum(judge.of(pixels[index])["spread"] * len(index) for index in of_classes) / 200
    assert within == pytest.approx(1.0, rel=1e-4)  # features of other batches may differ in their last digits
    assert found["spread"] > 1  # with what is between classes


def test_a_single_image_has_no_spread_and_one_class(judge, images):
    found = judge.of(images.test.pixels[:1].expand(200, -1, -1, -1))
    assert found["spread"] == pytest.approx(0.0, abs=1e-9)
    assert found["classes"] == pytest.approx(1.0)
    assert found["seen"] == 0.1
    assert found["coverage"] < 0.5


@pytest.mark.parametrize(
    ("labels", "classes", "share"),
    [([3] * 7, 1.0, 0.1), ([0, 1], 2.0, 0.2), ([0, 0, 0, 9], 4 / 3**0.75, 0.2), (list(range(10)), 10.0, 1.0)],
)
def test_classes_are_counted_by_entropy(labels, classes, share):
    assert variety(torch.tensor(labels), 10) == pytest.approx((classes, share))


def test_it_depends_on_its_arguments_alone(judge, images):
    before = torch.get_rng_state()
    again = Judge(images, 10, 200)
    assert torch.equal(torch.get_rng_state(), before)
    # Matrix products round as the alignment of their memory has it: in float32, over ten steps of training.
    assert again.of(images.train.pixels[:100]) == pytest.approx(judge.of(images.train.pixels[:100]), rel=1e-5)
    assert again.real == pytest.approx(judge.real, rel=1e-5)
    assert again.noise == pytest.approx(judge.noise, rel=1e-5)
    assert again.accuracy == pytest.approx(judge.accuracy, abs=0.01)  # of 200 images, two that lie on a boundary
    assert judge_of("fashion-mini", 10, 200) is judge
