"""What a layer keeps for its backward, and the most that a training step holds at once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from normkit.bench.case import Effort, Result
from normkit.bench.layer_case import Contestants
from normkit.bench.model_case import Shape4, training_step
from normkit.bench.models import NormFactory
from normkit.bench.timing import Step, prepare


@dataclass(frozen=True)
class SavedBytesCase:
    """Bytes that the forward keeps for the backward, without parameters and buffers."""

    family: str
    shape: tuple[int, ...]
    layers: Contestants
    quick: bool = True

    @property
    def name(self) -> str:
        """What is counted, and the shape."""
        return f"saved {','.join(map(str, self.shape))}"

    def measure(self, effort: Effort) -> Result:
        """Count the contestants' bytes; no rounds are needed, since they do not vary."""
        x = torch.randn(self.shape, requires_grad=True)
        return Result(
            self.family,
            self.name,
            torch.get_num_threads(),
            {"shape": list(self.shape), "input_bytes": x.untyped_storage().nbytes()},
            bytes={name: saved_bytes(build(), x) for name, build in self.layers.items()},
        )


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Return the bytes of all memory that autograd keeps of layer(x): each storage once, however often it is kept."""
    own = {t.untyped_storage().data_ptr() for t in [*layer.parameters(), *layer.buffers()]}
    storages: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = layer(x)  # lives on while storages are counted, so that no address is used twice
    total = sum(size for address, size in storages.items() if address not in own)
    del y
    return total


@dataclass(frozen=True)
class PeakMemoryCase:
    """The most memory that a training step takes beyond what is there before it: parameters, momentum and images."""

    family: str
    name: str
    build: Callable[[NormFactory], nn.Module]
    norms: Mapping[str, NormFactory]
    shape: Shape4
    quick: bool = True

    def measure(self, effort: Effort) -> Result:
        """Count the contestants' bytes in the step after the first, which also makes the momentum."""
        peaks: dict[str, int] = {}
        errors: dict[str, str] = {}
        for name, norm in self.norms.items():  # one after the other: a network that waits would only take memory
            steps, failed = prepare({name: partial(training_step, partial(self.build, norm), self.shape)})
            peaks |= {name: peak_bytes(step) for name, step in steps.items()}
            errors |= failed
        return Result(
            self.family,
            self.name,
            torch.get_num_threads(),
            {"shape": list(self.shape), "mode": "training"},
            bytes=peaks,
            errors=errors,
        )


def peak_bytes(step: Step) -> int:
    """Return the most bytes of torch's CPU allocator that one step holds at once, of those it allocates itself.

    Every allocation and release is counted as it happens. The process's own size would say less: it depends on what the
    system's allocator keeps, and on what ran before. A dispatch mode would see tensors only, and our loops step aside
    for one.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"  # the one public place where allocations are kept in order
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: float(e["ts"])):
        held += int(event["args"]["Bytes"])
        peak = max(peak, held)
    return peak
