"""A training step of a whole network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from normkit.bench.case import Effort, Result, over_ours
from normkit.bench.models import NormFactory
from normkit.bench.spread import Spread
from normkit.bench.timing import Step, interleave, prepare


@dataclass(frozen=True)
class ModelCase:
    """Forward, cross entropy, backward and a step of SGD, with each contestant's norm in the same network."""

    group: str
    name: str
    build: Callable[[NormFactory], nn.Module]
    norms: Mapping[str, NormFactory]
    shape: tuple[int, int, int, int]
    quick: bool = True

    def measure(self, effort: Effort) -> Result:
        """Time the contestants, interleaved."""
        builders = {name: partial(training_step, self.build, norm, self.shape) for name, norm in self.norms.items()}
        steps, errors = prepare(builders)
        seconds = interleave(steps, effort.model_rounds)
        return Result(
            self.group,
            self.name,
            torch.get_num_threads(),
            {"shape": list(self.shape), "mode": "training"},
            effort.model_rounds,
            {name: Spread.of(values) for name, values in seconds.items()},
            over_ours(seconds),
            errors=errors,
        )


def training_step(
    build: Callable[[NormFactory], nn.Module], norm: NormFactory, shape: tuple[int, int, int, int]
) -> Step:
    """Return a training step that begins and ends without gradients; the weights do not depend on the norm."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(norm)
        images, classes = torch.randn(shape), torch.randint(10, shape[:1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
