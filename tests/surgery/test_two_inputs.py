"""A tuple is bound to forward's signature: models of two inputs go through every verb without `forward=`."""

import pytest
import torch
from torch import nn

import normkit as nk
from support.foreign_norms import randomized


class Pair(nn.Module):
    """Two required inputs, and one that is not."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(2, 4, 1)
        self.bn, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, image, depth, scale=1.0):
        return (self.bn(self.left(image)) + scale * self.bn2(self.right(depth))).relu().mean((2, 3))


def batch(size=6):
    return torch.randn(size, 3, 5, 5), torch.randn(size, 2, 5, 5), torch.randint(4, (size,))


VERBS = {
    "convert": lambda model: nk.convert(model, "group", batch(), calibrate=[batch(), batch()]),
    "position": lambda model: nk.convert(model, "position", batch()),
    "fold": lambda model: nk.fold(model, batch()),
    "freeze": lambda model: nk.freeze(model, example=batch()),
    "unfreeze": lambda model: nk.unfreeze(nk.freeze(model).model, example=batch()),
    "recalibrate": lambda model: nk.recalibrate(model, [batch(), batch(4)], example=batch()),
    "exact": lambda model: nk.recalibrate(model, [batch(), batch(4)], exact=True),
    "adabn": lambda model: nk.adapt(model, [batch(), batch(4)], collapse=0.0, example=batch()),
    "tent": lambda model: nk.adapt(model, [batch(), batch(4)], "tent", collapse=0.0, lr=1e-5),
}


@pytest.mark.parametrize("verb", VERBS)
def test_the_first_elements_are_the_inputs(verb):
    done = VERBS[verb](randomized(Pair()).eval())
    assert [change.layer for change in done.changed] == ["bn", "bn2"]
    assert done.skipped == []


def test_too_few_elements_are_an_error_that_names_the_inputs():
    with pytest.raises(nk.ArgumentError, match=r"what the model's forward requires \(image, depth\); got a tuple of 1"):
        nk.freeze(Pair(), example=batch()[:1])
