"""The identities that tie BatchNorm's relatives to it, and what only they can do."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import normkit as nk
from support.case import randomize_


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def twins(build, *args, **options):
    """A relative in random state, and a BatchNorm2d in the same."""
    relative = randomize_(build(4, *args, **options)).double()
    bn = nn.BatchNorm2d(4).double()
    bn.load_state_dict(relative.state_dict())
    return relative, bn


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def same_state(a, b, tolerance=1e-12):
    for name, t in b.state_dict().items():
        torch.testing.assert_close(a.state_dict()[name], t, rtol=tolerance, atol=tolerance, msg=name)


class TestRenorm:
    def test_unclipped_training_equals_inference(self):
        layer, _ = twins(nk.BatchRenorm2d, r_max=1e6, d_max=1e6)
        x = randn(6, 4, 3, 3) * 3 + 2
        expected = copy.deepcopy(layer).eval()(x)
        close(layer(x), expected)

    def test_limits_of_one_and_zero_make_it_batch_norm(self):
        layer, bn = twins(nk.BatchRenorm2d, r_max=1.0, d_max=0.0)
        x = randn(6, 4, 3, 3)
        close(layer(x), bn(x))

    def test_the_gradient_is_batch_norms_with_gamma_times_r(self):
        layer, bn = twins(nk.BatchRenorm2d)
        x, dy = randn(6, 4, 3, 3).requires_grad_(), randn(6, 4, 3, 3)
        std = (x.detach().var((0, 2, 3), unbiased=False) + layer.eps).sqrt()
        r = (std / (layer.running_var + layer.eps).sqrt()).clamp(1 / 3, 3)
        with torch.no_grad():
            bn.weight.mul_(r)
        (found,) = torch.autograd.grad(layer(x), x, dy)
        (expected,) = torch.autograd.grad(bn(x), x, dy)
        close(found, expected)

    def test_the_standard_deviation_is_what_is_averaged(self):
        layer, _ = twins(nk.BatchRenorm2d, momentum=0.25)
        x = randn(6, 4, 3, 3) * 2 + 1
        old_mean, old_std = layer.running_mean.clone(), (layer.running_var + layer.eps).sqrt()
        layer(x)
        std = (x.var((0, 2, 3), unbiased=False) + layer.eps).sqrt()
        close(layer.running_mean, 0.75 * old_mean + 0.25 * x.mean((0, 2, 3)))
        close((layer.running_var + layer.eps).sqrt(), 0.75 * old_std + 0.25 * std)

    def test_the_papers_schedule(self):
        limits = nk.renorm_schedule(160_000)
        assert limits(0) == limits(5_000) == (1.0, 0.0)
        assert limits(25_000)[1] == 5.0
        assert limits(40_000) == limits(10**6) == (3.0, 5.0)
        r_max, d_max = limits(15_000)
        assert (r_max, d_max) == (pytest.approx(1 + 2 * 10 / 35), pytest.approx(2.5))
        assert nk.renorm_schedule(1_600)(400) == (3.0, 5.0)

    def test_a_layer_with_a_schedule_can_be_pickled(self):
        layer = nk.BatchRenorm2d(4, schedule=nk.renorm_schedule(100))
        assert pickle.loads(pickle.dumps(layer)).schedule(25) == (3.0, 5.0)

    def test_the_schedule_needs_a_length(self):
        with pytest.raises(nk.ArgumentError, match="number of training steps; got 0"):
            nk.renorm_schedule(0)

    def test_the_schedule_follows_the_batches_seen(self):
        layer, bn = twins(nk.BatchRenorm2d, schedule=lambda step: (1.0, 0.0) if step < 8 else (3.0, 5.0))
        for step in (7, 8):
            layer.num_batches_tracked.fill_(step)
            x = randn(6, 4, 3, 3) * 2
            agrees = torch.allclose(layer(x), bn(x))
            assert agrees == (step < 8)

    @pytest.mark.parametrize("options", [{"r_max": 0.9}, {"d_max": -1.0}, {"track_running_stats": False}])
    def test_what_it_refuses(self, options):
        with pytest.raises(nk.ArgumentError, match=r"r_max must be at least 1|running statistics"):
            nk.BatchRenorm2d(3, **options)


class TestGhost:
    def test_one_chunk_is_batch_norm(self):
        layer, bn = twins(nk.GhostBatchNorm2d, chunk_size=8)
        x = randn(8, 4, 3, 3)
        close(layer(x), bn(x))
        same_state(layer, bn)

    def test_chunks_do_not_see_each_other(self):
        layer, bn = twins(nk.GhostBatchNorm2d, chunk_size=3)
        x = randn(8, 4, 3, 3)
        close(layer(x), torch.cat([bn(chunk) for chunk in x.split(3)]))

    def test_running_statistics_are_those_of_the_whole_batch(self):
        layer, bn = twins(nk.GhostBatchNorm2d, chunk_size=3)
        x = randn(8, 4, 3, 3) * 2 + 5
        layer(x)
        bn(x)
        same_state(layer, bn)

    def test_they_come_from_the_one_merge(self, monkeypatch):
        calls = []
        merge = nk.Moments.merge
        monkeypatch.setattr(nk.Moments, "merge", lambda a, b: calls.append(1) or merge(a, b))
        nk.GhostBatchNorm2d(4, chunk_size=2)(torch.randn(8, 4, 3, 3))
        assert len(calls) == 3

    def test_a_last_value_alone_joins_the_chunk_before(self):
        layer = randomize_(nk.GhostBatchNorm1d(4, chunk_size=3)).double()
        bn = nn.BatchNorm1d(4).double()
        bn.load_state_dict(layer.state_dict())
        x = randn(7, 4)
        close(layer(x), torch.cat([bn(x[:3]), bn(x[3:])]))

    def test_masks_and_residuals_are_split_along(self):
        layer, _ = twins(nk.GhostBatchNorm2d, chunk_size=3)
        x, r, mask = randn(6, 4, 3, 3), randn(6, 4, 3, 3), torch.rand(6, 3, 3) > 0.3
        parts = [layer(x[i : i + 3], residual=r[i : i + 3], mask=mask[i : i + 3]) for i in (0, 3)]
        close(layer(x, residual=r, mask=mask), torch.cat(parts))

    def test_an_empty_chunk_size_is_refused(self):
        with pytest.raises(nk.ArgumentError, match=r"chunk_size must be at least 1.*got 0"):
            nk.GhostBatchNorm2d(3, chunk_size=0)


class TestFrozen:
    def test_never_moves(self):
        layer, bn = twins(nk.FrozenBatchNorm2d)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Conv2d(4, 2, 1)).double()
        before = copy.deepcopy(layer.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            model.train().requires_grad_(True)
            model(randn(2, 3, 6, 6)).square().sum().backward()
            optimizer.step()
        torch.optim.swa_utils.update_bn([randn(2, 3, 6, 6)], model)
        assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
        close(layer(x := randn(2, 4, 5, 5)), bn.eval()(x))

    def test_weights_of_other_libraries_frozen_norms_load(self):
        theirs = {
            "weight": torch.rand(4),
            "bias": torch.rand(4),
            "running_mean": torch.rand(4),
            "running_var": torch.rand(4),
        }
        layer = nk.FrozenBatchNorm2d(4)
        layer.load_state_dict(theirs, strict=True)
        assert torch.equal(layer.running_var, theirs["running_var"])

    def test_needs_its_statistics(self):
        with pytest.raises(nk.ArgumentError, match="needs its running statistics"):
            nk.FrozenBatchNorm2d(4, track_running_stats=False)


class TestDomain:
    def test_statistics_never_mix(self):
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

    def test_a_domain_around_a_whole_model(self):
        model = nn.Sequential(nk.DomainBatchNorm1d(4, 3), nn.Linear(4, 4), nk.DomainBatchNorm1d(4, 3))
        model[2].domain = 0
        with nk.domain(model, 2):
            model(torch.randn(6, 4))
        assert [layer.num_batches_tracked.tolist() for layer in (model[0], model[2])] == [[0, 0, 1]] * 2
        assert (model[0].domain, model[2].domain) == (None, 0)
        with pytest.raises(KeyError, match="inside"), nk.domain(model, 1):
            raise KeyError("inside")
        assert (model[0].domain, model[2].domain) == (None, 0)

    def test_what_it_refuses(self):
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


class TestAccumulated:
    def test_micro_batches_equal_the_large_batchs_statistics(self):
        layer, bn = twins(nk.AccumulatedBatchNorm2d, micro_batches=3)
        for _ in range(2):
            large = randn(7, 4, 3, 3) * 2 + 4
            micro = large.split([2, 1, 4])
            before = copy.deepcopy(layer.state_dict())
            for part in micro[:2]:
                layer(part)
                assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
            last = layer(micro[2])
            # The last of a cycle is normalized with the statistics of the whole large batch.
            close(last, bn(large)[3:])
            same_state(layer, bn)

    def test_every_micro_batch_sees_a_batchs_worth_of_values(self):
        layer, bn = twins(nk.AccumulatedBatchNorm2d, micro_batches=3)
        parts = [randn(2, 4, 3, 3) + i for i in range(6)]
        for i, part in enumerate(parts):
            window = torch.cat(parts[max(0, i - 2) : i + 1])
            close(layer(part), copy.deepcopy(bn)(window)[-2:])

    def test_gradients_flow_through_the_micro_batchs_own_share(self):
        layer, _ = twins(nk.AccumulatedBatchNorm2d, micro_batches=2)
        first, x, dy = randn(2, 4, 3, 3), randn(3, 4, 3, 3).requires_grad_(), randn(3, 4, 3, 3)
        layer(first)
        (found,) = torch.autograd.grad(layer(x), x, dy)
        both = torch.cat([first, x])
        mean, var = both.mean((0, 2, 3), keepdim=True), both.var((0, 2, 3), keepdim=True, unbiased=False)
        y = (x - mean) / (var + layer.eps).sqrt() * layer.weight[:, None, None] + layer.bias[:, None, None]
        (expected,) = torch.autograd.grad(y, x, dy)
        close(found, expected)

    def test_checkpointed_micro_batches(self):
        layer, _ = twins(nk.AccumulatedBatchNorm2d, micro_batches=2)
        plain = copy.deepcopy(layer)
        for _ in range(3):
            x, dy = randn(2, 4, 3, 3).requires_grad_(), randn(2, 4, 3, 3)
            twin = x.detach().clone().requires_grad_()
            checkpoint(layer, x, use_reentrant=False).backward(dy)
            plain(twin).backward(dy)
            close(x.grad, twin.grad)
        same_state(layer, plain, 0)

    def test_a_bad_micro_batch_is_left_out_of_the_window(self):
        layer, _ = twins(nk.AccumulatedBatchNorm2d, micro_batches=2, nonfinite="skip-update")
        layer(torch.full((2, 4, 3, 3), torch.nan, dtype=torch.float64))
        assert layer(randn(2, 4, 3, 3)).isfinite().all()
        assert layer.running_mean.isfinite().all()

    @pytest.mark.parametrize("begin", ["load", "reset"])
    def test_a_reloaded_or_reset_layer_begins_a_new_window(self, begin):
        layer, bn = twins(nk.AccumulatedBatchNorm2d, micro_batches=2)
        for name, b in layer.named_buffers():
            if name not in layer.state_dict():
                b.fill_(7)  # what to_empty may find in memory
        if begin == "load":
            layer.load_state_dict(bn.state_dict())
        else:
            layer.reset_parameters()
            bn.reset_parameters()
        x = randn(3, 4, 3, 3)
        close(layer(x), bn(x))
        assert layer.micro_step == 1

    def test_half_precision_keeps_its_window_in_float32(self):
        layer = nk.AccumulatedBatchNorm2d(4, micro_batches=2).half()
        assert layer.window_mean.dtype == torch.float32
        assert layer.running_mean.dtype == torch.float16

    def test_what_it_refuses(self):
        with pytest.raises(nk.ArgumentError, match="micro_batches must be at least 1"):
            nk.AccumulatedBatchNorm2d(4, micro_batches=0)
