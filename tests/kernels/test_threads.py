"""On whose threads the loops run: torch's by either way, or the caller's, and always with the same bits."""

import ctypes
import os
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest
import torch

import normkit as nk
from normkit.kernels import core, select

pytestmark = pytest.mark.skipif(core.WHY_NOT is not None, reason=str(core.WHY_NOT))

WAYS = ["torch", "openmp"]
on_linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in Linux' /proc")


@pytest.fixture(autouse=True)
def as_before():
    threads = torch.get_num_threads()
    yield
    core.use_threads("torch", "openmp")
    torch.set_num_threads(threads)


def take(way):
    if core.use_threads(way) != way:
        pytest.skip(f"torch {torch.__version__} has no way {way!r}")


def everything(layer, x):
    """Return the output of a step, all gradients, and the running statistics after it."""
    layer.load_state_dict({name: torch.full_like(t, 0.5) for name, t in layer.state_dict().items()})
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters()), *(b.clone() for b in layer.buffers())]


CALLS = {
    "planes": (nk.BatchNorm2d(24, activation="relu"), (16, 24, 30, 31), torch.contiguous_format),
    "lines": (nk.BatchNorm2d(24, activation="relu"), (16, 24, 30, 31), torch.channels_last),
    "few channels": (nk.BatchNorm2d(3), (32, 3, 40, 40), torch.contiguous_format),
    "2-D": (nk.BatchNorm1d(300), (257, 300), torch.contiguous_format),
    "rows": (nk.LayerNorm(384), (7, 57, 384), torch.contiguous_format),
    "groups": (nk.GroupNorm(6, 24), (16, 24, 30, 31), torch.contiguous_format),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_the_same_bits_on_any_number_of_threads(call, way):
    layer, shape, layout = CALLS[call]
    x = torch.randn(shape).to(memory_format=layout)
    core.use_threads("caller")
    expected = everything(layer, x)
    take(way)
    for threads in (1, 2, 3, 2, 1):
        torch.set_num_threads(threads)
        for found, wanted in zip(everything(layer, x), expected, strict=True):
            assert found.equal(wanted), threads


@pytest.mark.parametrize("way", WAYS)
def test_calls_of_several_python_threads_at_once(way):
    take(way)
    torch.set_num_threads(2)
    inputs = torch.randn(4, 8, 16, 40, 40)
    alone = [nk.functional.batch_norm(x, None, None, training=True) for x in inputs]
    wrong: list[int] = []

    def call_often(i):
        for _ in range(30):
            if not nk.functional.batch_norm(inputs[i], None, None, training=True).equal(alone[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call_often, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=120)
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []


COUNT = """
import os, sys, threading, torch
import normkit as nk
from normkit.kernels import core

def started_by(call):
    before = len(os.listdir("/proc/self/task"))
    call()
    return len(os.listdir("/proc/self/task")) - before

def normalize():
    nk.functional.batch_norm(x, None, None, training=True)

torch.set_num_threads(1)
x = torch.zeros(16, 16, 40, 40)
if core.use_threads(sys.argv[1]) != sys.argv[1]:
    sys.exit("skip")
"""


def printed_by(code, way):
    """Run code in a process of its own, where no thread has been started yet."""
    environment = os.environ | {"OMP_NUM_THREADS": "4"}
    run = [sys.executable, "-c", COUNT + code, way]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=120)
    if done.stderr.strip() == "skip":
        pytest.skip(f"torch {torch.__version__} has no way {way!r}")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@on_linux
@pytest.mark.deep
@pytest.mark.parametrize(("way", "started"), [("torch", "2"), ("openmp", "2"), ("caller", "0")])
def test_as_many_threads_as_torch_was_told(way, started):
    code = "print(started_by(normalize)); torch.set_num_threads(3); print(started_by(normalize))"
    assert printed_by(code, way) == ["0", started]


@on_linux
@pytest.mark.deep
@pytest.mark.parametrize("way", WAYS)
def test_a_python_thread_that_never_called_torch_obeys_too(way):
    # An OpenMP runtime keeps a number of threads for each calling thread: in a new one it is not yet torch's.
    code = """
found = []
thread = threading.Thread(target=lambda: found.append(started_by(normalize)))
thread.start(); thread.join(); print(*found)
"""
    assert printed_by(code, way) == ["0"]


def test_a_call_from_inside_a_parallel_region_stays_on_its_thread():
    take("openmp")
    entries = {name: core._address(name, core._torchs_libraries()) for name in core._OPENMP_ENTRIES}
    if not entries["GOMP_parallel"]:
        pytest.skip("this torch's OpenMP runtime has only LLVM's entries")
    parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    fork = parallel(entries["GOMP_parallel"])
    forks: list[int] = []

    @parallel
    def counted_fork(work, share, threads, flags):
        forks.append(threads)
        fork(work, share, threads, flags)

    x = torch.randn(16, 16, 40, 40)
    torch.set_num_threads(3)
    entries["GOMP_parallel"] = ctypes.cast(counted_fork, ctypes.c_void_p).value or 0
    core.loops.use_openmp_threads(*entries.values())
    expected = nk.functional.batch_norm(x, None, None, training=True)
    assert set(forks) == {3}
    forks.clear()
    same: list[bool] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def work(_):
        same.append(nk.functional.batch_norm(x, None, None, training=True).equal(expected))

    fork(ctypes.cast(work, ctypes.c_void_p), None, 3, 0)
    assert same == [True] * 3
    assert forks == []


def test_without_torch_parallel_for_the_openmp_runtime_is_taken(monkeypatch):
    take("openmp")
    found = core._address
    monkeypatch.setattr(core, "_address", lambda name, where: 0 if name == "torch_parallel_for" else found(name, where))
    assert core.use_threads("torch", "openmp") == "openmp"
    assert select.status()["threads"] == "torch's, through its OpenMP runtime"


@pytest.mark.parametrize("missing", ["_ZN2at15get_num_threadsEv", "omp_get_thread_num", "GOMP_parallel"])
def test_one_thread_where_nothing_else_is_found_and_it_is_said(monkeypatch, missing):
    found = core._address
    gone = ("torch_parallel_for", "__kmpc_fork_call", missing)
    monkeypatch.setattr(core, "_address", lambda name, where: 0 if name in gone else found(name, where))
    assert core.use_threads("torch", "openmp") == "caller"
    assert select.status()["threads"].startswith("one: this build of torch lends neither")


def test_an_entry_that_is_missing_is_not_called():
    with pytest.raises(ValueError, match="entry of the OpenMP runtime is missing"):
        core.loops.use_openmp_threads(0, 1, 1, 1, 1, 0, 0, 0)
    with pytest.raises(ValueError, match="entry of the OpenMP runtime is missing"):
        core.loops.use_openmp_threads(1, 1, 1, 1, 0, 1, 1, 0)


def llvms_runtime():
    try:
        files = metadata.files("intel-openmp") or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(file.locate().resolve()) for file in files if file.name == "libiomp5.so"), None)


@pytest.mark.skipif(llvms_runtime() is None, reason="needs LLVM's OpenMP runtime: pip install intel-openmp")
def test_llvms_entry_where_there_is_none_of_gccs():
    libraries = [ctypes.CDLL(llvms_runtime()), *core._torchs_libraries()]
    entries = {name: core._address(name, libraries) for name in core._OPENMP_ENTRIES} | {"GOMP_parallel": 0}
    layer, shape, _ = CALLS["planes"]
    x = torch.randn(shape)
    core.use_threads("caller")
    expected = everything(layer, x)
    before = len(os.listdir("/proc/self/task"))
    core.loops.use_openmp_threads(*entries.values())
    for threads in (2, 3, 1):
        torch.set_num_threads(threads)
        for found, wanted in zip(everything(layer, x), expected, strict=True):
            assert found.equal(wanted), threads
    assert len(os.listdir("/proc/self/task")) >= before + 2
