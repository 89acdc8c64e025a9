"""Whether ranks share the same layer: compared through the group's store, before it exchanges anything.

A collective over tensors of different sizes is no error that could be caught: gloo ends the process.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import distributed, nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from normkit.errors import DistributedError

_groups: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # with which a layer was compared
_counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of layers, by group


def must_be_shared(layer: nn.Module, what: str, group: Any) -> None:
    """Raise if the layer that another rank brought in this place is another one; layers count in the order they run.

    The first rank to come says what it has, and the others compare: one request to the store, when a layer first runs.
    Nobody waits here. A rank that finds a difference raises; those that have gone on are told that it did not come.
    """
    group = distributed.group.WORLD if group is None else group
    if _groups.get(layer) is group:
        return
    _groups[layer] = group
    _counts[group] = place = _counts.get(group, 0) + 1
    rank, members = distributed.get_rank(), distributed.get_process_group_ranks(group)
    store = PrefixStore(f"layers of {group.group_name}, {members}", _get_default_store())
    first, _, theirs = store.compare_set(str(place), "", f"{rank} {what}").decode().partition(" ")
    if theirs != what:
        raise DistributedError(
            f"{what} is number {place} of the synchronized layers that rank {rank} runs; on rank {first} that is "
            f"{theirs}. All ranks need the same model, and run its layers in the same order."
        )
