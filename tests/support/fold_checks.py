"""What the tests of folding share: models without defaults, and the check that a folded one is the same function."""

import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from normkit.surgery.fold import fold
from support.case import randomize_


def ready(model, dtype=torch.float64):
    """In evaluation, with nothing left at a default."""
    randomize_(model)
    for norm in model.modules():
        if nk.describe(norm) is not None and hasattr(norm, "eps"):
            norm.eps = 0.1 * torch.rand(()).item() + 1e-3
    return model.to(dtype).eval()


def agree(model, folded, *inputs, tolerance=1e-12):
    with torch.no_grad():
        for x in inputs:
            expected, actual = model(x), folded(x)
            assert (expected - actual).abs().max() <= tolerance * expected.abs().max()


def check(model, x, *others, folded=1, skipped=0):
    """Fold a model, and find the same function on the example and on other inputs."""
    result = fold(model, x)
    assert (len(result.changed), len(result.skipped)) == (folded, skipped), str(result)
    assert result.parity.max_rel <= 1e-12
    agree(model, result.model, x, *others)
    return result


def reason(model, x, layer=None):
    """Why the one norm, or this one, was left alone; and that the model still computes the same."""
    result = fold(model, x)
    agree(model, result.model, x)
    (why,) = [change.why for change in result.skipped if layer in (None, change.layer)]
    return why


def double(*shape):
    return torch.randn(shape, dtype=torch.float64)


class Block(nn.Module):
    """Convolution, norm and a ReLU that works in place."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)), inplace=True)
