"""A product of matrices, with norms between them or not."""

import torch
from torch import nn

import normkit as nk
from normkit.lab.models.deep_linear import deep_linear


def test_without_norms_it_is_the_product_of_its_matrices():
    model = deep_linear(None, layers=7, width=5).double()
    matrices = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert [tuple(matrix.shape) for matrix in matrices] == [(5, 5)] * 7
    assert len(list(model.parameters())) == 7  # no biases
    x, product = torch.randn(8, 5, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
    for matrix in matrices:
        product = matrix @ product
    torch.testing.assert_close(model(x), x @ product.T)


def test_norms_follow_all_matrices_but_the_last():
    model = deep_linear(nk.BatchNorm1d, layers=25)
    kinds = [type(layer) for layer in model.modules() if isinstance(layer, nn.Linear | nk.BatchNorm1d)]
    assert kinds == [nn.Linear, nk.BatchNorm1d] * 24 + [nn.Linear]
    assert model(torch.randn(6, 10)).shape == (6, 10)


def test_weights_are_glorots():
    torch.manual_seed(3)
    model = deep_linear(None, layers=100, width=10)
    values = torch.cat([layer.weight.flatten() for layer in model.modules() if isinstance(layer, nn.Linear)])
    assert abs(values.std().item() - (2 / 20) ** 0.5) < 0.01
