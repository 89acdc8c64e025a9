"""The errors users meet. Each says what was needed, what came, and what to do."""

import difflib
from collections.abc import Iterable


class NormkitError(Exception):
    """The root of everything normkit raises on purpose."""


class ArgumentError(NormkitError, ValueError):
    """An argument with an impossible value: a negative eps, an unknown activation."""


class ShapeError(NormkitError, ValueError):
    """A tensor of the wrong rank or size, or with too few values to normalize."""


class DtypeError(NormkitError, TypeError, ValueError):
    """A tensor of a type that cannot be normalized."""


class NonFiniteError(NormkitError, FloatingPointError):
    """Batch statistics with NaN or infinity, in a layer that is set to raise."""


class DistributedError(NormkitError, RuntimeError):
    """A collective that failed because a rank did not take part in it."""


class BackendError(NormkitError, RuntimeError):
    """A backend that was requested by name and cannot run."""


class UnsupportedError(NormkitError, RuntimeError):
    """A tool of torch or another library that cannot read a layer, or would change what it computes."""


class MissingExtraError(NormkitError, ImportError):
    """A package of an optional extra that is not installed."""


class NormkitWarning(UserWarning):
    """The root of everything normkit warns about: the call succeeded, but not quite as one would expect."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The last sentence of an error about an unknown name: the known one nearest to it; empty if none is near.

    The comparison ignores case. The sentence begins with a space, so that it can be appended as it is.
    """
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return f' Did you mean "{by_lower[near[0]]}"?' if near else ""
