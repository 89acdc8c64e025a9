"""Diagnoses as an examination might have made them, in random state."""

import math

import torch
from torch import nn

from normkit.doctor.diagnosis import Diagnosis, Patient
from normkit.finding import Finding
from support.report_samples import HOSTILE

STALE = "Its stored statistics are not the data's."
RECALIBRATE = "`nk.recalibrate(model, batches)`"


def resnet50_names():
    """The norms of a ResNet-50, by torchvision's names."""
    names = ["bn1"]
    for stage, blocks in enumerate((3, 4, 6, 3), 1):
        for block in range(blocks):
            names += [f"layer{stage}.{block}.bn{i}" for i in (1, 2, 3)]
            names += [f"layer{stage}.{block}.downsample.1"] if block == 0 else []
    return names


def layer(name, share=0.0, off=0.0, channels=16):
    """Evidence of a norm whose stored statistics are this many standard deviations off."""
    mean, std = torch.randn(channels), torch.randn(channels).exp()
    stored_mean = mean + std * (off + 0.05 * torch.randn(channels))
    stored_std = std * (1 + off) * (0.05 * torch.randn(channels)).exp()
    return {
        "name": name,
        "class": "BatchNorm2d",
        "kind": "batch",
        "share": share,
        "stored_mean": stored_mean.tolist(),
        "data_mean": mean.tolist(),
        "stored_var": stored_std.square().tolist(),
        "data_var": std.square().tolist(),
    }


def finding(code, name, severity, where, message="It is wrong.", remedy="Mend it.", **numbers):
    return Finding(code, name, severity, where, message, numbers, remedy)


def stale(where, share, message=STALE):
    return finding("NK102", "stale-statistics", "error", where, message, RECALIBRATE, share=share, distance=3.1)


def diagnosis(findings, layers, gap=None, model=None, **facts):
    evidence = {"gap": gap, "layers": layers, "batches": 8, "seconds": 4.25} | facts
    return Diagnosis(findings, evidence, Patient(model or nn.Sequential(nn.BatchNorm2d(4)), []))


LOSS = {"measure": "loss", "training": 0.31, "evaluation": 2.302, "recalibrated": 0.33}


def spoiled(names=None, channels=16):
    """Two layers of many with spoiled statistics, a bias and a dropout."""
    names = resnet50_names() if names is None else names
    first, second = names[len(names) // 2], names[-1]
    shares = {first: 0.9, second: 0.07}
    layers = [layer(name, shares.get(name, 0.0), 3.0 * (name in shares), channels) for name in names]
    findings = [
        stale(first, 0.9),
        stale(second, 0.07),
        finding("NK303", "dropout-before-norm", "warning", names[0], remedy="Move the dropout behind the norm."),
        finding("NK301", "redundant-bias", "info", "conv1", "The norm after it removes its bias.", "bias=False"),
    ]
    return diagnosis(findings, layers, LOSS)


def small():
    """A model of three norms, one of which stores what is not finite and one nothing."""
    poisoned = layer("features.1", None, channels=4)
    poisoned["stored_mean"][1], poisoned["stored_var"][2] = math.nan, -1.0
    plain = {"name": "norm", "class": "LayerNorm", "kind": "layer", "share": None}
    layers = [layer("features.0", None), poisoned, plain]
    message = "NaN in `running_mean`, and a negative variance."
    found = finding("NK103", "non-finite-statistics", "error", "features.1", message, RECALIBRATE, channels=[1, 2])
    return diagnosis([found], layers, {**LOSS, "evaluation": math.nan})


def healthy():
    return diagnosis([], [layer(f"blocks.{i}.bn", None) for i in range(3)])


def hostile():
    """Names and messages that look like markup."""
    name = f"blocks[0].{HOSTILE}"
    found = finding("NK102", "stale-statistics", "error", name, HOSTILE, HOSTILE, share=1.0, a=HOSTILE)
    return diagnosis([found], [layer(name, 1.0, 3.0)], LOSS)


def everywhere(count=40):
    """One fault in every layer."""
    names = [f"blocks.{i}.bn" for i in range(count)]
    return diagnosis([stale(name, 1 / count) for name in names], [layer(name, 1 / count, 1.0) for name in names], LOSS)
