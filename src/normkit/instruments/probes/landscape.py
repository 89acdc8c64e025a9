"""The loss along its gradient: how much it varies, and how long the gradient stays what it is."""

from __future__ import annotations

from collections.abc import Iterator

from normkit.errors import ArgumentError
from normkit.instruments.loss import Closure, Loss, at, difference, length, trained_parameters
from normkit.instruments.probe import Probe, Reading, Watched


class Landscape(Probe):
    """Loss variation, gradient predictiveness and effective smoothness along the gradient (Santurkar et al. 2018).

    From the parameters of the step, with gradient g, steps of several lengths are tried along -g. "loss_low" and
    "loss_high" are the least and greatest loss there, "change_low" and "change_high" the norm of the change of the
    gradient, and "smoothness" the greatest ratio of that change to the distance moved; "loss" and "gradient" are those
    at the start. Everything is of the batch that `closure` computes the loss of.

    Args:
        closure: returns the loss of the present batch, computed anew: `lambda: criterion(model(x), y)`.
        span: the shortest and the longest step, in learning rates.
        points: how many lengths, evenly spaced.
        rate: the learning rate; without it, the optimizer's.
    """

    def __init__(
        self, closure: Closure, span: tuple[float, float] = (0.5, 4.0), points: int = 8, *, rate: float | None = None
    ) -> None:
        super().__init__()
        if not callable(closure):
            raise ArgumentError(f"closure must be a function that returns the loss; got a {type(closure).__name__}.")
        if points < 1 or not 0 < span[0] <= span[1]:
            raise ArgumentError(f"span must be two lengths, 0 < shortest <= longest, of one point or more; got {span}.")
        self._closure, self._rate = closure, rate
        gap = (span[1] - span[0]) / max(1, points - 1)
        self._lengths = [span[0] + i * gap for i in range(points)]

    def begin(self, watched: Watched) -> None:
        """See that a learning rate is known."""
        super().begin(watched)
        if self._rate is None and watched.optimizer is None:
            raise ArgumentError("Landscape needs a learning rate: pass optimizer= to attach, or rate= to the probe.")

    def before_update(self, watched: Watched) -> Iterator[Reading]:
        """Walk along the gradient."""
        parameters = trained_parameters(watched.model)
        loss = Loss(watched.model, self._closure)
        rate = self._rate
        if rate is None:
            assert watched.optimizer is not None
            rate = float(watched.optimizer.param_groups[0]["lr"])
        start, gradient = loss.and_gradient(parameters)
        size = length(gradient)
        losses, changes = [], []
        for steps in self._lengths:
            moved = {p: p.data - steps * rate * g for p, g in zip(parameters, gradient, strict=True)}
            with at(moved):
                there, other = loss.and_gradient(parameters)
            losses.append(there)
            changes.append(length(difference(gradient, other)))
        smoothness = [c / (n * rate * size) for c, n in zip(changes, self._lengths, strict=True) if rate * size]
        yield (
            "",
            {
                "loss": start,
                "loss_low": min(losses),
                "loss_high": max(losses),
                "gradient": size,
                "change_low": min(changes),
                "change_high": max(changes),
                "smoothness": max(smoothness, default=None),
            },
        )
