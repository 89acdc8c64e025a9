"""How far an example's output moves with the examples it shares a batch with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from normkit.batches import in_evaluation, tensors_in
from normkit.errors import ArgumentError
from normkit.instruments.probe import Probe, Reading, Watched, is_norm
from normkit.named_layers import named_layers
from normkit.snapshot import untouched


class BatchCoupling(Probe):
    """The movement of an example's output over batches that it shares with others (Ioffe & Szegedy 2015, 3.4).

    Some examples are each put into several batches with mates drawn at random. "training" is the root mean square
    distance of an example's output from its mean over these batches, over that of the examples' mean outputs from their
    own mean: 0 is no coupling, and at 1 the mates matter as much as the example. Norms see batch statistics, everything
    else runs as in evaluation, so that dropout does not count. "evaluation" is the same in evaluation, where it should
    be 0, and "batch" the size of the batches.

    Args:
        inputs: examples, at least as many as a batch and the examples together: a tensor (M, ...).
        batch: the size of the batches.
        examples: how many are followed.
        draws: in how many batches each.
        forward: `forward(model, x)`, if the model is not called with the inputs alone.
    """

    def __init__(
        self,
        inputs: Tensor,
        batch: int = 8,
        *,
        examples: int = 8,
        draws: int = 8,
        forward: Callable[[nn.Module, Tensor], object] | None = None,
    ) -> None:
        super().__init__()
        if batch < 2 or examples < 2 or draws < 2:
            raise ArgumentError(f"batch, examples and draws must be 2 or more; got {batch}, {examples} and {draws}.")
        if len(inputs) < examples + batch - 1:
            raise ArgumentError(
                f"BatchCoupling of {examples} examples in batches of {batch} needs {examples + batch - 1} inputs; got "
                f"{len(inputs)}."
            )
        self._inputs, self._batch, self._examples, self._draws = inputs, batch, examples, draws
        self._forward = forward or (lambda model, x: model(x))

    def before_update(self, watched: Watched) -> Iterator[Reading]:
        """Run the batches in both modes."""
        with untouched(watched.model):
            found = {mode: self._coupling(watched.model, mode) for mode in ("training", "evaluation")}
        yield "", {**found, "batch": self._batch}

    def _coupling(self, model: nn.Module, mode: str) -> float | None:
        drawing = torch.Generator().manual_seed(0)  # the same mates at every step
        with in_evaluation(model):
            if mode == "training":
                for _, layer in named_layers(model):
                    layer.training = is_norm(layer)
            outputs = [self._outputs(model, i, drawing) for i in range(self._examples)]
        each = torch.stack(outputs)  # (examples, draws, values)
        mean = each.mean(1, keepdim=True)
        moved = (each - mean).square().sum(-1).sum(1) / (self._draws - 1)
        apart = (mean - mean.mean(0)).square().sum(-1).sum() / (self._examples - 1)
        return (moved.mean() / apart).sqrt().item() if apart else None

    def _outputs(self, model: nn.Module, example: int, drawing: torch.Generator) -> Tensor:
        """What one example gives in each of its batches."""
        mates = self._inputs[self._examples :]
        found = []
        for _ in range(self._draws):
            chosen = torch.randperm(len(mates), generator=drawing)[: self._batch - 1].to(self._inputs.device)
            output = self._forward(model, torch.cat([self._inputs[example : example + 1], mates[chosen]]))
            found.append(torch.cat([t[0].double().flatten() for t in tensors_in(output)]))
        return torch.stack(found)
