"""Internal covariate shift: what a layer's gradient becomes when the layers before it have moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from normkit.errors import ArgumentError
from normkit.instruments.loss import Closure, Loss, at, difference, length
from normkit.instruments.probe import Probe, Reading, Watched, chosen_layers


class CovariateShift(Probe):
    """The shift of definition 2.1 of Santurkar et al. 2018, layer by layer.

    With G the gradient of a layer's parameters before an update, and G' the same once the layers before it have been
    updated and it and all after it have not, on one batch: "shift" is `|G - G'|`, "relative" that over `|G|`, "cosine"
    their cosine. Layers come in the order of their forwards; each costs an evaluation of the loss and gradient.

    Args:
        closure: returns the loss of the present batch, computed anew: `lambda: criterion(model(x), y)`.
        layers: names or patterns; without it, every layer that has parameters of its own.
    """

    needs_optimizer = True

    def __init__(self, closure: Closure, layers: str | Sequence[str] | None = None) -> None:
        super().__init__(layers)
        if not callable(closure):
            raise ArgumentError(f"closure must be a function that returns the loss; got a {type(closure).__name__}.")
        self._closure = closure
        self._measured: set[str] = set()
        self._order: dict[str, nn.Module] = {}  # of forwards
        self._before: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # the value and the gradient
        self._loss: Loss | None = None

    def chooses(self, layer: nn.Module) -> bool:
        """Layers with parameters of their own that are trained."""
        return any(p is not None and p.requires_grad for p in layer._parameters.values())

    def begin(self, watched: Watched) -> None:
        """Watch all layers with parameters, to know their order; measure those that were named."""
        super().begin(watched)
        self._measured = {name for name, _ in self.layers}
        self.layers = chosen_layers(watched.model, None, self)

    def saw(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note when the layer came."""
        self._order.setdefault(name, layer)

    def before_update(self, watched: Watched) -> Iterator[Reading]:
        """Keep the parameters and their gradients."""
        parameters = [p for layer in self._order.values() for p in _own(layer)]
        self._loss = Loss(watched.model, self._closure)
        _, gradients = self._loss.and_gradient(parameters)
        self._before = {p: (p.detach().clone(), g) for p, g in zip(parameters, gradients, strict=True)}
        yield from ()

    def after_update(self, watched: Watched) -> Iterator[Reading]:
        """Put the layers back one after the other, the last first, and take the gradient of the first that is back."""
        order, self._order, before, self._before = list(self._order.items()), {}, self._before, {}
        back: dict[nn.Parameter, Tensor] = {}
        found: list[Reading] = []
        for name, layer in reversed(order):
            own = [p for p in _own(layer) if p in before]
            back |= {p: before[p][0] for p in own}
            if name in self._measured and own:
                assert self._loss is not None
                with at(back):
                    _, there = self._loss.and_gradient(own)
                found.append((name, _compared([before[p][1] for p in own], there)))
        yield from reversed(found)


def _own(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer._parameters.values() if p is not None and p.requires_grad]


def _compared(before: Sequence[Tensor], after: Sequence[Tensor]) -> dict[str, float | None]:
    sizes = length(before), length(after)
    shift = length(difference(before, after))
    product = sum((a.double() * b.double()).sum().item() for a, b in zip(before, after, strict=True))
    return {
        "shift": shift,
        "relative": shift / sizes[0] if sizes[0] else None,
        "cosine": product / (sizes[0] * sizes[1]) if all(sizes) else None,
    }
