"""A model's health as an assertion of a test. The plugin that offers it as a fixture is the package pytest_normkit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from normkit.doctor.diagnosis import Diagnosis
from normkit.doctor.examine import examine


def assert_healthy(
    model: nn.Module, batches: Iterable[Any], *, select: str | Iterable[str] | None = None, **options: Any
) -> Diagnosis:
    """Examine a model, and fail with everything that is wrong with it.

    Args:
        model: it is left as it was.
        batches: as for `nk.examine`.
        select: codes, beginnings of codes or names of the rules to go by; without it, all.
        options: the others of `nk.examine`: loss, optimizer, forward, ignore.
    """
    __tracebackhide__ = True  # pytest shows the test's line, not ours
    diagnosis = examine(model, batches, select=select, **options)
    faults = [finding for finding in diagnosis.findings if finding.severity != "info"]
    if faults:
        lines = "\n".join(f"  {finding.severity}: {finding}" for finding in faults)
        raise AssertionError(f"{type(model).__name__} is not healthy:\n{lines}")
    return diagnosis
