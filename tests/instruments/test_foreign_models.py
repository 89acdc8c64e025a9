"""Probes on networks that others wrote: they measure, and the run is the same without them."""

import copy

import pytest
import torch

import normkit as nk
from support.architectures import ARCHITECTURES
from support.depth import thinned
from support.watched_run import WatchedRun


def cifar(name):
    pytest.importorskip("pytorchcv", reason="needs pytorchcv: pip install --no-deps -r tests/architectures.txt")
    return next(found for found in ARCHITECTURES if found.name == name).build()


def vision_transformer():
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install --no-deps -r tests/architectures.txt"
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes)
    return transformers.ViTForImageClassification(config)


NETWORKS = {
    "residual": lambda: cifar("resnet20_cifar10"),
    "random branches": lambda: cifar("shakeshakeresnet20_2x16d_cifar10"),
    "transformer": vision_transformer,
}


def probes_of(run, network):
    """Every probe that such a model has something for; those that take many evaluations, of few layers."""
    p = nk.probes
    first_norm = next(name for name, layer in run.model.named_modules() if nk.describe(layer) is not None)
    found = [
        p.ActivationQuantiles(),
        p.ActivationMoments(),
        p.GradientNorms(),
        p.EffectiveRate(),
        p.Landscape(run.loss, points=1),
        p.CovariateShift(run.loss, layers=first_norm),
        p.BatchCoupling(run.images, 2, examples=2, draws=2, forward=lambda model, x: run.output(x)),
    ]
    if network != "transformer":  # whose activations are functions, and whose norms are within an example
        found += [p.DeadUnits(), p.StatisticsNoise(), p.BoundaryDistances(run.images[:2], first_norm, units=2)]
    return found


@pytest.mark.parametrize("network", thinned(NETWORKS, lambda network: network != "random branches"))
def test_a_network_of_others(network):
    torch.manual_seed(0)
    first = NETWORKS[network]()
    ends = []
    for is_watched in (False, True):
        torch.manual_seed(1)
        run = WatchedRun(copy.deepcopy(first).train(), shape=(3, 32, 32), classes=10)
        if is_watched:
            probes = probes_of(run, network)
            with nk.attach(run.model, probes, every=1, optimizer=run.optimizer) as recorder:
                run.train(2)
            assert recorder.stopped == {}
            assert {record["probe"] for record in recorder.records} == {probe.name for probe in probes}
        else:
            run.train(2)
        ends.append({**run.model.state_dict(), "losses": torch.tensor(run.losses), "random": torch.get_rng_state()})
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name
    (coupling, *_) = recorder.of("BatchCoupling")
    assert coupling["evaluation"] < 1e-5
    assert (coupling["training"] > 1e-3) == (network != "transformer")
