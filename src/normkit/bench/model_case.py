"""A training step of a whole network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from normkit.bench.case import Effort, Result, over_ours
from normkit.bench.models import NormFactory
from normkit.bench.spread import Spread
from normkit.bench.timing import Step, interleave, prepare

Shape4 = tuple[int, int, int, int]


@dataclass(frozen=True)
class ModelCase:
    """Forward, cross entropy, backward and a step of SGD, with each contestant's norm in the same network."""

    family: str
    name: str
    build: Callable[[NormFactory], nn.Module]
    norms: Mapping[str, NormFactory]
    shape: Shape4
    quick: bool = True

    def measure(self, effort: Effort) -> Result:
        """Time the contestants, interleaved."""
        builders = {
            name: partial(training_step, partial(self.build, norm), self.shape) for name, norm in self.norms.items()
        }
        steps, errors = prepare(builders)
        seconds = interleave(steps, effort.model_rounds)
        return Result(
            self.family,
            self.name,
            torch.get_num_threads(),
            {"shape": list(self.shape), "mode": "training"},
            effort.model_rounds,
            {name: Spread.of(values) for name, values in seconds.items()},
            over_ours(seconds),
            errors=errors,
        )


def training_step(build: Callable[[], nn.Module], shape: Shape4) -> Step:
    """Return a training step that begins and ends without gradients; initial weights do not depend on the norm."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().train()
        classes = torch.randint(10, shape[:1])
    images = seeded_images(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seeded_images(shape: Shape4) -> Tensor:
    """Return noise that is the same for every contestant."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
