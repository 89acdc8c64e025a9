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
