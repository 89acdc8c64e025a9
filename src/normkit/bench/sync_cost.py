"""What SyncBatchNorm costs: bytes, latency and ranks, beside the compute of a step.

A layer of C channels gathers 2C + 1 numbers from each rank in its forward pass, and sums 2C in its backward pass.
Nothing else of the network can go on meanwhile, so that the times of all layers add up:

    seconds = sum over layers of gather(ranks, 2C + 1) + reduce(ranks, 2C)
    gather  = overhead + (ranks - 1) (latency + bytes / bandwidth)
    reduce  = overhead + 2 ceil(log2 ranks) latency + 2 (ranks - 1) / ranks bytes / bandwidth

The gather goes round a ring, the reduction through a tree or by halves, as libraries do these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normkit.batches import in_evaluation, tensors_in
from normkit.errors import ArgumentError
from normkit.hooks import hooked
from normkit.named_layers import named_layers

Collective = Literal["all_gather", "all_reduce"]

BYTES = 4  # of a number: statistics are exchanged in float32
_BYTES_HALF = 2  # activations are kept in bfloat16
_PASSES = 3  # a backward pass computes, reads and writes twice as much as a forward pass
_PRODUCTS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


@dataclass(frozen=True)
class Link:
    """What connects the ranks.

    Attributes:
        name: of the link.
        overhead: seconds that a collective takes before anything is sent: its launch.
        latency: seconds from one rank to the next.
        bandwidth: bytes per second that a rank sends.
    """

    name: str
    overhead: float
    latency: float
    bandwidth: float

    def seconds(self, collective: Collective, ranks: int, numbers: int) -> float:
        """How long a collective over so many ranks takes, each with so many numbers."""
        parts = _parts(collective, ranks, numbers)
        return sum(
            part * cost for part, cost in zip(parts, (self.overhead, self.latency, 1 / self.bandwidth), strict=True)
        )

    def sync_seconds(self, channels: Iterable[int], ranks: int) -> float:
        """How much longer a training step takes whose norms, of so many channels, are synchronized."""
        if ranks == 1:
            return 0.0
        return sum(self.seconds(*one) for count in channels for one in collectives(count, ranks))


class Accelerator(NamedTuple):
    """What computes on each rank.

    Attributes:
        operations: per second, in products.
        memory: bytes per second that it reads and writes.
        launch: seconds that a pass over a layer takes at the least.
    """

    operations: float
    memory: float
    launch: float = 0.0


class Timing(NamedTuple):
    """A collective that was measured."""

    collective: Collective
    ranks: int
    numbers: int
    seconds: float


def collectives(channels: int, ranks: int) -> tuple[tuple[Collective, int, int], ...]:
    """What one layer exchanges in a step."""
    return ("all_gather", ranks, 2 * channels + 1), ("all_reduce", ranks, 2 * channels)


def bytes_sent(channels: Iterable[int], ranks: int) -> float:
    """What each rank sends in a step."""
    return sum(_parts(*one)[2] for count in channels for one in collectives(count, ranks)) if ranks > 1 else 0.0


def _parts(collective: Collective, ranks: int, numbers: int) -> tuple[float, float, float]:
    """How often a collective takes the overhead and the latency, and how many bytes a rank sends."""
    size = BYTES * numbers
    if collective == "all_gather":
        return 1.0, ranks - 1, (ranks - 1) * size
    return 1.0, 2 * math.ceil(math.log2(ranks)), 2 * (ranks - 1) / ranks * size


def fitted(name: str, timings: Sequence[Timing]) -> Link:
    """The link that explains measured collectives best: the least squares of relative errors, with no negative cost."""
    if len({(one.collective, one.ranks, one.numbers) for one in timings}) < 3:
        raise ArgumentError(f"a link has three numbers to fit; got timings of {len(timings)} collectives.")
    seconds = torch.tensor([one.seconds for one in timings], dtype=torch.double)
    parts = torch.tensor([_parts(*one[:3]) for one in timings], dtype=torch.double) / seconds[:, None]
    best, least = torch.zeros(3, dtype=torch.double), math.inf
    for count in (1, 2, 3):
        for kept in map(list, combinations(range(3), count)):
            costs = torch.zeros(3, dtype=torch.double)
            scale = parts[:, kept].norm(dim=0)  # bytes are many, and calls are few
            ones = torch.ones(len(timings), 1, dtype=torch.double)
            costs[kept] = torch.linalg.lstsq(parts[:, kept] / scale, ones).solution[:, 0] / scale
            error = (parts @ costs - 1).square().sum().item()
            if (costs >= 0).all() and error < least:
                best, least = costs, error
    overhead, latency, per_byte = best.tolist()
    return Link(name, overhead, latency, 1 / per_byte if per_byte else math.inf)


def norm_channels(model: nn.Module) -> list[int]:
    """The channels of every layer that synchronizes, or would after `nk.convert(model, "sync")`."""
    return [layer.num_features for _, layer in named_layers(model) if isinstance(layer, _BatchNorm)]


def training_seconds(model: nn.Module, example: Tensor, accelerator: Accelerator) -> float:
    """How long a training step on a batch like this example computes.

    Each layer takes as long as its arithmetic, its reads and writes or its launches, whichever is longest. What is no
    module, such as the sum of a residual block, is left out. A model on the meta device will do.
    """
    total = 0.0

    def count(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal total
        moved = sum(tensor.numel() for tensor in (*tensors_in((args, kwargs)), *tensors_in(output)))
        operations = 2 * output.numel() * layer.weight[0].numel() if isinstance(layer, _PRODUCTS) else 0
        limits = operations / accelerator.operations, _BYTES_HALF * moved / accelerator.memory, accelerator.launch
        total += max(limits)

    leaves = [(layer, count) for _, layer in named_layers(model) if not any(layer.children())]
    with hooked(after=leaves), in_evaluation(model):
        model(example)
    return _PASSES * total


def most_ranks(overhead: Callable[[int], float], limit: float, ranks: Iterable[int]) -> int | None:
    """The largest of these numbers of ranks up to which the overhead stays within a limit; None if it never does."""
    found = None
    for count in sorted(ranks):
        if not overhead(count) <= limit:
            break
        found = count
    return found


def group_sizes(enough: int, examples: Iterable[int]) -> Iterator[tuple[int, int]]:
    """For so many examples on each rank: how many ranks have enough together, in powers of two."""
    for count in examples:
        yield count, 2 ** math.ceil(math.log2(max(1, enough / count)))
