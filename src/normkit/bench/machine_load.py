"""The load by other processes: with more threads than free cores, a benchmark measures the scheduler."""

from __future__ import annotations

import os
import time
from pathlib import Path

_IDLE = slice(3, 5)  # idle, and waiting for disks
_COUNTED_ELSEWHERE = 8  # guests' time, from here on, is part of the users' already


class Neighbours:
    """Watches, from when it is made, how many cores everything but this process and its children keeps busy."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._now()

    def busy_cores(self) -> float | None:
        """Return their average number since the beginning; None where the system does not report it."""
        if self._start is None or (now := self._now()) is None:
            return None
        seconds, busy, own = (after - before for before, after in zip(self._start, now, strict=True))
        return max(0.0, busy - own) / seconds

    def _now(self) -> tuple[float, float, float] | None:
        """The clock, the seconds of all cores' work so far, and those of our own."""
        if not self._stat.exists():
            return None
        fields = [int(field) for field in self._stat.read_text().split(maxsplit=11)[1:11]]
        ticks = sum(fields[:_COUNTED_ELSEWHERE]) - sum(fields[_IDLE])
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def is_crowded(threads: int, busy_cores: float | None) -> bool:
    """Whether this number of threads had to share cores with other processes for a good part of the time."""
    return busy_cores is not None and threads + busy_cores > (os.cpu_count() or 1) + 0.25
