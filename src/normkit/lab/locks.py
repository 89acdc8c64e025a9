"""Locks on open files. The system releases them when the file is closed or the process ends, however it ends."""

from __future__ import annotations

import os
import sys
import time
from typing import IO, Any

_RETRY = 0.1  # seconds
_ALL_BYTES = 1 << 30  # more than there are process ids


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
