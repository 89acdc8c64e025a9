"""How often a call of the `torch` backend goes through memory, beside torch's own layer: counted, not timed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch

from normkit.activations import ActivationName
from normkit.bench.case import EAGER, OURS
from normkit.bench.contestants import batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from normkit.bench.families.batch import MODES
from normkit.bench.layer_case import Contestants, Input, LayerCase
from normkit.kernels import select

_MAPS = (8, 64, 14, 14)
_ROWS = (256, 192)


@dataclass(frozen=True)
class Counted:
    """Operators that read or write a tensor of the input's size or more, and the bytes that they read and write."""

    passes: int
    bytes: int


@dataclass(frozen=True)
class TrafficRow:
    """One call, in training forward and backward: ours and torch's own."""

    call: str
    mode: str
    dtype: str
    input_bytes: int
    ours: Counted
    torch: Counted

    @property
    def is_no_more(self) -> bool:
        """Whether ours takes no more passes and no more bytes."""
        return self.ours.passes <= self.torch.passes and self.ours.bytes <= self.torch.bytes

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self) | {"no more than torch": self.is_no_more}


def _calls() -> Iterator[tuple[str, tuple[int, ...], Contestants]]:
    for activation in get_args(ActivationName):
        yield f"BN + {activation}", _MAPS, batch_norm(_MAPS, activation)
    yield "GroupNorm(32)", _MAPS, group_norm(_MAPS)
    yield "InstanceNorm2d", _MAPS, instance_norm(_MAPS)
    yield "LayerNorm", _ROWS, layer_norm(_ROWS)
    yield "RMSNorm", _ROWS, rms_norm(_ROWS)


def count_traffic() -> list[TrafficRow]:
    """Count every call in training and evaluation, in float32 and bfloat16."""
    return [
        _row(LayerCase("traffic", Input(shape, dtype=dtype), contestants, call, mode, parameters=dtype))
        for call, shape, contestants in _calls()
        for mode in MODES
        for dtype in (torch.float32, torch.bfloat16)
    ]


def _row(case: LayerCase) -> TrafficRow:
    with select.backend("torch"):
        ours = _count(case, OURS)
    facts = case.facts()
    return TrafficRow(case.title, case.mode, facts["dtype"], facts["input_bytes"], ours, _count(case, EAGER))


def _count(case: LayerCase, contestant: str) -> Counted:
    from normkit.bench.traffic import measure  # a dispatch mode, which only this needs

    step = case.step(case.layers[contestant])
    step()  # what a first call alone does is not counted
    counted = measure(step, math.prod(case.input.shape))
    return Counted(counted.passes, counted.bytes)
