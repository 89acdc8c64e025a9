"""The learning rate that scale-invariant weights really have, and where their norms are heading."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.instruments.probe import Numbers, Probe, Reading, Watched, has_weight

_REMEMBERED = 20  # recorded steps that the gradient's mean square is taken over


class Settings(NamedTuple):
    """What an optimizer does to a weight: its rate, and where SGD is understood, decay and momentum."""

    rate: float
    decay: float
    momentum: float
    is_understood: bool  # plain SGD, with decay in the gradient


class EffectiveRate(Probe):
    """How far each layer's weights turn in a step, and the equilibrium that decay leads them to.

    A norm after a layer makes the loss indifferent to the scale of the layer's weights: only their direction counts,
    and that moves with rate / norm^2 (van Laarhoven 2017). "norm" is that of the weights, "rate" the optimizer's,
    "effective_rate" the rate over the norm squared, "angle" the turn of the weights in this step, in radians, "radial"
    the cosine of weights and gradient, which is 0 where the loss is indifferent to scale. For SGD with weight decay,
    "equilibrium_norm" and "equilibrium_angle" are what the two come to rest at if the layer is scale-invariant:

        norm^4 = rate E|g|^2 norm^2 / (2 decay (1 - momentum)),   angle = sqrt(2 rate decay / (1 + momentum))

    with the mean taken over the last twenty recorded steps. They are None for other optimizers, and without decay.

    Args:
        layers: names or patterns; without it, every linear layer and convolution.
    """

    needs_optimizer = True

    def __init__(self, layers: str | Sequence[str] | None = None) -> None:
        super().__init__(layers)
        self._before: dict[str, tuple[Tensor, Numbers]] = {}
        self._squares: dict[str, deque[float]] = {}  # of the gradient at weights of norm one

    def chooses(self, layer: nn.Module) -> bool:
        """Layers with weights."""
        return has_weight(layer)

    def before_update(self, watched: Watched) -> Iterator[Reading]:
        """Keep the weights, and what their gradient says."""
        for name, layer in self.layers:
            weight: Any = layer.weight
            if weight.grad is None:
                continue
            w, g = weight.detach().double().flatten(), weight.grad.detach().double().flatten()
            norm, gradient = w.norm().item(), g.norm().item()
            self._squares.setdefault(name, deque(maxlen=_REMEMBERED)).append((gradient * norm) ** 2)
            radial = (w @ g).item() / (norm * gradient) if norm and gradient else None
            self._before[name] = w, {"norm": norm, "gradient": gradient, "radial": radial}
        yield from ()

    def after_update(self, watched: Watched) -> Iterator[Reading]:
        """Compare the weights with what they were."""
        for name, layer in self.layers:
            if name not in self._before:
                continue
            before, found = self._before.pop(name)
            weight: Any = layer.weight
            used = settings_of(watched.optimizer, weight)
            found["angle"] = angle_between(before, weight.detach().double().flatten())
            if used is not None:
                found |= {
                    "rate": used.rate,
                    "effective_rate": used.rate / found["norm"] ** 2 if found["norm"] else None,
                }
                found |= equilibrium(used, self._squares[name])
            yield name, found

    def state(self) -> dict[str, Any]:
        """The squared gradients that are averaged."""
        return {name: list(squares) for name, squares in self._squares.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._squares = {name: deque(squares, maxlen=_REMEMBERED) for name, squares in state.items()}


def settings_of(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> Settings | None:
    """What an optimizer does to a parameter; None if it does not have it."""
    groups = [] if optimizer is None else optimizer.param_groups
    group = next((group for group in groups if any(p is parameter for p in group["params"])), None)
    if group is None:
        return None
    is_plain = not group.get("nesterov") and not group.get("dampening")
    is_understood = type(optimizer) is torch.optim.SGD and is_plain
    return Settings(float(group["lr"]), float(group.get("weight_decay", 0)), group.get("momentum", 0.0), is_understood)


def equilibrium(used: Settings, squares: Sequence[float]) -> Numbers:
    """The norm and the angle per step that decay and gradients balance at; `squares` are those of unit weights."""
    if not used.is_understood or not used.decay:
        return {"equilibrium_norm": None, "equilibrium_angle": None}
    mean = sum(squares) / len(squares)
    fourth = used.rate * mean / (2 * used.decay * (1 - used.momentum))
    angle = math.sqrt(2 * used.rate * used.decay / (1 + used.momentum))
    return {"equilibrium_norm": fourth**0.25, "equilibrium_angle": angle}


def angle_between(a: Tensor, b: Tensor) -> float | None:
    """The angle between two vectors, exact also where it is small; None where one is zero."""
    if not a.any() or not b.any():
        return None
    chord = (a / a.norm() - b / b.norm()).norm().item()
    return 2 * math.asin(min(1.0, chord / 2))
