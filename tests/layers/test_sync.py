"""SyncBatchNorm on real processes: one batch in parts equals one batch whole, with one collective each way."""

import re
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed, nn

import normkit as nk
from support.case import randomize_
from support.ranks import run_ranks

CHANNELS = 5
# Masked, both sides are worked in float32: 8 units in the last place of terms up to 8.
TOLERANCE = {torch.float32: 8e-6, torch.float64: 1e-12}


def splits(world):
    """How many examples each rank holds: the same, different numbers, and none on the first rank."""
    return {
        "equal": [3] * world,
        "unequal": [1 + 2 * r for r in range(world)],
        "empty": [0] + [4] * (world - 1),
    }


def shapes(n):
    return [(n, CHANNELS), (n, CHANNELS, 3), (n, CHANNELS, 3, 4), (n, CHANNELS, 2, 3, 2)]


class Counted:
    """What the layer asks of torch.distributed: the collectives, and how many numbers each carries."""

    def __init__(self, monkeypatch):
        self.sizes = []
        for name, which in (("all_gather", 1), ("all_reduce", 0)):
            monkeypatch.setattr(distributed, name, self.counting(getattr(distributed, name), which))

    def counting(self, collective, which):
        def call(*args, **kwargs):
            self.sizes.append(args[which].numel())
            return collective(*args, **kwargs)

        return call


def step(layer, x, dy, residual, mask):
    x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
    y = layer(x, residual=residual, mask=mask)
    y.backward(dy)
    return y.detach(), x.grad, residual.grad


def compare_with_whole_batch(rank, world):
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(monkeypatch)
        for dtype, tolerance in TOLERANCE.items():
            for name, sizes in splits(world).items():
                for shape in shapes(sum(sizes)):
                    check_one(rank, sizes, shape, dtype, tolerance, counted, f"{name} {shape} {dtype}")


def check_one(rank, sizes, shape, dtype, tolerance, counted, what):
    torch.manual_seed(11)
    layer = randomize_(nk.SyncBatchNorm(CHANNELS, activation="silu", momentum=0.3)).to(dtype)
    whole = nk.SyncBatchNorm(CHANNELS, activation="silu", momentum=0.3).to(dtype)
    whole.load_state_dict(layer.state_dict())
    whole._ranks_sharing = lambda: 1  # one process with the whole batch
    x, dy, residual = (torch.randn(shape, dtype=torch.float64).to(dtype) * 2 + 1 for _ in range(3))
    mask = torch.rand(shape[0], *shape[2:]) > 0.2
    counted.sizes.clear()
    found = step(layer, *(t.split(sizes)[rank] for t in (x, dy, residual, mask)))
    assert counted.sizes == [2 * CHANNELS + 1, 2 * CHANNELS], what
    expected = step(whole, x, dy, residual, mask)
    close = {"rtol": tolerance, "atol": tolerance}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.split(sizes)[rank], **close, msg=what)
    for name, p in layer.named_parameters():
        total = p.grad.double()
        distributed.all_reduce(total)
        grad = whole.get_parameter(name).grad.double()
        torch.testing.assert_close(total, grad, rtol=tolerance, atol=tolerance * shape[0] * 8, msg=what)
    for name, b in whole.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), b, **close, msg=what)


def share_without_options(rank, world):
    """Without a mask other code computes the sums, and for no values yet other."""
    for dtype, tolerance in TOLERANCE.items():
        for sizes in splits(world).values():
            torch.manual_seed(5)
            x, dy = torch.randn(2, sum(sizes), CHANNELS, 3, 4, dtype=torch.float64).to(dtype)
            layer, whole = (randomize_(make(CHANNELS)).to(dtype) for make in (nk.SyncBatchNorm, nn.BatchNorm2d))
            whole.load_state_dict(layer.state_dict())
            own, every = x.split(sizes)[rank].clone().requires_grad_(), x.clone().requires_grad_()
            layer(own).backward(dy.split(sizes)[rank])
            whole(every).backward(dy)
            expected = every.grad.split(sizes)[rank]
            torch.testing.assert_close(own.grad, expected, rtol=tolerance, atol=tolerance)


