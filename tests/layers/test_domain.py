"""Statistics per domain, which never mix."""

import pytest
import torch
from torch import nn

import normkit as nk
from support.cases import randomize_
from support.twins import close, randn


def test_statistics_never_mix():
    layer = randomize_(nk.DomainBatchNorm2d(4, 2)).double()
    alone = [nn.BatchNorm2d(4).double() for _ in range(2)]
    for k, bn in enumerate(alone):
        bn.load_state_dict({n: t[k] if n.startswith(("run", "num")) else t for n, t in layer.state_dict().items()})
    for k in (0, 1, 1, 0, 1):
        x = randn(5, 4, 3, 3) + 10 * k
        close(layer(x, domain=k), alone[k](x))
    for k, bn in enumerate(alone):
        close(layer.running_mean[k], bn.running_mean)
        close(layer.running_var[k], bn.running_var)
        assert layer.num_batches_tracked[k] == bn.num_batches_tracked
        x = randn(5, 4, 3, 3)
        close(layer.eval()(x, domain=k), bn.eval()(x))
        layer.train()


@pytest.mark.parametrize("affine", [True, "scale", "shift"])
def test_each_domain_with_its_own_gamma_and_beta(affine):
    layer = randomize_(nk.DomainBatchNorm3d(4, 3, affine=affine, affine_per_domain=True)).double()
    assert {p.shape for p in layer.parameters()} == {(3, 4)}
    alone = [nk.BatchNorm3d(4, affine=affine).double() for _ in range(3)]
    for k, bn in enumerate(alone):
        bn.load_state_dict({name: t[k] for name, t in layer.state_dict().items()})
    for k in (2, 0, 2):
        layer.zero_grad()
        alone[k].zero_grad()
        x, dy = randn(3, 4, 2, 3, 2) + 5 * k, randn(3, 4, 2, 3, 2)
        y, expected = layer(x, domain=k), alone[k](x)
        close(y, expected)
        y.backward(dy)
        expected.backward(dy)
        for name, p in layer.named_parameters():
            close(p.grad[k], alone[k].get_parameter(name).grad)
            assert not p.grad[torch.arange(3) != k].any()
    for k, bn in enumerate(alone):
        x = randn(3, 4, 2, 3, 2)
        close(layer.eval()(x, domain=k), bn.eval()(x))
        with torch.no_grad():  # the loops' shorter way
            close(layer(x, domain=k), bn(x))


def test_a_new_layer_has_domains_alike():
    layer = nk.DomainBatchNorm1d(4, 3, affine_per_domain=True)
    assert torch.equal(layer.weight, torch.ones(3, 4))
    assert torch.equal(layer.bias, torch.zeros(3, 4))
    assert "num_domains=3, affine_per_domain=True" in repr(layer)
    assert "affine_per_domain" not in repr(nk.DomainBatchNorm1d(4, 3))


def test_a_domain_around_a_whole_model():
    model = nn.Sequential(nk.DomainBatchNorm1d(4, 3), nn.Linear(4, 4), nk.DomainBatchNorm1d(4, 3))
    model[2].domain = 0
    with nk.domain(model, 2):
        model(torch.randn(6, 4))
    assert [layer.num_batches_tracked.tolist() for layer in (model[0], model[2])] == [[0, 0, 1]] * 2
    assert (model[0].domain, model[2].domain) == (None, 0)
    with pytest.raises(KeyError, match="inside"), nk.domain(model, 1):
        raise KeyError("inside")
    assert (model[0].domain, model[2].domain) == (None, 0)


def test_what_it_refuses():
    layer, x = nk.DomainBatchNorm1d(4, 3), torch.randn(6, 4)
    with pytest.raises(nk.ArgumentError, match="needs to know the domain"):
        layer(x)
    with pytest.raises(nk.ArgumentError, match="domains 0 to 2; got 3"):
        layer(x, domain=3)
    with pytest.raises(nk.ArgumentError, match="never seen domain 1"):
        layer.eval()(x, domain=1)
    assert layer.num_batches_tracked.tolist() == [0, 0, 0]
    with pytest.raises(nk.ArgumentError, match="Linear has none"), nk.domain(nn.Linear(2, 2), 0):
        pass
    with pytest.raises(nk.ArgumentError, match="num_domains must be at least 1"):
        nk.DomainBatchNorm1d(4, 0)
    with pytest.raises(nk.ArgumentError, match=r"affine_per_domain=True needs a gamma or a beta.*got affine=False"):
        nk.DomainBatchNorm1d(4, 2, affine=False, affine_per_domain=True)
