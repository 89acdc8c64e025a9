"""What goes wrong among ranks: an error on all of them, which says what and who, and no hang."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from tests.lab.ranks.test_training import toy_training
from torch import distributed, nn

import normkit as nk
from normkit.errors import ArgumentError, BackendError, DistributedError
from normkit.lab.conclusion import run_experiment
from normkit.lab.plan import RunPlan, write_plan
from normkit.lab.ranks.agreement import check_agreement, facts_of
from normkit.lab.ranks.carrier import AllRanks
from normkit.lab.ranks.group import current_ranks, joined
from normkit.lab.ranks.options import StepOptions
from normkit.lab.record import read_trial, without_times
from normkit.lab.trial import RunOptions, run_trial, trial_paths
from support.ranks import run_ranks
from support.toy import Toy, trial_of

CPU = torch.device("cpu")
SHORT = timedelta(seconds=4)


def facts_with(model):
    return facts_of(replace(toy_training(), model=model))


def disagree(rank, world):
    ranks = current_ranks(CPU)
    cases = {
        "rank 0 has 0.weight of (5, 4), torch.float32, rank 1 has 0.weight of (6, 4)": nn.Linear(4, 5 + rank),
        "rank 0 has 0.weight of (5,), torch.float32, rank 1 has 0.weight of (6,)": nk.BatchNorm1d(5 + rank),
        "rank 0 has 0: ReLU.*rank 1 has 0: Tanh": nn.Tanh() if rank else nn.ReLU(),
        "rank 0 has nothing, rank 1 has 0.weight": nn.Linear(4, 5) if rank else nn.ReLU(),
    }
    for message, layer in cases.items():
        pattern = message.replace("(", r"\(").replace(")", r"\)")
        with pytest.raises(
            DistributedError, match=f"All ranks need the same (parameters and buffers|layers); {pattern}"
        ):
            check_agreement(ranks, facts_with(nn.Sequential(layer)))
    check_agreement(ranks, facts_with(nn.Sequential(nn.Linear(4, 5))))
    fail_together(ranks, rank)


def fail_together(ranks, rank):
    def fail():
        if rank == 1:
            raise ArgumentError("nothing there")

    with pytest.raises(
        ArgumentError if rank else DistributedError, match="nothing there" if rank else "failed on rank 1"
    ):
        ranks.together(fail)
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        ranks.exchange(fail_to_compute, "taking a step")
    assert ranks.from_first(lambda: f"of rank {rank}") == "of rank 0"


def fail_to_compute():
    raise RuntimeError("out of memory")


def test_what_differs_between_ranks_is_named_on_all_of_them(tmp_path):
    run_ranks(disagree, 2, tmp_path)


class WithData(Toy):
    """The toy, with data that the checks can read."""

    def training(self, trial):
        return replace(super().training(trial), probes=None)


def stop_and_resume(rank, world, folder):
    ranks = current_ranks(CPU)
    trial = trial_of("adam")._replace(data="fashion-mini")
    left = iter(range(25))

    def pause():
        if next(left, None) is None:
            raise KeyboardInterrupt

    def run(directory, resume=False, pause=None):
        options = RunOptions(directory, resume)
        run_trial(WithData(pause=pause), trial, options, lambda *step: None, AllRanks(ranks, StepOptions()))
        return trial_paths(trial, directory)

    with pytest.raises(KeyboardInterrupt):
        run(folder / "stopped", pause=pause)
    found, checkpoint = run(folder / "stopped", resume=True)
    whole, _ = run(folder / "whole")
    distributed.barrier()
    assert [*map(without_times, read_trial(found).measured)] == [*map(without_times, read_trial(whole).measured)]
    assert read_trial(found).end["status"] == "done"
    assert not checkpoint.with_suffix(".ranks").exists()


def test_a_resumed_trial_has_the_record_of_an_unbroken_one(tmp_path):
    run_ranks(stop_and_resume, 2, tmp_path, tmp_path)


# ---- ranks that are not there


def synced(group):
    return nn.Sequential(nn.Linear(5, 5), nn.ModuleDict({"norm": nk.SyncBatchNorm(5, process_group=group)}))


def sleep_too_long(rank, world):
    distributed.barrier()
    group = distributed.new_group(timeout=SHORT)
    model = synced(group)
    if rank == 1:
        time.sleep(9)
        return
    start = time.monotonic()
    with pytest.raises(DistributedError, match=r"SyncBatchNorm\(5\) at '1.norm' needs all .* rank 1 did not come"):
        model[1]["norm"](model[0](torch.randn(3, 5)))
    assert time.monotonic() - start < 30


def cut_connections(rank, world):
    """Rank 1's sockets are shut: both ranks are there, and neither hears the other."""
    distributed.barrier()
    model = synced(None)
    if rank == 1:
        for each in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(each))) as found:
                found.getpeername()  # an error for what is not a connection
                found.shutdown(socket.SHUT_RDWR)
    start = time.monotonic()
    with pytest.raises(
        DistributedError, match=r"SyncBatchNorm\(5\) at '1.norm' needs all 2 ranks .* connection .* cut"
    ):
        model[1]["norm"](model[0](torch.randn(3, 5)))
    assert time.monotonic() - start < 30
    os._exit(0)  # no barrier is possible any more


def die(rank, world):
    ranks = current_ranks(CPU, SHORT)
    if rank == 1:
        os._exit(0)
    with pytest.raises(DistributedError, match="Rank 0 needs all 2 ranks, when beginning: rank 1 did not come"):
        ranks.gather(0)
    os._exit(0)


@pytest.mark.deep
def test_a_rank_that_sleeps_is_named_with_the_layer(tmp_path):
    run_ranks(sleep_too_long, 3, tmp_path)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc, to find a process's connections")
def test_a_connection_that_is_cut_is_an_error_that_names_the_layer(tmp_path):
    run_ranks(cut_connections, 2, tmp_path)


@pytest.mark.deep
def test_a_rank_that_died_is_named(tmp_path):
    run_ranks(die, 2, tmp_path)


# ---- before there is a group


def test_a_backend_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    with pytest.raises(BackendError, match=r"needs the backend gloo of torch\.distributed"), joined():
        pass
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: True)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True))
    with pytest.raises(BackendError, match="needs the backend nccl"), joined():
        pass


def test_a_run_is_resumed_with_as_many_ranks_only(tmp_path):
    write_plan(RunPlan("inception", "quick", ranks=2), tmp_path)
    with pytest.raises(ArgumentError, match="has ranks 2, and can only be resumed as it is"):
        run_experiment("inception", tmp_path, resume=True)


def test_python_m_runs_the_program():
    run = subprocess.run([sys.executable, "-m", "normkit", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("normkit ")


@pytest.mark.parametrize(
    ("options", "launched", "message"),
    [
        ({"micro_batches": 2}, False, "--micro-batches and --precision are for training over ranks: torchrun"),
        ({"precision": "bfloat16"}, False, "--micro-batches and --precision"),
        ({"jobs": 2}, True, "--jobs is not for ranks"),
        ({"micro_batches": 0}, True, "--micro-batches needs 1 or more; got 0"),
        ({"precision": "bfloat"}, True, "one of float32, bfloat16; got 'bfloat'. Did you mean \"bfloat16\""),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_written(
    options, launched, message, tmp_path, monkeypatch
):
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    with pytest.raises(ArgumentError, match=re.escape(message)):
        run_experiment("inception", tmp_path / "out", scale="quick", **options)
    assert not (tmp_path / "out").exists()
