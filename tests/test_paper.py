"""Claims of the 2015 paper (Ioffe & Szegedy, arXiv 1502.03167), and one identity of Santurkar et al. (2018)."""

import numpy as np
import pytest
import torch
from torch import nn

import normkit as nk
from support.cases import randomize_

NO_EPS = 1e-30  # nothing next to a variance; zero itself is refused


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def assert_close(actual, expected, rtol=1e-12):
    """Relative to the largest value: small ones are what is left when large ones cancel."""
    expected = torch.as_tensor(expected)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * expected.abs().max().item())


def bn(x, weight=None, bias=None, eps=1e-3):
    """Algorithm 1."""
    return nk.functional.batch_norm(x, None, None, weight, bias, training=True, eps=eps)


# Section 2: gradients must know about the normalization.


def descend(normalize, steps, rate=0.05):
    """Learn a bias b ahead of a normalization; return b and the loss at every step."""
    u, target = randn(16, 3), randn(16, 3) + 1
    b = randn(3).requires_grad_()
    biases, losses = [], []
    for _ in range(steps):
        loss = (normalize(u + b) - target).square().mean(0).sum()
        biases.append(b.detach().clone())
        losses.append(loss.item())
        (grad,) = torch.autograd.grad(loss, b)
        with torch.no_grad():
            b -= rate * grad
    return torch.stack(biases), torch.tensor(losses)


def outside_the_gradient_step(x):
    scale, shift = nk.scale_shift(nk.functional.batch_moments(x.detach()), None, None, 1e-3)
    return x * scale + shift


def test_normalizing_outside_the_gradient_step_lets_the_bias_grow_at_the_same_loss():
    b, losses = descend(outside_the_gradient_step, steps=200)
    # The loss stays, so its gradient does, so every step is the first one: growth without bound.
    assert_close(losses, losses[:1].expand(200))
    step = b[1] - b[0]
    assert step.abs().min() > 1e-3
    assert_close(b - b[0], torch.arange(200)[:, None] * step, rtol=1e-10)  # 200 steps' rounding


def test_normalizing_inside_the_gradient_step_keeps_the_bias():
    b, losses = descend(randomize_(nk.BatchNorm1d(3)).double(), steps=200)
    assert_close(b, b[:1].expand(200, 3))
    assert_close(losses, losses[:1].expand(200))


# Section 3.


def test_gamma_and_beta_can_restore_the_input():
    x = randn(12, 4) * 3 + 5
    m = nk.functional.batch_moments(x)
    assert_close(bn(x, (m.var + 1e-3).sqrt(), m.mean), x)


def test_the_gradient_is_what_is_left_without_its_mean_and_its_part_along_the_output():
    """With g at the output: ||dx||^2 = weight^2 / var (||g||^2 - (sum g)^2 / m - (g . xhat)^2 / m)."""
    m = 20
    x, weight, bias, g = (randn(m, 4) * 2 + 3).requires_grad_(), randn(4), randn(4), randn(m, 4) + 1
    (dx,) = torch.autograd.grad(bn(x, weight, bias, NO_EPS), x, g)
    values, grads = x.detach().numpy(), g.numpy()
    var = values.var(0)
    xhat = (values - values.mean(0)) / np.sqrt(var)
    left = (grads**2).sum(0) - grads.sum(0) ** 2 / m - (grads * xhat).sum(0) ** 2 / m
    assert_close(dx.square().sum(0), weight.numpy() ** 2 / var * left)


# Section 3.2: no bias ahead of a BN.


@pytest.fixture
def biased():
    """Inputs, weights and a bias of a linear map, gamma and beta after it, and a gradient at the output."""
    u, w, b = randn(10, 6), randn(4, 6).requires_grad_(), (randn(4) * 3).requires_grad_()
    return u, w, b, randn(4), randn(4), randn(10, 4)


def test_a_bias_ahead_changes_nothing(biased):
    u, w, b, weight, bias, _ = biased
    assert_close(bn(u @ w.T + b, weight, bias), bn(u @ w.T, weight, bias))


def test_a_bias_ahead_gets_no_gradient(biased):
    u, w, b, weight, bias, g = biased
    db, dw = torch.autograd.grad(bn(u @ w.T + b, weight, bias), (b, w), g)
    assert dw.abs().max() > 1e-2
    assert db.abs().max() < 1e-13 * g.abs().sum()


def test_a_bias_ahead_moves_the_running_mean_alone(biased):
    u, w, b, *_ = biased
    without, with_ = (nk.BatchNorm1d(4, momentum=0.3).double() for _ in range(2))
    with_.load_state_dict(randomize_(without).state_dict())
    without(u @ w.T)
    with_(u @ w.T + b)
    assert_close(with_.running_mean, without.running_mean + 0.3 * b.detach())
    assert_close(with_.running_var, without.running_var)


