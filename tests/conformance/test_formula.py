"""Every layer computes its paper's formula, in training and in evaluation."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import conv2d

from normkit.kernels import select
from support import formulas
from support.cases import CASES

# Far from zero, the ordinary run takes one row of each class.
ROWS = [
    pytest.param(case, mean, id=f"{case}-{mean:g}", marks=pytest.mark.deep if case.option and mean > 1 else ())
    for case in CASES
    for mean in (0.3, 1e4)
]


def error_of_sums(case, layer, x):
    """What a convolution in the input's type may lose, relative to the magnitudes of the terms that it sums.

    Roundings of n sums add up like a random walk: past 6 * sqrt(n) halves of eps once in millions of outputs (Higham &
    Mary 2019). Kernel and products are rounded, too.
    """
    if case.exact:
        return 0.0
    n, kernel = layer.weight[0].numel(), layer.standardized_weight().detach().double().abs()
    terms = conv2d(x.double().abs(), kernel, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    return (3 * n**0.5 + 2) * torch.finfo(x.dtype).eps * terms.max().item()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("case", "mean"), ROWS)
def test_float64_agrees_with_the_formula(case, training, mean):
    layer, x = case.layer(torch.float64, training), case.input(torch.float64, mean)
    expected = case.formula(layer, x).astype(np.float64)
    # The mean itself is known to 1e-16 of its size, and the output cannot be closer than that.
    tolerance = 1e-15 * (10 + 2 * mean) + error_of_sums(case, layer, x)
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-13, atol=tolerance)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("case", "mean"), ROWS)
def test_the_reference_in_float32_is_the_formula_rounded_once(case, training, mean):
    layer, x = case.layer(torch.float32, training), case.input(torch.float32, mean)
    expected = torch.from_numpy(case.formula(layer, x).astype(np.float64))
    ulp = torch.finfo(torch.float32).eps
    atol = 1e-9 + error_of_sums(case, layer, x)
    with select.backend("reference"):
        y = layer(x)
    torch.testing.assert_close(y.detach().double(), expected, rtol=0.51 * ulp, atol=atol)


def test_the_formulas_are_not_ours():
    sources = list(Path(formulas.__file__).parent.glob("*.py"))
    assert len(sources) > 1
    assert not any("normkit" in path.read_text() for path in sources)
