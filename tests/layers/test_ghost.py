"""Ghost batch normalization: chunks that do not see each other."""

import pytest
import torch
from torch import nn

import normkit as nk
from support.cases import randomize_
from support.twins import close, randn, same_state, twins


def test_one_chunk_is_batch_norm():
    layer, bn = twins(nk.GhostBatchNorm2d, chunk_size=8)
    x = randn(8, 4, 3, 3)
    close(layer(x), bn(x))
    same_state(layer, bn)


def test_chunks_do_not_see_each_other():
    layer, bn = twins(nk.GhostBatchNorm2d, chunk_size=3)
    x = randn(8, 4, 3, 3)
    close(layer(x), torch.cat([bn(chunk) for chunk in x.split(3)]))


class PlainGhost(nn.Module):
    """As TabNet and Hoffer et al. write it: torch's BatchNorm, called with one chunk after the other."""

    def __init__(self, bn, chunk_size):
        super().__init__()
        self.bn, self.chunk_size = bn, chunk_size

    def forward(self, x):
        return torch.cat([self.bn(chunk) for chunk in x.split(self.chunk_size)])


@pytest.mark.parametrize("momentum", [0.1, 0.37, 1.0, None])
@pytest.mark.parametrize("examples", [3, 6, 8, 9])
def test_training_and_checkpoints_are_those_of_torchs_layer_on_chunks(examples, momentum):
    layer, bn = twins(nk.GhostBatchNorm2d, chunk_size=3, momentum=momentum)
    bn.momentum = momentum
    plain = PlainGhost(bn, 3)
    for _ in range(4):
        x = (randn(examples, 4, 3, 3) * 2 + 5).requires_grad_()
        z = x.detach().clone().requires_grad_()
        dy = randn(examples, 4, 3, 3)
        y, expected = layer(x), plain(z)
        y.backward(dy)
        expected.backward(dy)
        close(y, expected)
        close(x.grad, z.grad)
    same_state(layer, bn)
    assert layer.num_batches_tracked == bn.num_batches_tracked
    fresh = nk.GhostBatchNorm2d(4, chunk_size=3, momentum=momentum).double().eval()
    fresh.load_state_dict(bn.state_dict())
    close(fresh(x), bn.eval()(x))


def test_the_order_of_the_chunks_matters():
    layer, bn = twins(nk.GhostBatchNorm2d, chunk_size=3)
    x = randn(6, 4, 3, 3) + torch.tensor([0, 0, 0, 9, 9, 9.0]).reshape(6, 1, 1, 1)
    layer(x)
    for chunk in x.flip(0).split(3):
        bn(chunk)
    assert not torch.allclose(layer.running_mean, bn.running_mean)


def test_a_chunk_that_is_not_finite_is_skipped_alone():
    layer, bn = twins(nk.GhostBatchNorm2d, chunk_size=3, nonfinite="skip-update")
    x = randn(9, 4, 3, 3)
    x[4] = torch.nan
    layer(x)
    bn(x[:3])
    bn(x[6:])
    same_state(layer, bn)


def test_a_chunk_that_raises_leaves_the_statistics_of_all():
    layer, bn = twins(nk.GhostBatchNorm2d, chunk_size=3, nonfinite="raise")
    x = randn(9, 4, 3, 3)
    x[8] = torch.inf
    with pytest.raises(nk.NonFiniteError):
        layer(x)
    same_state(layer, bn)


def test_with_a_mask_each_chunk_moves_by_the_values_that_count():
    layer, bn = twins(nk.GhostBatchNorm2d, chunk_size=3)
    single = nk.BatchNorm2d(4).double()
    single.load_state_dict(bn.state_dict())
    x, mask = randn(6, 4, 3, 3), torch.rand(6, 3, 3) > 0.3
    layer(x, mask=mask)
    for i in (0, 3):
        single(x[i : i + 3], mask=mask[i : i + 3])
    same_state(layer, single)


def test_compiled_moves_them_chunk_by_chunk_too():
    layer, bn = twins(nk.GhostBatchNorm2d, chunk_size=3)
    x = randn(8, 4, 3, 3)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    PlainGhost(bn, 3)(x)
    same_state(layer, bn)


def test_a_last_value_alone_joins_the_chunk_before():
    layer = randomize_(nk.GhostBatchNorm1d(4, chunk_size=3)).double()
    bn = nn.BatchNorm1d(4).double()
    bn.load_state_dict(layer.state_dict())
    x = randn(7, 4)
    close(layer(x), torch.cat([bn(x[:3]), bn(x[3:])]))


def test_masks_and_residuals_are_split_along():
    layer, _ = twins(nk.GhostBatchNorm2d, chunk_size=3)
    x, r, mask = randn(6, 4, 3, 3), randn(6, 4, 3, 3), torch.rand(6, 3, 3) > 0.3
    parts = [layer(x[i : i + 3], residual=r[i : i + 3], mask=mask[i : i + 3]) for i in (0, 3)]
    close(layer(x, residual=r, mask=mask), torch.cat(parts))


def test_an_empty_chunk_size_is_refused():
    with pytest.raises(nk.ArgumentError, match=r"chunk_size must be at least 1.*got 0"):
        nk.GhostBatchNorm2d(3, chunk_size=0)
