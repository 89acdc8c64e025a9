"""The published code that we are measured against computes what our layers do, gradients and statistics included."""

import pytest
import torch

from normkit.bench.contestants import (
    OF_MAPS,
    OTHERS,
    POINTWISE,
    RELATIVES,
    ghost_of_rows,
    masked_batch_norm,
    other,
    relative,
)

CHANNELS = 64  # what EvoNormS0's 32 groups divide
MAPS = (8, CHANNELS, 3, 4)
STEPS = 18  # more than the batches that any of them remembers


def randomize_(layer):
    for name, t in layer.state_dict().items():
        if t.is_floating_point() and not name.startswith("recent"):
            t.copy_(torch.rand_like(t) + 0.5 if name.endswith(("weight", "var")) else torch.randn_like(t) / 4)


def twins(contestants, theirs="published"):
    """Our layer and the other in float64, with the same random state."""
    ours, other = (contestants[who]().double().train() for who in ("ours", theirs))
    randomize_(ours)
    state = ours.state_dict()
    for name, t in other.state_dict().items():
        last = name.rpartition(".")[2]
        if t.is_floating_point():
            kept = state[last]
            t.copy_(kept[0] if kept.dim() > t.dim() else kept)  # of several domains, the first
    return ours, other


def statistics(layer):
    found = {}
    for name, t in layer.named_buffers():
        last = name.rpartition(".")[2]
        if last.startswith("running") and "norms.1." not in name:
            found[last] = t[0] if t.dim() > 1 else t
    return found


def assert_same_training(ours, other, shape, extras=None, tolerance=1e-9):
    for _ in range(STEPS):
        x, dy = torch.randn(shape, dtype=torch.float64) * 2 + 0.3, torch.randn(shape, dtype=torch.float64)
        found = []
        for layer in (ours, other):
            leaf = x.clone().requires_grad_()
            y = layer(leaf, **(extras or {}))
            gradients = torch.autograd.grad(y, [leaf, *layer.parameters()], dy, allow_unused=True)
            names = ["x", *(name.rpartition(".")[2] for name, _ in layer.named_parameters())]
            found.append({"y": y.detach(), **{n: g for n, g in zip(names, gradients, strict=True) if g is not None}})
        assert found[0].keys() >= {"y", "x"}
        for name in found[0].keys() & found[1].keys():
            torch.testing.assert_close(found[0][name], found[1][name], rtol=tolerance, atol=tolerance * 10)
    kept, expected = statistics(ours), statistics(other)
    assert kept.keys() == expected.keys()
    for name in kept:
        torch.testing.assert_close(kept[name], expected[name], rtol=tolerance, atol=tolerance)
    x = torch.randn(shape, dtype=torch.float64)
    y, expected = (layer.eval()(x, **(extras or {})) for layer in (ours, other))
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("name", RELATIVES)
def test_relatives(name):
    ours, published = twins(relative(name, CHANNELS))
    assert_same_training(ours, published, MAPS)


def test_ghost_of_rows():
    ours, published = twins(ghost_of_rows(CHANNELS, chunk_size=8))
    assert_same_training(ours, published, (24, CHANNELS))


@pytest.mark.parametrize("name", [*OTHERS, *OF_MAPS, *POINTWISE])
def test_others(name):
    ours, published = twins(other(name, CHANNELS))
    shape = (8, 5, CHANNELS) if name in ("ScaleNorm", *POINTWISE) else MAPS
    # ScaleNorm's eps is ours to place: in the mean square, or as the least length.
    assert_same_training(ours, published, shape, tolerance=1e-4 if name == "ScaleNorm" else 1e-9)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_mask_by_hand(activation):
    ours, by_hand = twins(masked_batch_norm(MAPS, activation), "eager")
    assert_same_training(ours, by_hand, MAPS, {"mask": torch.rand(8, 3, 4) < 0.7})
