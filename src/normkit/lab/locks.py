"""Locks on open files, and with them on a run's directory.

The system releases them when the file is closed or the process ends, however it ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from normkit.errors import NormkitError

RUN_LOCK = ".lock"  # held by the process that runs the trials
WORKERS = ".workers"  # shared by the processes that it starts
_DYING = 5.0  # seconds in which the workers of a run that was killed notice it, and end
_RETRY = 0.1  # seconds
_ALL_BYTES = 1 << 30  # more than there are process ids


class BusyError(NormkitError, RuntimeError):
    """A directory that another process is writing to."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes from writing to a run's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with held(directory / RUN_LOCK):
        with held(directory / WORKERS, wait=_DYING):  # workers of a run that was killed may still be writing
            pass
        yield


@contextmanager
def working_in(directory: Path) -> Iterator[None]:
    """Keep other runs out of a run's directory while a process that the run started writes there."""
    with held(directory / WORKERS, shared=True):
        yield


@contextmanager
def held(path: Path, *, shared: bool = False, wait: float = 0.0) -> Iterator[None]:
    """Hold a lock on a file, which is made if there is none."""
    with open(path, "w") as file:
        try:
            lock(file, shared=shared, wait=wait)
        except OSError:
            raise BusyError(
                f"Another process is writing to {path.parent}. Wait for it, or choose another --out."
            ) from None
        yield


def lock(file: IO[Any], *, shared: bool = False, wait: float = 0.0) -> None:
    """Lock a file, against all other locks or, if `shared`, against exclusive ones alone.

    Raises OSError if another process holds a lock that excludes this one, for longer than `wait` seconds.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            _try_lock(file, shared)
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY)
        else:
            return


# The modules below exist on their own systems only, and most commands need no lock: they are imported on use.

if sys.platform == "win32":

    def _try_lock(file: IO[Any], shared: bool) -> None:
        """Windows locks ranges, exclusively: those that share lock a byte each, those that exclude lock all bytes."""
        import msvcrt

        file.seek(os.getpid() if shared else 0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1 if shared else _ALL_BYTES)

else:

    def _try_lock(file: IO[Any], shared: bool) -> None:
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
