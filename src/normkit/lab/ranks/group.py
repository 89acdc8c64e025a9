"""The processes that torchrun has started, as a group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from normkit.errors import BackendError, DistributedError, NormkitError
from normkit.lab.data import Share
from normkit.layers.absent_ranks import who_was_absent
from normkit.ranks import together

T = TypeVar("T")

TIME_OUT = timedelta(minutes=10)  # for what all ranks do at the same pace
_LONG = timedelta(days=1)  # for what the others wait for while one works: a rank that dies is noticed all the same


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return distributed.is_available() and distributed.is_torchelastic_launched()


def is_first_rank() -> bool:
    """Whether this process speaks for all: the first of those that torchrun started, or the only one."""
    return not is_launched() or os.environ.get("RANK", "0") == "0"


def rank_count() -> int | None:
    """How many processes torchrun started; None where it started none."""
    return int(os.environ.get("WORLD_SIZE", "1")) if is_launched() else None


def launch_name() -> str:
    """What all restarts of one launch share: the job's id, or the process of torchrun where it was given none."""
    given = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return given if given != "none" else f"process {os.getppid()}"


def is_restart() -> bool:
    """Whether torchrun has started its processes again, after one of them ended badly."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@dataclass(frozen=True)
class Ranks:
    """A process among the others."""

    rank: int
    count: int
    device: torch.device
    control: Any  # a gloo group, for objects
    patient: Any  # one that waits for long

    @property
    def share(self) -> Share:
        """Its part of every batch."""
        return Share(self.rank, self.count)

    def gather(self, value: T) -> list[T]:
        """What every rank has."""
        every: list[Any] = [None] * self.count
        self.exchange(lambda: distributed.all_gather_object(every, value, group=self.control), "beginning")
        return every

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first rank makes, on all of them; what it raises, all raise."""
        made = [self.together(lambda: make() if self.rank == 0 else None)]
        self.exchange(lambda: distributed.broadcast_object_list(made, src=0, group=self.control), "beginning")
        return made[0]  # type: ignore[return-value]

    def together(self, make: Callable[[], T]) -> T:
        """What this rank makes, while all do. If one fails, all raise, so that none is left waiting."""
        return together(make, "The run", self.gather)

    def wait(self) -> None:
        """Wait until all ranks are here, for as long as it takes one to measure."""
        self.exchange(lambda: distributed.barrier(group=self.patient), "waiting for what the first rank measures")

    def exchange(self, collective: Callable[[], T], doing: str) -> T:
        """Run what needs all ranks; if it fails, say who was not there."""
        start = time.monotonic()
        try:
            return collective()
        except RuntimeError as error:
            if isinstance(error, NormkitError) or not _is_of_a_collective(error):
                raise
            absent = who_was_absent(None, time.monotonic() - start)
            raise DistributedError(
                f"Rank {self.rank} needs all {self.count} ranks, when {doing}: {absent} ({error}). "
                "torchrun with --max-restarts resumes from the last checkpoint."
            ) from error


def _is_of_a_collective(error: RuntimeError) -> bool:
    """Whether an exchange failed, and not what a rank computed: gloo's errors have no class, but its name in them."""
    return isinstance(error, distributed.DistError) or "gloo" in str(error)


@contextmanager
def joined(time_out: timedelta = TIME_OUT) -> Iterator[Ranks]:
    """Join the group that torchrun describes: NCCL where there is CUDA, else gloo."""
    local, has_cuda = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.is_available()
    needed = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available() or not has_cuda}
    for backend, is_there in needed.items():
        if not is_there:
            raise BackendError(
                f"Training over ranks needs the backend {backend} of torch.distributed; torch {torch.__version__} was "
                "built without it. Install a build of torch that has it."
            )
    if has_cuda:
        torch.cuda.set_device(local)
    store, rank, count = _store(time_out)
    backend = "nccl" if has_cuda else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=time_out)
    try:
        yield current_ranks(torch.device("cuda", local) if has_cuda else torch.device("cpu"), time_out)
    finally:
        distributed.destroy_process_group()


def _store(time_out: timedelta) -> tuple[Store, int, int]:
    """Where ranks find one another: the store that torchrun describes, this rank, and their number.

    The store may outlive a restart (torch 2.13), with the addresses of processes that are gone, for which a rank would
    wait for ever. The agents of several nodes count restarts each for itself, so that there it is left as it is.
    """
    store, rank, count = next(rendezvous("env://", timeout=time_out))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store, rank, count


def current_ranks(device: torch.device, time_out: timedelta = TIME_OUT) -> Ranks:
    """Describe this process among those of the default group, which is there."""
    control = distributed.new_group(backend="gloo", timeout=time_out)
    patient = distributed.new_group(backend="gloo", timeout=_LONG)
    return Ranks(distributed.get_rank(), distributed.get_world_size(), device, control, patient)
