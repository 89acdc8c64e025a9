"""Under autocast a layer keeps the type that the operator before it chose, as torch's does."""

import pytest
import torch
from torch import nn

from support.cases import CASES, taking_part


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_autocast(case, training):
    layer = case.layer(training=training)
    before = nn.Linear(case.shape[-1], case.shape[-1])
    x = case.input()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = before(x)
        y = layer(hidden)
        plain = layer(x)
        # A convolution runs in autocast's type, whatever it is given.
        kept = nn.Conv2d(case.shape[1], 1, 1)(x).dtype if isinstance(layer, nn.Conv2d) else torch.float32
    assert hidden.dtype == y.dtype == torch.bfloat16
    assert plain.dtype == kept
    y.float().sum().backward()
    assert before.weight.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in taking_part(layer).values())
