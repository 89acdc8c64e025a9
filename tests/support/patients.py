"""Small models with batches for them, in good health: every gamma, beta and statistic random, and of this data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk


@dataclass
class Case:
    """What examine is called with, and the layers in which its finding is expected."""

    model: nn.Module
    batches: Any
    layers: set[str] = field(default_factory=set)
    options: dict[str, Any] = field(default_factory=dict)

    def examine(self, *codes: str) -> nk.Diagnosis:
        return nk.examine(self.model, self.batches, **self.options, select=codes or None)

    def found(self, code: str) -> set[str | None]:
        return {finding.layer for finding in self.examine(code).findings if finding.code == code}


TWINS: dict[str, Callable[[], tuple[Case, Case]]] = {}


def twins(code: str) -> Callable[[Callable[[], tuple[Case, Case]]], Callable[[], tuple[Case, Case]]]:
    """Register a function that returns a faulty and a healthy case, which differ by one line."""

    def register(build: Callable[[], tuple[Case, Case]]) -> Callable[[], tuple[Case, Case]]:
        TWINS[code] = build
        return build

    return register


def randomized(model: nn.Module) -> nn.Module:
    """Every gamma and beta moved off its default; weights are random already."""
    with torch.no_grad():
        for layer in model.modules():
            if nk.describe(layer) is not None and getattr(layer, "weight", None) is not None:
                layer.weight.uniform_(0.5, 1.5)
                layer.bias.normal_(0.2, 0.3)
    return model


def settled(model: nn.Module, batches: Any, **options: Any) -> nn.Module:
    """The model with statistics of these batches, as a long training at rate 0 would leave them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nk.NormkitWarning)  # of layers that no batch reaches
        nk.recalibrate(randomized(model), batches, inplace=True, **options)
    for layer in model.modules():
        if getattr(layer, "num_batches_tracked", None) is not None:
            layer.num_batches_tracked.fill_(1000)
    return model


def cnn(norm: Callable[..., nn.Module] = nn.BatchNorm2d, bias: bool = False) -> nn.Sequential:
    """Norms at 1 and 4."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=bias),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=bias),
        norm(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def mlp(norm: Callable[..., nn.Module] = nn.BatchNorm1d, bias: bool = False) -> nn.Sequential:
    """A norm at 1."""
    return nn.Sequential(nn.Linear(6, 32, bias=bias), norm(32), nn.ReLU(), nn.Linear(32, 4))


def images(batches: int = 4, size: int = 16, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawing = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, 8, 8, generator=drawing), torch.randint(4, (size,), generator=drawing))
        for _ in range(batches)
    ]


def rows(batches: int = 4, size: int = 32, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawing = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=drawing) + 0.3, torch.randint(4, (size,), generator=drawing))
        for _ in range(batches)
    ]


def healthy(build: Callable[..., nn.Module] = cnn, batches: Any = None, **options: Any) -> Case:
    batches = images() if batches is None else batches
    return Case(settled(build(**options), batches), batches, options={"loss": F.cross_entropy})
