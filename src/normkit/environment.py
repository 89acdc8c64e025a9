"""The machine and what runs on it: a measurement means little without these facts."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from normkit.kernels import select

# Settings of glibc's malloc, of allocators that are loaded in its place, and of torch's use of huge pages.
_ALLOCATOR_SETTING = re.compile(r"(JE|TC|MI|RP)?MALLOC_|LD_PRELOAD$|GLIBC_TUNABLES$|THP_MEM_ALLOC_ENABLE$")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def describe_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return versions, hardware, the kernels in use, the optional extras, and the allocator's settings."""
    return {
        "normkit": metadata.version("normkit"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": count_cores(),
        "torch_threads": torch.get_num_threads(),
        "kernels": select.status(),
        "extras": installed_extras(),
        "allocator": {name: value for name, value in sorted(environ.items()) if _ALLOCATOR_SETTING.match(name)},
        "huge_pages": _chosen(_HUGE_PAGES.read_text()) if _HUGE_PAGES.exists() else None,
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name as Linux reports it, or else as Python does."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def count_cores() -> int:
    """Return the number of cores this process may use, which a container can limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed_extras(requirements: list[str] | None = None) -> dict[str, dict[str, str | None]]:
    """Return the packages of every extra that normkit declares, with their versions; None where one is missing."""
    extras: dict[str, dict[str, str | None]] = {}
    for requirement in metadata.requires("normkit") or [] if requirements is None else requirements:
        package, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if package and extra:
            extras.setdefault(extra[1], {})[package[0]] = version_of(package[0])
    return extras


@cache  # reading metadata takes milliseconds, and every record has an environment
def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _chosen(setting: str) -> str:
    """Return the word in brackets: "madvise" of "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", setting)
    return found[1] if found else setting.strip()
