"""Two kinds of batches are told from chance, from what learning does, and from a rare, odd batch."""

import pytest
import torch

from normkit.doctor.ledger.account import Sample
from normkit.doctor.ledger.mixture import FEWEST, mixture
from normkit.moments import Moments

SIZE, CHANNELS = 16, 32


def sample(shift=0.0, scale=1.0, size=SIZE):
    """The moments of a batch of vectors: no noise is larger, for positions of one picture only add values."""
    x = shift + scale * torch.randn(size, CHANNELS, dtype=torch.float64)
    return Sample(Moments(x.mean(0), x.var(0), 0), size, None)


def is_mixed(samples):
    found = mixture(samples)
    return found is not None and found.is_evident


@pytest.mark.parametrize("count", [12, 40])
@pytest.mark.parametrize("other", [{"shift": 1.0}, {"scale": 3.0}, {"shift": 2.0, "scale": 0.5}])
def test_alternating_batches_are_two_kinds(count, other):
    samples = [sample(**(other if number % 2 else {})) for number in range(count)]
    assert is_mixed(samples)
    found = mixture(samples)
    assert found.shares == (0.5, 0.5)
    assert found.switches == count - 1
    if other == {"shift": 1.0}:
        assert found.distance == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("drift", [0.05, 0.3])
def test_what_learning_moves_does_not_hide_them(drift):
    samples = [sample(shift=drift * number + (1.5 if number % 2 else 0.0)) for number in range(30)]
    assert is_mixed(samples)


def test_kinds_in_any_order_are_found():
    is_other = torch.rand(50) < 0.4
    assert is_mixed([sample(shift=2.0 if other else 0.0) for other in is_other.tolist()])


@pytest.mark.parametrize("count", [FEWEST, 20, 64])
def test_chance_is_not_two_kinds(count):
    assert not any(is_mixed([sample() for _ in range(count)]) for _ in range(25))


def test_neither_is_learning():
    assert not is_mixed([sample(shift=0.3 * number) for number in range(40)])
    assert not is_mixed([sample(shift=2.0 if number > 20 else 0.0) for number in range(40)])  # once, and for good
    assert not is_mixed([sample(scale=1 + 5 / (1 + number)) for number in range(40)])


def test_nor_are_rare_batches():
    assert not is_mixed([sample(size=2) if number % 10 == 9 else sample() for number in range(40)])
    assert not is_mixed([sample(shift=3.0) if number % 10 == 9 else sample() for number in range(40)])


def test_few_batches_and_dead_channels_tell_nothing():
    assert mixture([sample(shift=2.0 * (number % 2)) for number in range(FEWEST - 1)]) is None
    dead = Sample(Moments(torch.ones(4), torch.zeros(4), 0), SIZE, None)
    assert mixture([dead] * 20) is None
    broken = Sample(Moments(torch.full((4,), float("nan")), torch.ones(4), 0), SIZE, None)
    assert mixture([broken] * 20) is None
