"""How far the data lie from where units switch, and from where the decision changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit.batches import in_evaluation, tensors_in
from normkit.errors import ArgumentError
from normkit.hooks import hooked
from normkit.instruments.probe import Probe, Reading, Watched, is_norm
from normkit.snapshot import untouched


class BoundaryDistances(Probe):
    """First-order distances, in the space of the inputs, to the boundaries of the partition that a net makes of it.

    A unit h, a value of a norm's output, switches where it is 0; from an input x that is `|h(x)| / |dh/dx|` away.
    "median" and "near", the tenth percentile, are over inputs and units. For the model as a whole they are of margins:
    the difference of its two greatest outputs over the norm of its gradient (Balestriero & Baraniuk 2022). The model is
    taken as it evaluates. "flat" is the share of units and inputs where the gradient vanishes.

    Args:
        inputs: a tensor (N, ...) that the model takes.
        layers: names or patterns; without it, every norm.
        units: how many values of each layer's output, evenly spaced.
    """

    def __init__(self, inputs: Tensor, layers: str | Sequence[str] | None = None, *, units: int = 16) -> None:
        super().__init__(layers)
        if not inputs.is_floating_point() or units < 1:
            raise ArgumentError(
                f"inputs must be floating point numbers, of one unit or more; got {inputs.dtype}, {units}."
            )
        self._inputs, self._units = inputs, units

    def chooses(self, layer: nn.Module) -> bool:
        """Norms, whose zero is where the activation after them switches."""
        return is_norm(layer)

    def before_update(self, watched: Watched) -> Iterator[Reading]:
        """Differentiate units by the inputs."""
        model, outputs = watched.model, dict[str, Tensor]()

        def keep(name: str) -> Any:
            return lambda layer, args, kwargs, output: outputs.setdefault(name, tensors_in(output)[0])

        after = [(layer, keep(name)) for name, layer in self.layers]
        with untouched(model), in_evaluation(model), hooked(after=after), torch.enable_grad():
            x = self._inputs.detach().clone().requires_grad_()
            found = tensors_in(model(x))
            for name, _ in self.layers:
                if name in outputs:
                    yield name, _summary([_distance(unit, x) for unit in self._chosen(outputs[name])])
            if found and found[0].dim() == 2 and found[0].shape[1] > 1:
                two = found[0].topk(2, dim=1).values
                yield "", _summary([_distance(two[:, 0] - two[:, 1], x)])

    def _chosen(self, output: Tensor) -> Iterator[Tensor]:
        """Some values of each example, evenly spaced over all that it has."""
        flat = output.flatten(1)
        step = max(1, flat.shape[1] // self._units)
        return (flat[:, i] for i in range(0, min(flat.shape[1], step * self._units), step))


def _distance(values: Tensor, x: Tensor) -> Tensor:
    """Of each example's value from zero, in the space of its input; infinite where it does not depend on it."""
    (gradient,) = torch.autograd.grad(values.sum(), x, retain_graph=True)
    slope = torch.linalg.vector_norm(gradient.double().flatten(1), dim=1)
    found: Tensor = values.detach().double().abs() / slope
    return found


def _summary(distances: Sequence[Tensor]) -> dict[str, float | None]:
    every = torch.cat(list(distances))
    finite = every[every.isfinite()]
    near, median = finite.quantile(finite.new_tensor([0.1, 0.5])).tolist() if len(finite) else (None, None)
    return {"median": median, "near": near, "flat": 1 - len(finite) / max(1, len(every))}
