from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normkit.errors import ArgumentError
from normkit.lab.data import Images, batches, windows


def numbered(count):
    """Images that are recognized by their only pixel, and by their label."""
    return Images(torch.arange(count, dtype=torch.uint8).reshape(-1, 1, 1, 1), torch.arange(count))


def noise(pixels, generator):
    return pixels + torch.rand(pixels.shape, generator=generator)


@given(st.integers(1, 200), st.integers(1, 60), st.integers(-5, 2**40), st.integers(0, 50))
def test_going_on_yields_what_would_have_come(count, size, seed, start):
    images = numbered(max(count, size))
    unbroken = list(islice(batches(images, size, seed, transform=noise), start + 7))
    resumed = list(islice(batches(images, size, seed, start, transform=noise), 7))
    for (x, y), (u, v) in zip(unbroken[start:], resumed, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)


@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 9))
def test_an_epoch_shows_no_image_twice(count, size, seed):
    count = max(count, size)
    steps = count // size
    shown = [y for _, y in islice(batches(numbered(count), size, seed), 2 * steps)]
    assert all(len(y) == size for y in shown)
    for epoch in (shown[:steps], shown[steps:]):
        assert len(torch.cat(epoch).unique()) == steps * size


def test_epochs_and_seeds_differ():
    orders = [[y.tolist() for _, y in islice(batches(numbered(200), 100, seed), 4)] for seed in (0, 1)]
    first, second = orders[0][:2], orders[0][2:]
    assert first != second
    assert orders[0] != orders[1]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(200))


def test_pixels_belong_to_labels_and_range_from_0_to_1():
    for x, y in islice(batches(numbered(256), 32, seed=3), 20):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x[:, 0, 0, 0], y / 255)


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    next(batches(numbered(10), 5, 0, transform=noise))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_transform_draws_anew_at_every_step():
    draws = [x - x.floor() for x, _ in islice(batches(numbered(50), 10, 0, transform=noise), 10)]
    assert len(torch.stack(draws).flatten(1).unique(dim=0)) == 10


@pytest.mark.parametrize(
    ("size", "start", "message"), [(0, 0, "from 1 to 10 .* got 0"), (11, 0, "got 11"), (5, -1, "start .* got -1")]
)
def test_what_cannot_be_is_told_at_once(size, start, message):
    with pytest.raises(ArgumentError, match=message):
        batches(numbered(10), size, 0, start)


# ---- windows of a text


@given(st.integers(2, 90), st.integers(1, 60), st.integers(1, 9), st.integers(-5, 2**40), st.integers(0, 50))
def test_windows_go_on_as_they_would_have(characters, length, size, seed, start):
    text, length = torch.arange(characters), min(length, characters - 1)
    unbroken = list(islice(windows(text, length, size, seed), start + 3))
    resumed = list(islice(windows(text, length, size, seed, start), 3))
    for (x, y), (u, v) in zip(unbroken[start:], resumed, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
        assert x.shape == y.shape == (size, length)
        assert torch.equal(x, x[:, :1] + torch.arange(length))  # in a row
        assert torch.equal(y, x + 1)  # what follows each


def test_windows_begin_everywhere():
    begun = torch.cat([x[:, 0] for x, _ in islice(windows(torch.arange(10), 4, 50, seed=1), 20)])
    assert begun.unique().tolist() == list(range(6))  # the last one ends with the text's last character
    other, repeated = (next(windows(torch.arange(1000), 4, 50, seed))[0] for seed in (2, 1))
    assert not torch.equal(other, repeated)
    assert torch.equal(repeated, next(windows(torch.arange(1000), 4, 50, seed=1))[0])


@pytest.mark.parametrize(
    ("length", "size", "start", "message"),
    [(10, 1, 0, "from 1 to 9 .* got 10 and 1"), (0, 1, 0, "got 0 and 1"), (4, 0, 0, "4 and 0"), (4, 1, -1, "got -1")],
)
def test_windows_that_cannot_be_are_told_at_once(length, size, start, message):
    with pytest.raises(ArgumentError, match=message):
        windows(torch.arange(10), length, size, 0, start)
