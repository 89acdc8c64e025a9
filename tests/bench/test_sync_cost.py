"""The cost model of SyncBatchNorm: against exchanges counted by hand, and against links that are known."""

import math

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.bench.sync_cost import (
    Accelerator,
    Link,
    Timing,
    bytes_sent,
    collectives,
    fitted,
    group_sizes,
    most_ranks,
    norm_channels,
    training_seconds,
)
from normkit.errors import ArgumentError
from normkit.lab import models

LINK = Link("a wire", 1e-5, 2e-6, 1e9)


def ring(ranks, size):
    """The seconds until every rank has the blocks of all, each passing on what it got last."""
    held, seconds = [{rank} for rank in range(ranks)], 0.0
    last = list(range(ranks))
    while any(len(one) < ranks for one in held):
        last = [last[rank - 1] for rank in range(ranks)]
        for rank, block in enumerate(last):
            held[rank].add(block)
        seconds += LINK.latency + size / LINK.bandwidth
    return seconds


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_gather_goes_round_the_ring(ranks):
    found = LINK.seconds("all_gather", ranks, 129)
    assert found == pytest.approx(LINK.overhead + ring(ranks, 4 * 129), rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_reduction_halves_what_it_sends_and_doubles_it_again(ranks):
    size, seconds, steps = 4.0 * 4096, LINK.overhead, int(math.log2(ranks))
    for step in range(1, steps + 1):
        seconds += 2 * (LINK.latency + size / 2**step / LINK.bandwidth)
    assert LINK.seconds("all_reduce", ranks, 4096) == pytest.approx(seconds, rel=1e-12)


def test_a_layer_gathers_2c_and_1_numbers_and_sums_2c():
    assert collectives(64, 8) == (("all_gather", 8, 129), ("all_reduce", 8, 128))
    assert bytes_sent([64, 10], 2) == 4 * (129 + 128 + 21 + 20)
    assert LINK.sync_seconds([64, 10], 2) == pytest.approx(
        4 * LINK.overhead + 6 * LINK.latency + bytes_sent([64, 10], 2) / LINK.bandwidth, rel=1e-12
    )
    assert LINK.sync_seconds([64], 1) == bytes_sent([64], 1) == 0.0


def timings(link, ranks=(2, 4)):
    return [
        Timing(name, count, numbers, link.seconds(name, count, numbers))
        for name in ("all_gather", "all_reduce")
        for count in ranks
        for numbers in (17, 4097, 262145)
    ]


def test_a_link_is_found_again_by_its_collectives():
    found = fitted("found", timings(LINK))
    for name in ("overhead", "latency", "bandwidth"):
        assert getattr(found, name) == pytest.approx(getattr(LINK, name), rel=1e-6)


def test_no_cost_is_negative():
    """Collectives that get faster with more ranks, as noise may have it."""
    odd = [one._replace(seconds=one.seconds / one.ranks**2) for one in timings(LINK)]
    found = fitted("odd", odd)
    assert found.overhead >= 0
    assert found.latency >= 0
    assert found.bandwidth > 0
    with pytest.raises(ArgumentError, match="three numbers to fit; got timings of 2"):
        fitted("few", odd[:2])


def test_channels_are_those_of_the_layers_that_would_be_synchronized():
    model = models.resnet18(nk.BatchNorm2d, width=8, init=None)
    channels = norm_channels(model)
    synced = nk.convert(model, to="sync").model
    assert channels == [layer.num_features for layer in synced.modules() if isinstance(layer, nk.SyncBatchNorm)]
    assert len(channels) == 20
    assert norm_channels(nk.convert(model, to="group").model) == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_takes_its_arithmetic_or_its_memory(device):
    with torch.device(device):
        model, x = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), torch.empty(2, 3, 10, 10)
    operations, values = 2 * 2 * 8 * 100 * 27, 2 * 8 * 100
    slow_products, slow_memory = Accelerator(1.0, 1e30), Accelerator(1e30, 1.0)
    assert training_seconds(model, x, slow_products) == pytest.approx(3 * operations, rel=1e-6)
    assert training_seconds(model, x, slow_memory) == pytest.approx(3 * 2 * (600 + 3 * values), rel=1e-6)
    both = training_seconds(model, x, Accelerator(operations, 2.0 * 2 * values))  # a second for each layer
    assert both == pytest.approx(3 * (1 + 1), rel=1e-6)
    assert training_seconds(model, x, Accelerator(operations, 1e30, 0.5)) == pytest.approx(3 * (1 + 0.5), rel=1e-6)
    assert model.training


def test_how_far_it_reaches_and_how_many_are_enough():
    assert most_ranks(lambda ranks: ranks / 100, 0.1, [2, 8, 16, 4]) == 8
    assert most_ranks(lambda ranks: ranks / 100, 0.01, [2, 4]) is None
    assert most_ranks(lambda ranks: math.nan, 0.1, [2, 4]) is None
    assert dict(group_sizes(32, [2, 16, 24, 64])) == {2: 16, 16: 2, 24: 2, 64: 1}
