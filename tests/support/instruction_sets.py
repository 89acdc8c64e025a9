"""The instruction sets that the core has loops for, and which of them this machine runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from normkit.kernels import core

NAMES = ("baseline", "avx2", "avx512")


def runnable() -> tuple[str, ...]:
    """Those up to the one in use: the best, unless the run was given another."""
    return NAMES[: NAMES.index(core.instruction_set()) + 1]


@contextmanager
def using(name: str) -> Iterator[None]:
    before = core.instruction_set()
    core.use_instruction_set(name)
    try:
        yield
    finally:
        core.use_instruction_set(before)
