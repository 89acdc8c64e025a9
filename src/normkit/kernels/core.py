"""The C++ core: whether it is installed, and whose threads it runs on."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from pathlib import Path
from typing import Any, Literal

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


# What the core needs of an OpenMP runtime, in its order: two of torch's own functions, by their names in C++, the
# runtime's, and then what compilers call: GCC's entry, or LLVM's three.
_OPENMP_ENTRIES = (
    "_ZN2at15get_num_threadsEv",
    "_ZN2at18in_parallel_regionEv",
    "omp_get_thread_num",
    "omp_get_num_threads",
    "GOMP_parallel",
    "__kmpc_fork_call",
    "__kmpc_global_thread_num",
    "__kmpc_push_num_threads",
)

ThreadsOf = Literal["torch", "openmp", "caller"]

_IN_WORDS: dict[ThreadsOf, str] = {
    "torch": "torch's",
    "openmp": "torch's, through its OpenMP runtime",
    "caller": "one: this build of torch lends neither its own nor those of an OpenMP runtime",
}
_threads_of: ThreadsOf = "caller"


def threads() -> str:
    """Say on whose threads the loops run and, if that is one thread, why."""
    return _IN_WORDS[_threads_of]


def use_threads(*wanted: ThreadsOf) -> ThreadsOf:
    """Run the loops on torch's threads, in the first of these ways that its build has; else on the calling thread.

    All ways obey torch.set_num_threads and give the same bits. "openmp" is for torch before 2.10, which does not
    export `torch_parallel_for`.
    """
    global _threads_of
    libraries = _torchs_libraries()
    torchs, openmp = _address("torch_parallel_for", libraries), [_address(name, libraries) for name in _OPENMP_ENTRIES]
    gomp, *llvms = openmp[4:]
    has = {"torch": torchs != 0, "openmp": all(openmp[:4]) and (gomp != 0 or all(llvms)), "caller": True}
    _threads_of = next((way for way in wanted if has[way]), "caller")
    if _threads_of == "openmp":
        loops.use_openmp_threads(*openmp)
    else:
        loops.use_threads(torchs if _threads_of == "torch" else 0)
    return _threads_of


def _torchs_libraries() -> list[ctypes.CDLL]:
    """Where torch's own calls lead, in the linker's order: what is loaded for all, its library, and what that needs.

    A preloaded OpenMP runtime is therefore found before the one that torch brings along, which it replaces.
    """
    library = Path(torch.__file__).parent / "lib" / _TORCH_LIBRARY.get(sys.platform, "libtorch_cpu.so")
    try:
        return [*([] if sys.platform == "win32" else [ctypes.CDLL(None)]), ctypes.CDLL(str(library))]
    except OSError:
        return []


def _address(entry: str, libraries: list[ctypes.CDLL]) -> int:
    """Return the address of a function in the first of the libraries that exports it, or 0."""
    for library in libraries:
        if hasattr(library, entry):
            return ctypes.cast(getattr(library, entry), ctypes.c_void_p).value or 0
    return 0


if loops is not None:
    use_threads("torch", "openmp")


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
