"""A connection to a Ray cluster, one that exists or one that is started for it, of which nothing is left afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from normkit.errors import NormkitError

ADDRESS = "RAY_ADDRESS"  # in the environment, as in all programs that use Ray
_ANSWER = 10.0  # seconds in which a cluster accepts a connection
_LONGEST_TEMPORARY = 20  # characters: Ray's sockets are in it; of the 107 that their paths may have, it takes up to 80
_OBJECT_STORE = 80 * 2**20  # bytes, near the least that Ray takes: the tasks share nothing but messages


class ClusterError(NormkitError, RuntimeError):
    """A Ray cluster that cannot be reached, or cannot run a trial."""


@contextlib.contextmanager
def connected(ray: Any, cpus: float) -> Iterator[None]:
    """Connect to the cluster at RAY_ADDRESS, or start one with so many CPUs; leave alone what the caller connected."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get(ADDRESS, "local")
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    with contextlib.ExitStack() as after:
        after.enter_context(_same_signals())
        after.enter_context(contextlib.redirect_stdout(sys.stderr))  # Ray prints what happens to processes
        if address == "local":
            after.enter_context(_without_usage_reports())
            own = {
                "num_cpus": cpus,
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE,
                "_temp_dir": after.enter_context(_temporary_directory()),
            }
        else:
            own = {}
        try:
            _check_answers(address)
            ray.init(address=address, **quiet, **own)
        except Exception as error:  # of several kinds, all of them about the cluster
            raise ClusterError(_unreachable(address, error)) from error
        after.callback(ray.shutdown)
        yield


def _check_answers(address: str) -> None:
    """Raise an OSError if nothing listens at HOST:PORT, for which Ray itself would wait a quarter of an hour."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER).close()


def _unreachable(address: str, error: Exception) -> str:
    if address == "local":
        return f"A Ray cluster cannot be started on this machine: {error}. `--engine local` needs none."
    return (
        f"The Ray cluster at {ADDRESS}={address} cannot be reached: {error}. Start one there (ray start --head), set "
        f"RAY_AUTH_MODE=token if it asks for a token, or unset {ADDRESS} to use this machine alone."
    )


@contextlib.contextmanager
def _same_signals() -> Iterator[None]:
    """Put back the handler of SIGTERM that Ray replaces."""
    if threading.current_thread() is not threading.main_thread():  # where Ray does not
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _without_usage_reports() -> Iterator[None]:
    """Have the processes of a cluster that is started send nothing to Ray's makers."""
    name = "RAY_USAGE_STATS_ENABLED"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _temporary_directory() -> Iterator[str]:
    """A directory for the sockets and logs of a cluster."""
    usual = tempfile.gettempdir()
    path = tempfile.mkdtemp(prefix="ray-", dir=usual if len(usual) <= _LONGEST_TEMPORARY else "/tmp")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # a process that is just ending may still write a log
