"""A net all of whose weights stand before norms, in double precision: what is exact about their scale can be seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.lab.models.initial import initialize_
from normkit.lab.models.units import Finish, Norm, unit
from normkit.layers import BatchNorm1d

NO_EPS = torch.finfo(torch.float64).tiny  # a sum with it is the other number
FACTORS = (0.01, 0.5, 3.0, 100.0)  # that weights are multiplied by
INPUTS, HIDDEN, OUTPUTS, EXAMPLES = 8, 6, 4, 64

Batch = tuple[Tensor, Tensor]


def exact_norm(channels: int) -> nn.Module:
    """Batch Normalization with no eps to speak of, no gamma and beta, and no stored statistics."""
    return BatchNorm1d(channels, eps=NO_EPS, affine=False, track_running_stats=False)


class ToyNet(nn.Sequential):
    """Two layers without biases, each before its norm, with tanh between them: a smooth function of the weights."""

    def __init__(self, norm: Norm | None, scale: float, seed: int) -> None:
        finish = Finish(norm, nn.Tanh)
        first, second = nn.Linear(INPUTS, HIDDEN, bias=False), nn.Linear(HIDDEN, OUTPUTS, bias=False)
        super().__init__(unit(first, HIDDEN, finish), unit(second, OUTPUTS, finish.bare()))
        initialize_(self, "he", scale, seed=seed)
        self.double()

    def weights(self) -> list[Tensor]:
        """A copy of the weights."""
        return [weight.detach().clone() for weight in self.parameters()]

    def batch(self) -> Batch:
        """Draw Gaussian inputs, and what a teacher makes of them."""
        x, teacher = (torch.randn(*size, dtype=torch.float64) for size in ((EXAMPLES, INPUTS), (INPUTS, OUTPUTS)))
        return x, torch.tanh(x @ teacher)

    def run(self, weights: Sequence[Tensor], batch: Batch) -> Pass:
        """A forward and a backward with other weights than its own."""
        with torch.enable_grad():
            x, leaves = batch[0].clone().requires_grad_(), [weight.clone().requires_grad_() for weight in weights]
            names = [name for name, _ in self.named_parameters()]
            output = torch.func.functional_call(self, dict(zip(names, leaves, strict=True)), (x,))
            loss = nn.functional.mse_loss(output, batch[1])
            by_input, *by_weights = torch.autograd.grad(loss, [x, *leaves])
        return Pass(output.detach(), by_input, by_weights)


class Pass(NamedTuple):
    """What a forward and a backward give."""

    output: Tensor
    input_gradient: Tensor
    weight_gradients: Sequence[Tensor]


def scaling_errors(model: ToyNet, batch: Batch) -> dict[str, float]:
    """How far the identities of section 3.3 are from holding, at most, with one layer's weights times a factor.

    Output and gradient by the input should be as before, and the gradient by those weights one part in the factor.
    Errors are relative to the largest value.
    """
    weights = model.weights()
    usual = model.run(weights, batch)
    found = {"output": 0.0, "input_gradient": 0.0, "weight_gradient": 0.0}
    for i, factor in ((i, factor) for i in range(len(weights)) for factor in FACTORS):
        scaled = model.run([*weights[:i], factor * weights[i], *weights[i + 1 :]], batch)
        errors = (
            _error(scaled.output, usual.output),
            _error(scaled.input_gradient, usual.input_gradient),
            _error(factor * scaled.weight_gradients[i], usual.weight_gradients[i]),
        )
        found = {key: max(found[key], error) for key, error in zip(found, errors, strict=True)}
    return found


def with_growing_rate(
    model: ToyNet, start: Sequence[Tensor], batch: Batch, settings: Mapping[str, Any], steps: int
) -> list[Tensor]:
    """Train without decay, at a rate that grows so that weights take the directions they take with decay.

    After t steps it is rate * root^(-2t - 1), with the root of `shrinkage` (Li & Arora 2019).
    """
    rate, momentum = settings["rate"], settings["momentum"]
    root = shrinkage(rate * settings["decay"], momentum)
    weights = list(start)
    velocities = [(root - 1) / (root * rate) * weight for weight in weights]  # as if they had only shrunk before
    for step in range(steps):
        gradients = model.run(weights, batch).weight_gradients
        velocities = [momentum * v + g for v, g in zip(velocities, gradients, strict=True)]
        now = rate * root ** (-2 * step - 1)
        weights = [w - now * v for w, v in zip(weights, velocities, strict=True)]
    return weights


def shrinkage(decay: float, momentum: float) -> float:
    """What decay alone multiplies weights by in a step, in the long run; `decay` is the rate times weight decay.

    It is the larger root of x^2 - (1 + momentum - decay) x + momentum, real for decay <= (1 - sqrt(momentum))^2.
    """
    middle = 1 + momentum - decay
    return (middle + math.sqrt(middle**2 - 4 * momentum)) / 2


def direction_distance(one: Tensor, other: Tensor) -> float:
    """The distance of two tensors of norm one in the directions of these."""
    return float((one / one.norm() - other / other.norm()).norm())


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
