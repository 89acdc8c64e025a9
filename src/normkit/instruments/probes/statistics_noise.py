"""How far a batch's statistics lie from the population's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import ArgumentError
from normkit.instruments.probe import ForwardProbe, Numbers, by_channel, first_tensor, rms
from normkit.moments import Moments
from normkit.spec import describe


class StatisticsNoise(ForwardProbe):
    """The noise that a norm across examples adds: its batch's statistics beside those of all recorded batches so far.

    "mean_noise" is the root mean square over channels of the distance of the batch's mean from the population's, in the
    population's standard deviations; "std_noise" that of the logarithm of the ratio of the standard deviations;
    "expected" what the first would be if all values of a channel were independent, one over the root of their number,
    and "values" that number. "stored_gap" is the first with the running mean and variance, which this batch has moved
    already, in place of the population's.

    While parameters move, the population moves as well: its estimate forgets with a memory of so many batches.

    Args:
        layers: names or patterns; without it, every norm whose statistics are those of a batch.
        memory: how many recorded batches the population is estimated from, about.
    """

    def __init__(self, layers: str | Sequence[str] | None = None, *, memory: int = 20) -> None:
        super().__init__(layers)
        if memory < 1:
            raise ArgumentError(f"memory must be a number of batches, 1 or more; got {memory!r}.")
        self._memory = memory
        self._population: dict[str, Moments] = {}

    def chooses(self, layer: nn.Module) -> bool:
        """Norms across examples."""
        spec = describe(layer)
        return spec is not None and "N" in spec.over

    def measure(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Numbers:
        """Compare the batch's moments with the population's, then let it have a part in them."""
        values = by_channel(layer, first_tensor(args)).double()
        var, mean = torch.var_mean(values, 1, correction=0)
        batch = Moments(mean, var, values.shape[1])
        found: Numbers = {"mean_noise": None, "std_noise": None}
        known = self._population.get(name)
        if known is not None and known.mean.shape == mean.shape:
            found = {"mean_noise": _mean_noise(batch, known), "std_noise": _std_noise(batch, known)}
            # Of what is remembered, a batch is one in `memory`: its weight is limited, and older ones fade.
            known = known._replace(count=min(int(known.count), (self._memory - 1) * int(batch.count)))
        self._population[name] = batch if known is None else known.merge(batch)
        stored = stored_statistics(layer)
        found |= {"expected": values.shape[1] ** -0.5, "values": values.shape[1]}
        found["stored_gap"] = None if stored is None else _mean_noise(batch, stored)
        return found

    def state(self) -> dict[str, Any]:
        """The population's moments in each layer."""
        return {name: list(moments) for name, moments in self._population.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._population = {name: Moments(*moments) for name, moments in state.items()}


def stored_statistics(layer: nn.Module) -> Moments | None:
    """A layer's running statistics, one per channel, in double precision; None if it has none."""
    mean, var = getattr(layer, "running_mean", None), getattr(layer, "running_var", None)
    if not isinstance(mean, Tensor) or not isinstance(var, Tensor) or mean.dim() != 1:
        return None
    return Moments(mean.double(), var.double(), 0)


def _mean_noise(batch: Moments, population: Moments) -> float | None:
    alive = population.var > 0
    return rms(((batch.mean - population.mean)[alive]) / population.var[alive].sqrt())


def _std_noise(batch: Moments, population: Moments) -> float | None:
    alive = (population.var > 0) & (batch.var > 0)
    return rms((batch.var[alive] / population.var[alive]).log() / 2)
