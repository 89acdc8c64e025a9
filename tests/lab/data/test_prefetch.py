import threading
import time
from itertools import count, islice

import pytest

from normkit.lab.data.prefetch import prefetch


def test_order_is_kept_whatever_takes_longer():
    batches = [[3, 1], [2, 0], [], [5]]
    slow = lambda number: time.sleep(number / 500) or number  # noqa: E731
    assert list(prefetch(slow, batches, workers=4)) == batches


def test_threads_work_side_by_side():
    together = threading.Barrier(4, timeout=10)
    assert len(list(prefetch(lambda _: together.wait(), [[0, 0], [0, 0]], workers=4))) == 2


@pytest.mark.parametrize(("size", "workers", "ahead"), [(1, 1, 2), (1, 4, 8), (10, 2, 2)])
def test_how_far_ahead(size, workers, ahead):
    taken = []
    batches = ([taken.append(number)] * size for number in count())
    next(prefetch(lambda item: item, batches, workers))
    assert len(taken) == ahead


def test_batches_of_nothing_without_end_are_handed_over():
    assert list(islice(prefetch(lambda item: item, ([] for _ in count()), workers=4), 3)) == [[], [], []]


def test_an_error_comes_in_its_turn():
    found = prefetch(lambda number: 1 // number, [[1], [0], [1]], workers=3)
    assert next(found) == [1]
    with pytest.raises(ZeroDivisionError):
        next(found)


def test_threads_end_with_the_iteration():
    found = prefetch(lambda number: number, ([number] for number in count()), workers=2)
    assert list(islice(found, 3)) == [[0], [1], [2]]
    found.close()
    until = time.monotonic() + 10
    while any(thread.name.startswith("normkit-data") for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
