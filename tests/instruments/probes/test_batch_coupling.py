"""How far an output moves with its batch-mates."""

import pytest
import torch
from torch import nn

import normkit as nk


def coupling(model, inputs, batch=4, **options):
    with nk.attach(model, nk.probes.BatchCoupling(inputs, batch, **options), every=1) as recorder:
        recorder.step()
    assert recorder.stopped == {}
    return recorder.records[0]


@pytest.mark.parametrize("build", [lambda: nk.BatchNorm1d(6), lambda: nn.BatchNorm1d(6)], ids=["ours", "torch's"])
def test_of_a_batch_norm_by_hand(build):
    layer, x = build(), torch.randn(20, 6)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    found = coupling(layer, x, examples=3, draws=5)
    drawing = torch.Generator().manual_seed(0)
    outputs = []
    for i in range(3):
        for _ in range(5):
            chosen = torch.cat([x[i : i + 1], x[3:][torch.randperm(17, generator=drawing)[:3]]]).double()
            var, mean = torch.var_mean(chosen, 0, correction=0)
            outputs.append((chosen[0] - mean) / (var + layer.eps).sqrt())
    each = torch.stack(outputs).view(3, 5, 6)
    moved = each.var(1).sum(-1).mean()
    apart = each.mean(1).var(0).sum()
    assert found["training"] == pytest.approx((moved / apart).sqrt().item(), rel=1e-4)
    assert found["evaluation"] == pytest.approx(0, abs=1e-6)
    assert found["batch"] == 4
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert layer.training


def test_norms_within_an_example_and_dropout_do_not_couple():
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 3))
    found = coupling(model, torch.randn(20, 6))
    assert found["training"] == pytest.approx(0, abs=1e-5)


def test_larger_batches_couple_less():
    model = nn.Sequential(nn.Linear(6, 32), nk.BatchNorm1d(32, activation="relu"), nn.Linear(32, 4))
    x = torch.randn(400, 6)
    small, large = (coupling(model, x, n, draws=16)["training"] for n in (4, 256))
    assert large < small / 4  # the root of 64 would be 8


def test_the_same_mates_at_every_step():
    model = nn.Sequential(nn.Linear(6, 8), nk.BatchNorm1d(8))
    with nk.attach(model, nk.probes.BatchCoupling(torch.randn(20, 6)), every=1) as recorder:
        recorder.step()
        recorder.step()
    first, second = ({k: v for k, v in r.items() if k != "step"} for r in recorder.records)
    assert first == second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 1}, "must be 2 or more; got 1, 8 and 8"),
        ({"draws": 1}, "got 8, 8 and 1"),
        ({"batch": 20}, "8 examples in batches of 20 needs 27 inputs; got 20"),
    ],
)
def test_too_little(options, message):
    with pytest.raises(nk.ArgumentError, match=message):
        nk.probes.BatchCoupling(torch.randn(20, 6), **options)
