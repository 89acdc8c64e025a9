"""Nets without norms begin as their papers say: branches at zero, and variances that depth does not change."""

import pytest
import torch

import normkit as nk
from normkit.lab.models.norm_free import FixupBlock, ScaledBlock, norm_free_resnet


def blocks(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


@pytest.mark.parametrize(("method", "kind"), [("fixup", FixupBlock), ("scaled", ScaledBlock)])
def test_branches_begin_as_zero_and_everything_gets_a_gradient_in_the_end(method, kind):
    model, x = norm_free_resnet(14, method, in_channels=1, width=4, seed=0), torch.randn(4, 1, 16, 16)
    assert len(blocks(model, kind)) == 6
    for block in blocks(model, kind):
        inputs = next(m for m in block.branch.modules() if isinstance(m, torch.nn.Conv2d)).in_channels
        assert not block.branch(torch.randn(2, inputs, 8, 8)).any()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):  # zeros let a gradient through to what is behind them once they have moved
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), torch.arange(4)).backward()
        optimizer.step()
    assert all(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("depth", [8, 56])
def test_a_scaled_branch_keeps_the_variance_whatever_the_depth(depth):
    model = norm_free_resnet(depth, "scaled", in_channels=3, width=16, seed=1)
    for block in blocks(model, ScaledBlock):
        torch.nn.init.ones_(block.branch[-1].alpha)
    seen = []
    for block in blocks(model, ScaledBlock):
        block.branch.register_forward_hook(lambda *call: seen.append(call[-1].var().item()))
    with torch.no_grad():
        model(torch.randn(8, 3, 32, 32))
    assert len(seen) == depth // 2 - 1
    assert all(0.5 < variance < 1.5 for variance in seen)


def test_fixups_first_weights_are_smaller_in_deeper_nets():
    def deviation(depth):
        model = norm_free_resnet(depth, "fixup", width=16, seed=2)
        (first,) = (block.branch[1].weight.std() for block in blocks(model, FixupBlock)[:1])
        return first

    ratio = (deviation(56) / deviation(14)).item()
    assert ratio == pytest.approx((27 / 6) ** -0.5, rel=0.1)
    assert not norm_free_resnet(8, "fixup").classifier.weight.any()


@pytest.mark.parametrize(("depth", "method", "words"), [(9, "fixup", "6n"), (8, "skip", "method must be")])
def test_wrong_arguments(depth, method, words):
    with pytest.raises(nk.NormkitError, match=words):
        norm_free_resnet(depth, method)
