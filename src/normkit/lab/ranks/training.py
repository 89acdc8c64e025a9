"""A training, taken apart over ranks: together they take the step that one process takes with the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from normkit.errors import UnsupportedError
from normkit.lab.experiment import Training
from normkit.lab.ranks.group import Ranks
from normkit.lab.ranks.options import StepOptions
from normkit.named_layers import named_layers
from normkit.spec import describe
from normkit.surgery import convert


def over_ranks(training: Training, ranks: Ranks, options: StepOptions) -> Training:
    """The training of one rank: its share of each batch, synchronized norms, and gradients averaged over examples."""
    model = training.model
    if any(_is_batch_norm(layer) for layer in model.modules()):
        convert(model, "sync", inplace=True)
    model.to(ranks.device)  # parameters stay the same objects, as the optimizer has them

    def measure(bare: nn.Module) -> dict[str, Any]:
        found = training.measure(_OnDevice(bare, ranks.device)) if ranks.rank == 0 else {}
        ranks.wait()
        return found

    return replace(
        training,
        batches=lambda start: _shares(training, ranks, start),
        update=_Step(training, ranks, options),
        measure=measure,
    )


def check_divisible(training: Training, name: str) -> None:
    """Refuse a training whose steps on parts of a batch do not add up to the step on the whole."""
    reason = _indivisible(training)
    if reason is not None:
        raise UnsupportedError(
            f"{name} cannot be trained over ranks: {reason}. Run it without torchrun, whose ranks share each batch; "
            "`normkit lab run` runs trials side by side."
        )


def _indivisible(training: Training) -> str | None:
    if training.update is not None:
        return "it takes steps of its own"
    if training.probes is not None:
        return "its probes look at whole batches"
    if training.loss is not nn.functional.cross_entropy:
        return "its loss is not known to be a mean over examples"
    for name, layer in named_layers(training.model):
        spec = describe(layer)
        if spec is not None and "N" in spec.over and (spec.kind != "batch" or spec.scope == "ghost"):
            return f"{name} ({type(layer).__name__}) has statistics of a batch that are not synchronized"
    return None


def _is_batch_norm(layer: nn.Module) -> bool:
    spec = describe(layer)
    return spec is not None and spec.kind == "batch"


def _shares(training: Training, ranks: Ranks, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    share = ranks.share
    if training.shares is not None:
        return training.shares(start, share)
    return ((share.of(x), share.of(y)) for x, y in training.batches(start))


class _Step:
    """Takes a step on this rank's part of a batch, and returns the loss of the whole batch.

    A rank's loss is weighted with its share of all examples: DistributedDataParallel divides by the number of ranks,
    as if all had as many.
    """

    def __init__(self, training: Training, ranks: Ranks, options: StepOptions) -> None:
        self._training, self._ranks, self._options = training, ranks, options
        # Statistics are synchronized already. With find_unused_parameters, DDP keeps its first layout of gradients:
        # else it would change it after a step, and a resumed run would add up gradients in another order.
        with warnings.catch_warnings():
            # Newer versions of torch call this forward_sync_buffers, which older ones do not have.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self._model = DistributedDataParallel(
                training.model,
                device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
                broadcast_buffers=False,
                find_unused_parameters=True,
            )

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Take a step."""
        return self._ranks.exchange(lambda: self._step(x, y), "taking a step")

    def _step(self, x: Tensor, y: Tensor) -> float:
        x, y = x.to(self._ranks.device), y.to(self._ranks.device)
        everyone = torch.tensor([len(y)], device=y.device)
        distributed.all_reduce(everyone)
        count = int(everyone)
        self._training.optimizer.zero_grad(set_to_none=True)
        parts = list(zip(x.tensor_split(self._pieces), y.tensor_split(self._pieces), strict=True))
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        for part, (xs, ys) in enumerate(parts, start=1):
            with self._model.no_sync() if part < len(parts) else nullcontext():
                total += self._backward(xs, ys, count)
        distributed.all_reduce(total)
        self._training.optimizer.step()
        return float(total)

    @property
    def _pieces(self) -> int:
        return self._options.micro_batches

    def _backward(self, x: Tensor, y: Tensor, count: int) -> Tensor:
        """Add the gradients of a part; return its share of the whole batch's loss."""
        kind = self._ranks.device.type
        with torch.autocast(kind, torch.bfloat16, self._options.precision == "bfloat16"):
            output = self._model(x)
            # The mean over no examples is NaN; the sum over none is 0, and has gradients of 0.
            mean = self._training.loss(output, y) if len(y) else output.sum()
            share = mean * (len(y) / count)
        with warnings.catch_warnings():  # a 1x1 convolution has weights of two equal layouts
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            (share * self._ranks.count).backward()
        return share.detach().double()


class _OnDevice(nn.Module):
    """A model that takes and gives tensors of the CPU, where what is measured is compared."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model, self._device = model, device

    def forward(self, x: Tensor) -> Tensor:
        """Apply the model."""
        output: Tensor = self.model(x.to(self._device))
        return output.cpu()
