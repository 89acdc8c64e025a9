"""Several processes as the ranks of a gloo group, with a deadline for everything that is waited for."""

import os
import sys
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed
from torch.multiprocessing import spawn

PATIENCE = timedelta(seconds=30)  # of a collective
DEADLINE = 300.0  # seconds for all ranks to end


def run_ranks(worker, world, folder, *args):
    """Run worker(rank, world, *args), a function of a module, in a process for each rank; raise what one raises."""
    started = spawn(_run, (worker, world, f"file://{folder / 'store'}", *args), nprocs=world, join=False)
    deadline = time.monotonic() + DEADLINE
    try:
        while not started.join(timeout=max(0.0, deadline - time.monotonic())):  # it returns when one has ended, too
            if time.monotonic() >= deadline:
                running = [rank for rank, process in enumerate(started.processes) if process.is_alive()]
                pytest.fail(f"{worker.__name__}: ranks {running} of {world} still ran after {DEADLINE:.0f} s")
    finally:
        for process in started.processes:
            process.kill()


def _run(rank, worker, world, store, *args):
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the machine's name and network are
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=PATIENCE)
    worker(rank, world, *args)
    distributed.barrier()
    os._exit(0)  # the checks are done, and what a group does at the end of its process is not what is tested
