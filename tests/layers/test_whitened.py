"""Whitening: what it promises of its output, and derivatives that equal eigenvalues do not spoil."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import normkit as nk
from normkit.kernels import whitening
from support.cases import randomize_
from support.formulas import mixed


def correlated(n, c, *positions):
    """Channels that are anything but white, and not so close to each other that eps decides."""
    mixing = spd(*(0.3 + i for i in range(c)))
    return (torch.randn(n, *positions, c, dtype=torch.float64) @ mixing + 3).movedim(-1, 1)


def covariance(y):
    rows = y.transpose(0, 1).flatten(1)
    rows = rows - rows.mean(1, keepdim=True)
    return rows @ rows.T / rows.shape[1]


def spd(*eigenvalues):
    """A symmetric matrix with these eigenvalues, its eigenvectors anywhere."""
    q, _ = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64))
    return (q * torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T


def symmetric(m):
    return (m + m.mT) / 2


@pytest.mark.parametrize("options", [{"method": "zca"}, {"iterations": 40}], ids=str)
def test_the_output_is_uncorrelated(options):
    layer = nk.WhitenedBatchNorm2d(5, eps=1e-9, dtype=torch.float64, **options)
    y = layer(correlated(20, 5, 6, 6))
    torch.testing.assert_close(covariance(y), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-4)
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["zca", "newton"])
def test_groups_are_whitened_each_by_itself(method):
    x = correlated(50, 6, 4)
    options = {"method": method, "iterations": 30, "eps": 1e-9, "dtype": torch.float64}
    found = covariance(nk.WhitenedBatchNorm1d(6, group_size=2, **options)(x))
    for g in range(3):
        part = slice(2 * g, 2 * g + 2)
        torch.testing.assert_close(found[part, part], torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-4)
        alone = nk.WhitenedBatchNorm1d(2, **options)(x[:, part])
        together = nk.WhitenedBatchNorm1d(6, group_size=2, **options)(x)[:, part]
        torch.testing.assert_close(together, alone, rtol=1e-11, atol=1e-11)
    assert found[:2, 2:].abs().max() > 0.05  # not between groups


@pytest.mark.parametrize("method", ["zca", "newton"])
def test_the_matrix_is_symmetric_and_kept(method):
    layer = nk.WhitenedBatchNorm2d(4, momentum=1.0, method=method, iterations=40, dtype=torch.float64)
    x = correlated(9, 4, 5, 5)
    y = layer(x)
    w = layer.running_whitener[0]
    torch.testing.assert_close(w, w.T, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(w @ w @ covariance(x), torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-3)
    torch.testing.assert_close(layer.eval()(x), y, rtol=1e-10, atol=1e-10)


def test_newton_converges_to_zca():
    x = correlated(30, 5)
    exact = nk.WhitenedBatchNorm1d(5, method="zca", dtype=torch.float64)(x)
    errors = [
        (nk.WhitenedBatchNorm1d(5, iterations=t, dtype=torch.float64)(x) - exact).abs().max().item()
        for t in (3, 6, 9, 40)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-8


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", [{"method": "zca"}, {"iterations": 1}], ids=str)
def test_groups_of_one_channel_are_batch_norm(options, training):
    """One Newton step is exact there: a variance over its own trace is 1."""
    x = torch.randn(6, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    ours = nk.WhitenedBatchNorm2d(3, momentum=1.0, group_size=1, dtype=torch.float64, **options)
    theirs = torch.nn.BatchNorm2d(3, momentum=1.0, dtype=torch.float64)
    randomize_(ours)
    theirs.weight.data, theirs.bias.data = ours.weight.data.clone(), ours.bias.data.clone()
    ours(x), theirs(x)
    n = x.numel() / 3
    with torch.no_grad():
        theirs.running_var.mul_((n - 1) / n)  # whitening stores what it used
    y, z = ours.train(training)(x), theirs.train(training)(x)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, x, dy), torch.autograd.grad(z, x, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def inverse_root_error(sigma, n):
    """What rounding may change in W = sigma^(-1/2), where sigma is made of sums of n terms.

    To first order |dW| <= |dsigma| / (2 * least^(3/2)), with the least eigenvalue, and |dsigma| <= n * eps * largest.
    """
    least, *_, largest = np.linalg.eigvalsh(sigma)
    return n * np.finfo(float).eps * largest / (2 * least**1.5)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_running_statistics(momentum):
    layer = nk.WhitenedBatchNorm1d(3, momentum=momentum, method="zca", dtype=torch.float64)
    mean, whitener, error = np.zeros(3), np.eye(3), 0.0
    for step in range(4):
        x = correlated(20, 3)
        layer(x)
        factor = 1 / (step + 1) if momentum is None else momentum
        mean = (1 - factor) * mean + factor * x.mean(0).numpy()
        sigma = covariance(x).numpy() + 1e-5 * np.eye(3)
        whitener = (1 - factor) * whitener + factor * mixed.inverse_root(sigma).astype(float)
        error = (1 - factor) * error + factor * inverse_root_error(sigma, n=len(x))
        np.testing.assert_allclose(layer.running_mean, mean, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(layer.running_whitener[0], whitener, rtol=1e-14, atol=error)
    assert layer.num_batches_tracked == 4


SPECTRA = [(1.0, 1.0, 1.0, 1.0), (2.0, 2.0, 0.5, 0.5), (3.0, 1.0, 1.0, 0.2), (4.0, 3.0, 2.0, 1.0)]


@pytest.mark.parametrize("spectrum", SPECTRA, ids=str)
def test_derivatives_of_the_square_root(spectrum):
    sigma = spd(*spectrum) if len(set(spectrum)) > 1 else torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(whitening.square_root(sigma) @ whitening.square_root(sigma), sigma)
    sigma.requires_grad_()
    for function in (whitening.square_root, lambda s: whitening.zca(s, 1e-9)):
        run = lambda s, f=function: f(symmetric(s))  # noqa: E731
        assert gradcheck(run, sigma, check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(run, sigma)


@pytest.mark.parametrize("spectrum", SPECTRA, ids=str)
def test_derivatives_of_the_lyapunov_solution(spectrum):
    a, b = spd(*spectrum), torch.randn(4, 4, dtype=torch.float64)
    x = whitening.lyapunov(a, b)
    torch.testing.assert_close(a @ x + x @ a, b)
    inputs = (a.requires_grad_(), b.requires_grad_())
    run = lambda a, b: whitening.lyapunov(symmetric(a), b)  # noqa: E731
    assert gradcheck(run, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(run, inputs)


def test_the_functions_under_every_transform():
    sigma, weights = spd(2.0, 2.0, 1.0), torch.randn(3, 3, dtype=torch.float64)
    run = lambda s: (whitening.zca(symmetric(s), 1e-9) * weights).sum()  # noqa: E731
    second = jacrev(grad(run))(sigma)
    torch.testing.assert_close(jacfwd(grad(run))(sigma), second)
    torch.testing.assert_close(hessian(run)(sigma), second)
    torch.testing.assert_close(jacrev(jacfwd(run))(sigma), second)
    many = torch.stack([sigma, spd(1.0, 2.0, 3.0)])
    torch.testing.assert_close(vmap(grad(run))(many), torch.stack([grad(run)(s) for s in many]))
    third = lambda s: (jacrev(grad(run))(s) * second).sum()  # noqa: E731
    step = symmetric(torch.randn(3, 3, dtype=torch.float64)) * 1e-5
    slope = (third(sigma + step) - third(sigma - step)) / 2
    torch.testing.assert_close((grad(third)(sigma) * step).sum(), slope, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (2.0, 2.0, 0.5)], ids=str)
def test_a_batch_with_equal_eigenvalues(scales):
    """Where the derivative through eigenvectors divides zero by zero."""
    corners = torch.tensor([[i, j, k] for i in (-1, 1) for j in (-1, 1) for k in (-1, 1)], dtype=torch.float64)
    x = (corners * torch.tensor(scales, dtype=torch.float64)).requires_grad_()
    layer = nk.WhitenedBatchNorm1d(3, method="zca", track_running_stats=False, dtype=torch.float64)
    assert gradcheck(layer, x, check_forward_ad=True)
    assert gradgradcheck(layer, x)
    assert torch.linalg.eigvalsh(covariance(x.detach())).unique().numel() < 3


def test_fewer_values_than_channels():
    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    for method in ("zca", "newton"):
        y = nk.WhitenedBatchNorm1d(9, method=method, dtype=torch.float64)(x)
        y.square().sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()
    huge = torch.randn(4, 1).expand(4, 9) * 1e6  # rank one: all other eigenvalues are rounding
    assert nk.WhitenedBatchNorm1d(9, method="zca")(huge).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", ["zca", "newton"])
def test_what_is_not_finite_says_so(method, bad):
    x = torch.randn(8, 4, requires_grad=True)
    y = nk.WhitenedBatchNorm1d(4, method=method, group_size=2)(x + torch.tensor([bad, 0, 0, 0]))
    assert y[:, :2].isnan().all()
    assert y[:, 2:].isfinite().all()


@pytest.mark.deep
def test_compiled_whole():
    """The compiler's way to the square root is one of its own."""
    layer = randomize_(nk.WhitenedBatchNorm2d(4, method="zca", group_size=2))
    twin, x = copy.deepcopy(layer), correlated(6, 4, 5, 5).float()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = torch.compile(layer, fullgraph=True, backend="inductor")(a), twin(b)
    dy = torch.randn_like(y)
    y.backward(dy)
    z.backward(dy)
    torch.testing.assert_close(y, z, rtol=2e-7, atol=2e-7)
    torch.testing.assert_close(a.grad, b.grad, rtol=2e-7, atol=2e-7)
    torch.testing.assert_close(layer.running_whitener, twin.running_whitener, rtol=2e-7, atol=1e-7)
    torch.compiler.reset()


@pytest.mark.parametrize("group_size", [0, 4, 32])
def test_groups_that_do_not_divide(group_size):
    words = f"group_size must divide the 6 .*got {group_size}. Use one of 1, 2, 3, 6"
    with pytest.raises(nk.ArgumentError, match=words):
        nk.WhitenedBatchNorm2d(6, group_size=group_size)


def test_bad_options():
    with pytest.raises(nk.ArgumentError, match='method must be "newton" or "zca"; got \'pca\''):
        nk.WhitenedBatchNorm1d(6, method="pca")
    with pytest.raises(nk.ArgumentError, match="iterations must be at least 1; got 0"):
        nk.WhitenedBatchNorm1d(6, iterations=0)
