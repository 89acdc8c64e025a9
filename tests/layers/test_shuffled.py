"""Shuffled batch normalization: chunks of a random order, drawn as dropout draws."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import normkit as nk
from support.cases import randomize_
from support.twins import close, randn, same_state, twins


def by_torch(bn, x, chunk_size):
    """Torch's layer, called with one chunk of a permutation after the other; the same draw as ours."""
    order = torch.randperm(len(x))
    y = torch.empty_like(x)
    for chunk in order.split(chunk_size):
        y[chunk] = bn(x[chunk])
    return y


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("examples", [6, 8])
def test_it_is_torchs_layer_on_chunks_of_a_permutation(examples, momentum):
    layer, bn = twins(nk.ShuffledBatchNorm2d, chunk_size=3, momentum=momentum)
    bn.momentum = momentum
    for seed in range(4):
        x = (randn(examples, 4, 3, 3) * 2 + 5).requires_grad_()
        z, dy = x.detach().clone().requires_grad_(), randn(examples, 4, 3, 3)
        torch.manual_seed(seed)
        y = layer(x)
        torch.manual_seed(seed)
        expected = by_torch(bn, z, 3)
        y.backward(dy)
        expected.backward(dy)
        close(y, expected)
        close(x.grad, z.grad)
    same_state(layer, bn)


def test_a_seed_repeats_a_step_and_another_does_not():
    layer, x = randomize_(nk.ShuffledBatchNorm1d(4, chunk_size=4)).double(), randn(32, 4)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(copy.deepcopy(layer)(x))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


def test_evaluation_and_a_single_chunk_draw_nothing():
    layer, bn = twins(nk.ShuffledBatchNorm2d, chunk_size=6)
    x, before = randn(6, 4, 3, 3), torch.get_rng_state()
    close(layer(x), bn(x))
    same_state(layer, bn)
    layer.chunk_size = 2
    close(layer.eval()(x), bn.eval()(x))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_query_and_its_key_do_not_share_statistics():
    """What leaks in contrastive learning: with one order, whoever is in a key's chunk is in its query's."""
    x = randn(64, 4) + torch.arange(8).repeat_interleave(8)[:, None] * 10  # each chunk has a mean of its own
    query, key = nk.GhostBatchNorm1d(4, chunk_size=8).double(), nk.ShuffledBatchNorm1d(4, chunk_size=8).double()
    plain = copy.deepcopy(query)

    def mates(layer):
        """Whose output moves with the first example's."""
        torch.manual_seed(1)
        first = copy.deepcopy(layer)(x)
        torch.manual_seed(1)
        moved = copy.deepcopy(layer)(torch.cat([x[:1] + 100, x[1:]]))
        return set(((moved - first).abs().amax(1) > 1e-9).nonzero().flatten().tolist())

    assert mates(query) == mates(plain) == set(range(8))
    assert len(mates(key)) == 8
    assert mates(key) != mates(query)


def test_masks_and_residuals_go_along():
    layer = randomize_(nk.ShuffledBatchNorm2d(4, chunk_size=3, activation="relu")).double()
    twin = nk.GhostBatchNorm2d(4, chunk_size=3, activation="relu").double()
    twin.load_state_dict(layer.state_dict())
    x, r, mask = randn(7, 4, 3, 3), randn(7, 4, 3, 3), torch.rand(7, 3, 3) > 0.3
    torch.manual_seed(5)
    order = torch.randperm(7)
    torch.manual_seed(5)
    y = layer(x, residual=r, mask=mask)
    close(y[order], twin(x[order], residual=r[order], mask=mask[order]))
    same_state(layer, twin)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_repeats_the_draw(use_reentrant):
    layer = randomize_(nk.ShuffledBatchNorm2d(4, chunk_size=2)).double()
    plain = copy.deepcopy(layer)
    x, dy = randn(8, 4, 3, 3).requires_grad_(), randn(8, 4, 3, 3)
    twin = x.detach().clone().requires_grad_()
    torch.manual_seed(2)
    y = checkpoint(layer, x, use_reentrant=use_reentrant)
    torch.manual_seed(2)
    z = plain(twin)
    y.backward(dy)
    z.backward(dy)
    assert torch.equal(y, z)
    assert torch.equal(x.grad, twin.grad)
    same_state(layer, plain, 0)


def test_compiled_it_still_draws():
    torch.compiler.reset()
    layer, x = nk.ShuffledBatchNorm1d(4, chunk_size=4), torch.randn(32, 4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(compiled(x))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    torch.compiler.reset()


def test_what_it_refuses_it_refuses_before_it_draws():
    layer, x = randomize_(nk.ShuffledBatchNorm2d(4, chunk_size=2)), torch.randn(6, 4, 3, 3)
    state, before = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    for call, message in (
        (lambda: layer(x[:, :3]), r"needs \(N, 4, H, W\); got \(6, 3, 3, 3\)"),
        (lambda: layer(x, residual=x[:2]), r"residual of the input's shape \(6, 4, 3, 3\); got \(2, 4, 3, 3\)"),
        (lambda: layer(x, mask=torch.ones(2, 3, 3) > 0), r"a mask of shape \(6, 3, 3\)"),
    ):
        with pytest.raises(nk.ShapeError, match=message):
            call()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(t, state[name]) for name, t in layer.state_dict().items())
    with pytest.raises(nk.ArgumentError, match=r"chunk_size must be at least 1.*got 0"):
        nk.ShuffledBatchNorm2d(3, chunk_size=0)


def test_a_state_of_torchs_layer():
    layer = nk.ShuffledBatchNorm1d(4)
    layer.load_state_dict(randomize_(nn.BatchNorm1d(4)).state_dict())
    assert layer.num_batches_tracked > 0
