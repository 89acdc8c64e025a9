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


def test_running_statistics_are_those_of_the_whole_batch():
    layer, bn = twins(nk.GhostBatchNorm2d, chunk_size=3)
    x = randn(8, 4, 3, 3) * 2 + 5
    layer(x)
    bn(x)
    same_state(layer, bn)


def test_they_come_from_the_one_merge(monkeypatch):
    calls = []
    merge = nk.Moments.merge
    monkeypatch.setattr(nk.Moments, "merge", lambda a, b: calls.append(1) or merge(a, b))
    nk.GhostBatchNorm2d(4, chunk_size=2)(torch.randn(8, 4, 3, 3))
    assert len(calls) == 3


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