def share_by_subgroup(rank, world):
    """Two pairs of ranks, each with a batch of its own."""
    pairs = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    torch.manual_seed(3)
    layer = nk.SyncBatchNorm(CHANNELS, process_group=pairs[rank // 2]).double()
    torch.manual_seed(20 + rank // 2)
    x = torch.randn(6, CHANNELS, 4, dtype=torch.float64)
    y = layer(x.split([2, 4])[rank % 2])
    expected = nn.BatchNorm1d(CHANNELS).double()(x).split([2, 4])[rank % 2]
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def merge_by_the_one_merge(rank, world):
    calls = []
    merge = nk.Moments.merge
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(nk.Moments, "merge", lambda a, b: calls.append(1) or merge(a, b))
        nk.SyncBatchNorm(CHANNELS)(torch.randn(2, CHANNELS))
    assert len(calls) == world - 1


def evaluate_without_speaking(rank, world):
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(monkeypatch)
        layer = randomize_(nk.SyncBatchNorm(CHANNELS)).eval()
        layer(torch.randn(2 + rank, CHANNELS))
        assert counted.sizes == []


def refuse_one_value_together(rank, world):
    layer = nk.SyncBatchNorm(CHANNELS)
    before = layer.running_mean.clone()
    with pytest.raises(nk.ShapeError, match="more than 1 value per channel"):
        layer(torch.randn(1 if rank == 0 else 0, CHANNELS))
    assert torch.equal(layer.running_mean, before)


def miss_a_rank(rank, world):
    distributed.barrier()  # or a late start would be the missing rank
    group = distributed.new_group(timeout=timedelta(seconds=4))
    model = nn.Sequential(
        nn.Linear(CHANNELS, CHANNELS), nn.ModuleDict({"norm": nk.SyncBatchNorm(CHANNELS, process_group=group)})
    )
    layer = model[1]["norm"]
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(
            nk.DistributedError,
            match=r"SyncBatchNorm\(5\) at '1.norm' needs all 2 ranks in its forward.* rank 1 did not come",
        ):
            layer(model[0](torch.randn(3, CHANNELS)))
        assert 3 < time.monotonic() - start < 30
        assert layer.num_batches_tracked == 0
    else:
        time.sleep(7)  # never comes


def hold_other_layers(rank, world):
    """The rank that comes last finds it out; the other one has gone on, and is told who did not come."""
    distributed.barrier()
    group = distributed.new_group(timeout=timedelta(seconds=4))
    same = nk.SyncBatchNorm(CHANNELS, process_group=group)
    for _ in range(2):  # compared once
        same(torch.randn(3, CHANNELS))
    other = nk.SyncBatchNorm(CHANNELS + rank, process_group=group)
    words = (
        r"SyncBatchNorm\(\d\) is number 2 of the synchronized layers that rank \d runs; on rank \d that is "
        r"SyncBatchNorm\(\d\)\. All ranks need the same model"
    )
    with pytest.raises(nk.DistributedError, match=rf"{words}|rank \d did not come|connection") as raised:
        other(torch.randn(3, CHANNELS + rank))
    found = [None] * world
    distributed.all_gather_object(found, str(raised.value))
    assert any(re.search(words, one) for one in found)


def everything(rank, world):
    compare_with_whole_batch(rank, world)
    share_without_options(rank, world)
    merge_by_the_one_merge(rank, world)
    evaluate_without_speaking(rank, world)
    refuse_one_value_together(rank, world)
    if world == 4:
        share_by_subgroup(rank, world)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_parts_equal_the_whole(world, tmp_path):
    run_ranks(everything, world, tmp_path)


@pytest.mark.deep
def test_other_channels_on_a_rank_are_an_error_and_not_the_end_of_the_process(tmp_path):
    run_ranks(hold_other_layers, 2, tmp_path)


@pytest.mark.deep
def test_a_rank_that_never_comes_is_an_error_that_names_the_layer(tmp_path):
    run_ranks(miss_a_rank, 2, tmp_path)


def test_without_a_process_group_it_is_batch_norm():
    ours, theirs = randomize_(nk.SyncBatchNorm(3)), nn.BatchNorm1d(3)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 3, 5)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_var, theirs.running_var)


def test_the_order_of_arguments_is_torchs():
    positional = (3, 1e-3, 0.2, False, True, None, "cpu", torch.float64)
    assert repr(nk.SyncBatchNorm(*positional)) == repr(nn.SyncBatchNorm(*positional))
