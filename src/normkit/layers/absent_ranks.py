"""Who did not come to a collective: found out through the group's store, once it has failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

GRACE = 2.0  # seconds in which the other ranks find out, too
_LATE = 0.1  # of the longest wait: who waited less came when it was over
_SHORTEST = 1.0  # seconds: no time-out is shorter, and a wait below it ended for another reason


def absent_ranks(group: Any, waited: float) -> list[int]:
    """The ranks that were not there, as far as it can be known.

    Every rank whose collective fails calls this with the seconds that it waited, and so tells the others that it was
    there. Those that tell nothing are dead or busy with something else; those that waited for a moment only, beside
    others that waited long, came too late. None: a connection was cut, and all are there.
    """
    members, own = distributed.get_process_group_ranks(group), distributed.get_rank()
    try:
        store = PrefixStore(f"absent of {members}", _get_default_store())
        store.set(str(own), str(waited))
        silent = _silent(store, members)
        waits = {rank: float(store.get(str(rank))) for rank in members if rank not in silent}
    except RuntimeError:  # the store itself is gone, and with it the rank that kept it
        return [members[0]] if own != members[0] else []
    longest = max(waits.values())
    late = [rank for rank, wait in waits.items() if longest >= _SHORTEST and wait < _LATE * longest]
    return sorted({*silent, *late})


def who_was_absent(group: Any, waited: float) -> str:
    """The same in words."""
    absent = absent_ranks(group, waited)
    if not absent:
        return "all are there, but a connection between them was cut"
    return f"rank{'' if len(absent) == 1 else 's'} {', '.join(map(str, absent))} did not come"


def _silent(store: Any, members: Sequence[int]) -> list[int]:
    deadline = time.monotonic() + GRACE
    while True:
        silent = [rank for rank in members if not store.check([str(rank)])]
        if not silent or time.monotonic() >= deadline:
            return silent
        time.sleep(0.05)
