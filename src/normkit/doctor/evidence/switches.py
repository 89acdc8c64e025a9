"""torch's switches, which a model's forward may turn and an examination gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.backends import cudnn


class _Switch(NamedTuple):
    read: Callable[[], Any]
    turn: Callable[[Any], object]


_SWITCHES = (
    _Switch(torch.is_grad_enabled, torch.set_grad_enabled),
    _Switch(torch.get_default_dtype, torch.set_default_dtype),
    _Switch(torch.get_num_threads, torch.set_num_threads),
    _Switch(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _Switch(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _Switch(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _Switch(lambda: cudnn.enabled, lambda on: setattr(cudnn, "enabled", on)),
    _Switch(lambda: cudnn.benchmark, lambda on: setattr(cudnn, "benchmark", on)),
    _Switch(lambda: cudnn.deterministic, lambda on: setattr(cudnn, "deterministic", on)),
)


@contextmanager
def same_switches() -> Iterator[None]:
    """Turn back, at the end of the block, the switches of torch that were turned inside it."""
    before = [(switch, switch.read()) for switch in _SWITCHES]
    try:
        yield
    finally:
        for switch, state in before:
            if switch.read() != state:
                switch.turn(state)
