"""Work done ahead by threads, handed over in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def prefetch(work: Callable[[T], R], batches: Iterable[Sequence[T]], workers: int) -> Iterator[list[R]]:
    """The results of every batch, in order, while threads are at work on the batches after it.

    Always at least one whole batch ahead, and enough for every thread to have something to do and something to do next;
    but no more batches than that would be with one item each, for some may be empty.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="normkit-data")
    coming = iter(batches)
    waiting: deque[list[Future[R]]] = deque()
    try:
        while True:
            while len(waiting) < 2 or sum(max(1, len(batch)) for batch in waiting) < 2 * workers:
                batch = next(coming, None)
                if batch is None:
                    break
                waiting.append([pool.submit(work, item) for item in batch])
            if not waiting:
                return
            yield [future.result() for future in waiting.popleft()]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
