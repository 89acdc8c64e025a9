"""The errors users meet. Each says what was needed, what came, and what to do."""

import difflib
from collections.abc import Iterable


class NormkitError(Exception):
    """The root of everything normkit raises on purpose."""


class ArgumentError(NormkitError, ValueError):
    """An option that cannot be: a negative eps, an unknown activation."""


class ShapeError(NormkitError, ValueError):
    """A tensor of the wrong rank or size, or with too few values to normalize."""


class DtypeError(NormkitError, TypeError, ValueError):
    """A tensor of a type that cannot be normalized."""


class NonFiniteError(NormkitError, FloatingPointError):
    """Batch statistics with NaN or infinity, where the layer was told to raise."""


class DistributedError(NormkitError, RuntimeError):
    """A collective that failed: a rank that did not come, or went away."""


class BackendError(NormkitError, RuntimeError):
    """A backend that was asked for by name, and cannot run."""


class MissingExtraError(NormkitError, ImportError):
    """A package of an optional extra that is not installed."""


class NormkitWarning(UserWarning):
    """The root of everything normkit warns of: it went on, and you should know how."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of an error about a name: the nearest of those that are known, or nothing if none is near."""
    near = difflib.get_close_matches(str(name).lower(), list(known), n=1)
    return f' Did you mean "{near[0]}"?' if near else ""
