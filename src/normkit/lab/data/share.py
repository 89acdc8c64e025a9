"""Which part of every batch one of several processes takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Share(NamedTuple):
    """One rank's: a batch is cut in its order, and no part is more than one example larger than another."""

    rank: int = 0
    ranks: int = 1

    def of(self, batch: Tensor) -> Tensor:
        """The rank's examples of a batch; none, where there are fewer examples than ranks."""
        return batch.tensor_split(self.ranks)[self.rank]


WHOLE = Share()