# Section 3.3: the scale of the weights does not matter.


@pytest.mark.parametrize("a", [0.01, 0.5, 7.0, 300.0])
def test_the_scale_of_the_weights_matters_neither_forward_nor_backward(a):
    u, w = randn(10, 6).requires_grad_(), randn(4, 6).requires_grad_()
    weight, bias, g = randn(4), randn(4), randn(10, 4)
    aw = (a * w).detach().requires_grad_()
    plain = bn(u @ w.T, weight, bias, eps=1e-3)
    # The claim holds without eps; one that grows with the variance is as good.
    scaled = bn(u @ aw.T, weight, bias, eps=1e-3 * a**2)
    assert_close(scaled, plain)
    du, dw = torch.autograd.grad(plain, (u, w), g)
    du_scaled, daw = torch.autograd.grad(scaled, (u, aw), g)
    assert_close(du_scaled, du)
    assert_close(daw, dw / a)


def test_the_gradient_is_orthogonal_to_the_weights():
    u, w, g = randn(10, 6), randn(4, 6).requires_grad_(), randn(10, 4)
    (dw,) = torch.autograd.grad(bn(u @ w.T, randn(4), randn(4), NO_EPS), w, g)
    cosine = (w * dw).sum(1) / (w.norm(dim=1) * dw.norm(dim=1))
    assert cosine.abs().max() < 1e-12


# Section 3.4: an example is seen together with its batch-mates, in training only.


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_an_example_depends_on_its_batch_mates_in_training_only(training):
    layer = randomize_(nk.BatchNorm2d(3, momentum=0.3)).double().train(training)
    mates, others, example = randn(5, 3, 4, 4), randn(5, 3, 4, 4), randn(1, 3, 4, 4)
    among_mates = layer(torch.cat([example, mates]))[0]
    among_others = layer(torch.cat([example, others]))[0]
    gap = (among_mates - among_others).abs().amax((1, 2))
    assert (gap > 1e-6).all() if training else (gap == 0).all()


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_so_does_its_gradient(training):
    layer = randomize_(nk.BatchNorm2d(3)).double().train(training)
    x = randn(6, 3, 4, 4).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x)[0], x, randn(3, 4, 4))
    assert (dx[0] != 0).all()
    assert (dx[1:] != 0).all() if training else (dx[1:] == 0).all()


# Section 3.1, Algorithm 2: a trained network, and the statistics of several of its training batches.

EPS = 0.01


def network():
    """Two BNs, over a map and over single values; the convolution is 1x1, so that by hand it is a matrix."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1, bias=False),
        nk.BatchNorm2d(4, eps=EPS, activation="relu"),
        nn.Flatten(),
        nn.Linear(4 * 2 * 3, 5, bias=False),
        nk.BatchNorm1d(5, eps=EPS, activation="sigmoid"),
    )
    return randomize_(net).double()


def train(net, batches):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in batches:
        optimizer.zero_grad()
        (net(x) - x.mean((1, 2, 3))[:, None].sigmoid()).square().mean().backward()
        optimizer.step()


@torch.no_grad()
def statistics(net, batches):
    """The moments of every batch at the input of every BN, which normalizes with the batch's own meanwhile."""
    seen = {module: [] for module in net.modules() if isinstance(module, nk.layers.batch.BatchNorm)}
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: seen[layer].append(nk.functional.batch_moments(args[0])))
        for layer in seen
    ]
    for x in batches:
        net(x)
    for hook in hooks:
        hook.remove()
    return seen


def by_hand(net, x, stored=None):
    """The network in numpy: what enters each BN as (values, channels), and the output.

    Each BN uses the batch's statistics, or as one affine map those stored for it.
    """
    conv, bn2d, _, linear, bn1d = net
    entering = []

    def normalize(layer, values):
        gamma, beta = layer.weight.detach().numpy(), layer.bias.detach().numpy()
        if stored is None:
            mean, var = values.mean(0), values.var(0)
        else:
            mean, var = stored[len(entering)]
        entering.append(values)
        scale = gamma / np.sqrt(var + EPS)
        return scale * values + (beta - scale * mean)

    x = x.numpy()
    z = np.einsum("oc,nchw->nhwo", conv.weight.detach().numpy()[:, :, 0, 0], x)
    y = np.maximum(normalize(bn2d, z.reshape(-1, 4)), 0).reshape(z.shape)
    z = y.transpose(0, 3, 1, 2).reshape(len(x), -1) @ linear.weight.detach().numpy().T
    return entering, 1 / (1 + np.exp(-normalize(bn1d, z)))


