"""The C++ core: whether it is installed, and whose threads it runs on."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

from normkit.errors import ArgumentError, BackendError

INSTRUCTION_SET = "NORMKIT_INSTRUCTION_SET"  # in the environment: use the loops of this one, not the machine's best

_TORCH_LIBRARY = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}

loops: Any
WHY_NOT: str | None
try:
    loops, WHY_NOT = importlib.import_module("normkit._core"), None
except ImportError as error:  # installed without a compiler
    loops, WHY_NOT = None, f"normkit was built without its C++ core ({error})"


def _take_torchs_threads() -> bool:
    """Give the core the address of torch's own parallel loop: its threads, and its set_num_threads, are then ours."""
    library = Path(torch.__file__).parent / "lib" / _TORCH_LIBRARY.get(sys.platform, "libtorch_cpu.so")
    try:
        address = ctypes.cast(ctypes.CDLL(str(library)).torch_parallel_for, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return False  # this build of torch does not export it: one thread
    loops.use_threads(address)
    return True


HAS_THREADS = loops is not None and _take_torchs_threads()


def instruction_set() -> str:
    """Return the instruction set of the loops in use: avx512, avx2 or baseline."""
    return str(loops.instruction_set())


def use_instruction_set(name: str) -> None:
    """Use the loops compiled for avx512, avx2 or baseline, if this machine runs them."""
    if WHY_NOT is not None:
        raise BackendError(f"There are no loops to choose from: {WHY_NOT}.")
    try:
        loops.use_instruction_set(name)
    except ValueError as error:
        raise ArgumentError(f"The instruction set must be avx512, avx2 or baseline, and run here: {error}.") from None


if loops is not None and INSTRUCTION_SET in os.environ:
    use_instruction_set(os.environ[INSTRUCTION_SET])
