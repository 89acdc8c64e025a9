"""Entropy minimization on gamma and beta (Wang et al. 2021, "Tent")."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, Optimizer

from normkit.batches import in_evaluation
from normkit.errors import ArgumentError, NonFiniteError
from normkit.named_layers import named_layers
from normkit.surgery.no_updates import no_updates
from normkit.surgery.norms import Norm
from normkit.surgery.statistics.collect import Batches
from normkit.surgery.statistics.predictions import Logits, entropies, logits_of

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class EntropySteps:
    """Steps on the gammas and betas of norms, one per batch; nothing else in the model is written."""

    def __init__(
        self, model: nn.Module, norms: Sequence[Norm], lr: float, epochs: int, optimizer: MakeOptimizer | None
    ) -> None:
        self._model, self._epochs = model, epochs
        self.learned = {norm.name: found for norm in norms if (found := _gamma_and_beta(norm))}
        if not self.learned:
            raise ArgumentError(
                'method "tent" steps on gamma and beta, and no norm of this model has them as parameters. Use "adabn".'
            )
        self.moved: set[str] = set()
        self.parameters = list({id(p): p for found in self.learned.values() for p in found}.values())
        self._make = optimizer or (lambda parameters: Adam(parameters, lr=lr))

    def take(self, with_batch_statistics: Sequence[Norm], batches: Batches, logits: Logits) -> None:
        """Lower the entropy of predictions, while these norms normalize with batch statistics and store none."""
        before = {id(p): p.detach().clone() for p in self.parameters}
        with in_evaluation(self._model), no_updates(self._model), self.learning():
            for norm in with_batch_statistics:
                norm.layer.training = True
            optimizer = self.optimizer()
            for _ in range(self._epochs):
                batches.run(self._model, lambda output: self.step(optimizer, output, logits))
        self.check()
        self.moved = {
            name for name, found in self.learned.items() if not all(torch.equal(p, before[id(p)]) for p in found)
        }

    def optimizer(self) -> Optimizer:
        """A new optimizer of the gammas and betas."""
        return self._make(self.parameters)

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Let only the gammas and betas learn; then every parameter has its own requires_grad and gradient again."""
        found = [p for _, layer in named_layers(self._model) for p in layer._parameters.values() if p is not None]
        before = [(p, p.requires_grad, p.grad) for p in {id(p): p for p in found}.values()]
        try:
            for p, _, _ in before:
                p.requires_grad_(any(p is one for one in self.parameters))
                p.grad = None
            with torch.enable_grad():
                yield
        finally:
            for p, required, grad in before:
                p.requires_grad_(required)
                p.grad = grad

    def step(self, optimizer: Optimizer, output: Any, logits: Logits) -> None:
        """Lower the entropy of the predictions in an output."""
        found = logits_of(output, logits)
        if found is None:
            raise ArgumentError(
                'method "tent" needs logits, (N, classes) with 2 classes or more; the first tensor of the output is '
                'not of that shape. Pass logits=lambda output: ..., or use "adabn".'
            )
        loss = entropies(found).mean()
        if not loss.requires_grad:
            raise ArgumentError(
                "the output does not depend on gamma and beta; forward must not detach it or stop gradients."
            )
        if not loss.isfinite():
            raise NonFiniteError(f"the entropy of the predictions became {loss.item()}.")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def check(self) -> None:
        """Raise if a step went to NaN or infinity."""
        if not all(p.isfinite().all() for p in self.parameters):
            raise NonFiniteError("gamma or beta became NaN or infinite.")


def _gamma_and_beta(norm: Norm) -> list[nn.Parameter]:
    if not norm.spec.has_gamma:
        return []
    own = norm.layer._parameters
    return [p for name in norm.spec.names if (p := own.get(name)) is not None]