def algorithm_2_by_hand(net, batches):
    """(E[x], Var[x]) of each BN: averages over batches, with m / (m - 1) for m the values of a channel in one batch."""
    per_layer = zip(*[by_hand(net, x)[0] for x in batches], strict=True)
    result = []
    for per_batch in per_layer:
        m = len(per_batch[0])
        mean = np.mean([values.mean(0) for values in per_batch], axis=0)
        var = m / (m - 1) * np.mean([values.var(0) for values in per_batch], axis=0)
        result.append((mean, var))
    return result


@pytest.fixture
def trained():
    net = network()
    before = [p.detach().clone() for p in net.parameters()]
    batches = [randn(8, 3, 2, 3) * 1.5 + 0.5 for _ in range(25)]
    train(net, batches)
    assert not any(map(torch.equal, before, net.parameters()))
    return net, batches[-6:], randn(7, 3, 2, 3)


def test_population_statistics_are_those_of_algorithm_2(trained):
    net, batches, _ = trained
    expected = algorithm_2_by_hand(net, batches)
    seen = statistics(net, batches)
    assert [m.count for m in seen[net[1]]] == [8 * 2 * 3] * 6  # m' = m p q of a map
    for per_batch, (mean, var) in zip(seen.values(), expected, strict=True):
        stored = nk.population(per_batch, method="paper")
        assert_close(stored.mean, mean)
        assert_close(stored.var, var)


def test_inference_is_one_affine_map(trained):
    net, batches, x = trained
    _, expected = by_hand(net, x, algorithm_2_by_hand(net, batches))
    maps = {
        layer: nk.scale_shift(nk.population(per_batch, method="paper"), layer.weight, layer.bias, layer.eps)
        for layer, per_batch in statistics(net, batches).items()
    }
    conv, bn2d, flatten, linear, bn1d = net
    scale, shift = (t[:, None, None] for t in maps[bn2d])
    y = (conv(x) * scale + shift).relu()
    scale, shift = maps[bn1d]
    y = (linear(flatten(y)) * scale + shift).sigmoid()
    assert_close(y, expected)


def test_evaluation_with_those_statistics_is_the_same_map(trained):
    net, batches, x = trained
    _, expected = by_hand(net, x, algorithm_2_by_hand(net, batches))
    for layer, per_batch in statistics(net, batches).items():
        stored = nk.population(per_batch, method="paper")
        layer.running_mean.copy_(stored.mean)
        layer.running_var.copy_(stored.var)
    assert_close(net.eval()(x), expected)


# Section 3.2: without the convolutional property every position is an activation of its own.


def position_twins(**options):
    """Ours, and torch's layer over the flattened input in the same state."""
    ours = randomize_(nk.PositionBatchNorm2d(3, 2, 4, **options)).double()
    torchs = nn.BatchNorm1d(3 * 2 * 4, **options).double()
    torchs.load_state_dict({name: t.flatten() if t.dim() else t for name, t in ours.state_dict().items()})
    return ours, torchs


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_positions_are_normalized_as_torch_does_the_flattened_input(training, momentum):
    ours, torchs = (layer.train(training) for layer in position_twins(eps=EPS, momentum=momentum))
    x = (randn(6, 3, 2, 4) * 2 + 1).requires_grad_()
    g = randn(6, 3, 2, 4)
    y, expected = ours(x), torchs(x.flatten(1))
    assert_close(y, expected.unflatten(1, (3, 2, 4)).detach())
    grads = torch.autograd.grad(y, (x, ours.weight, ours.bias), g)
    torch_grads = torch.autograd.grad(expected, (x, torchs.weight, torchs.bias), g.flatten(1))
    for ours_grad, torch_grad in zip(grads, torch_grads, strict=True):
        assert_close(ours_grad, torch_grad.reshape(ours_grad.shape))
    for name, buffer in torchs.named_buffers():
        assert_close(ours.get_buffer(name).double().flatten(), buffer.double().flatten())


def test_algorithm_2_per_position():
    ours, _ = position_twins(eps=EPS)
    batches, x = randn(5, 6, 3, 2, 4) * 2 + 1, randn(7, 3, 2, 4)
    stored = nk.population([nk.functional.batch_moments(b.flatten(1)) for b in batches], method="paper")
    ours.running_mean.copy_(stored.mean.view(3, 2, 4))
    ours.running_var.copy_(stored.var.view(3, 2, 4))

    values = batches.numpy()
    mean, var = values.mean(1).mean(0), 6 / 5 * values.var(1).mean(0)
    scale = ours.weight.detach().numpy() / np.sqrt(var + EPS)
    assert_close(ours.eval()(x).detach(), scale * x.numpy() + (ours.bias.detach().numpy() - scale * mean))
