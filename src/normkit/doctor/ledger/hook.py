"""Hooks that a run does not notice: what they do cannot fail it, and copies of the model do not take them along."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import compiler

from normkit.errors import NormkitWarning
from normkit.tracing import is_exporting, is_transformed_or_dual


class Guard:
    """Says whether hooks still work; the first error stops them all.

    Attributes:
        stopped: the error; None if there was none.
    """

    def __init__(self) -> None:
        self.stopped: str | None = None

    def stop(self, error: Exception) -> None:
        """Something of ours has failed. The hooks stay where they are: one of them is running."""
        self.stopped = f"{type(error).__name__}: {error}"
        warnings.warn(f"watch has stopped, and the run goes on: {self.stopped}", NormkitWarning, stacklevel=4)


class Hook:
    """Calls a function when the layer runs as ordinary Python.

    Compilers trace it as nothing at all; exporters and transforms of torch.func run layers whose values mean nothing. A
    deep copy or a pickle of the model has a hook that does nothing, and does not refer to the ledger.
    """

    def __init__(self, function: Callable[..., None], guard: Guard) -> None:
        self._function, self._guard = function, guard

    def __call__(self, *event: Any) -> None:
        """Call it, unless this is no ordinary run or something has failed before."""
        if compiler.is_compiling() or self._guard.stopped is not None or is_exporting() or is_transformed_or_dual():
            return
        try:
            self._function(*event)
        except Exception as error:
            self._guard.stop(error)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy that does nothing."""
        return Hook, (_nothing, Guard())


def _nothing(*event: Any) -> None:
    pass
