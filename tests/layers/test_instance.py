"""Instance normalization: stored statistics, masks, and single examples."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from support.cases import randomize_
from support.padded import ragged
from support.refusal import refused

DOUBLE = torch.float64


def test_a_batch_without_a_valid_position_leaves_running_statistics_alone():
    layer = randomize_(nk.InstanceNorm1d(6, track_running_stats=True))
    before = copy.deepcopy(layer.state_dict())
    for x, mask in (
        (torch.randn(3, 6, 5), torch.zeros(3, 5, dtype=torch.bool)),
        (torch.randn(3, 6, 5), torch.eye(3, 5).bool()),  # one position: a mean, but no variance
        (torch.randn(0, 6, 5), None),
    ):
        assert layer(x, mask=mask).isfinite().all()
        for name, t in layer.state_dict().items():
            assert torch.equal(t, before[name]), name


def test_masked_running_statistics_average_the_examples_that_have_a_variance():
    layer = nk.InstanceNorm1d(6, track_running_stats=True, momentum=1.0, dtype=DOUBLE)
    x, mask, lengths = ragged()
    mask[3] = torch.arange(9) == 5
    layer(x, mask=mask)
    examples = [x[i, :, :length] for i, length in enumerate(lengths[:3])]
    torch.testing.assert_close(layer.running_mean, torch.stack([e.mean(1) for e in examples]).mean(0))
    torch.testing.assert_close(layer.running_var, torch.stack([e.var(1) for e in examples]).mean(0))


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_running_statistics_over_steps_are_torchs(momentum):
    ours = nk.InstanceNorm2d(3, momentum=momentum, track_running_stats=True, dtype=DOUBLE)
    theirs = nn.InstanceNorm2d(3, momentum=momentum, track_running_stats=True, dtype=DOUBLE)
    theirs.load_state_dict(randomize_(ours).state_dict())
    for step in range(6):
        x = torch.randn(step + 1, 3, 4, 5, dtype=DOUBLE) * (step + 1) + step
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
        for name, b in theirs.named_buffers():
            torch.testing.assert_close(ours.get_buffer(name), b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-12, atol=1e-12)


def test_the_function_moves_running_statistics_as_torchs():
    x, mean, var = torch.randn(4, 3, 7, dtype=DOUBLE), torch.randn(3, dtype=DOUBLE), torch.rand(3, dtype=DOUBLE)
    twins = mean.clone(), var.clone()
    for use_input_stats in (True, False):
        y = nk.functional.instance_norm(x, mean, var, use_input_stats=use_input_stats, momentum=0.3)
        z = F.instance_norm(x, *twins, use_input_stats=use_input_stats, momentum=0.3)
        torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close((mean, var), twins, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_single_example_as_in_torch(rank, training):
    name, shape = f"InstanceNorm{rank}d", (4, *(3, 5, 6)[:rank])
    ours = randomize_(getattr(nk, name)(4, affine=True, track_running_stats=True, dtype=DOUBLE)).train(training)
    theirs = getattr(nn, name)(4, affine=True, track_running_stats=True, dtype=DOUBLE).train(training)
    theirs.load_state_dict(ours.state_dict())
    x, r = torch.randn(shape, dtype=DOUBLE), torch.randn(shape, dtype=DOUBLE)
    torch.testing.assert_close(ours(x, residual=r), theirs(x) + r, rtol=1e-12, atol=1e-12)
    for name, b in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), b, rtol=1e-12, atol=1e-12)
    if training:
        mask = torch.rand(shape[1:]) > 0.3
        torch.testing.assert_close(ours(x, mask=mask), ours(x[None], mask=mask[None])[0])


def test_one_position_is_enough_for_stored_statistics():
    layer = nk.InstanceNorm1d(4, track_running_stats=True)
    x = torch.randn(3, 4, 1)
    refused(lambda: layer(x), "more than 1 value")
    torch.testing.assert_close(layer.eval()(x), x / (1 + 1e-5) ** 0.5)
