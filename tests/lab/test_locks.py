import subprocess
import sys
import time

import pytest

from normkit.lab.locks import lock


def test_locks_that_share_exclude_those_that_do_not(tmp_path):
    path = tmp_path / "lock"
    with open(path, "w") as one, open(path, "w") as other, open(path, "w") as third:
        lock(one, shared=True)
        lock(other, shared=True)
        with pytest.raises(OSError, match=r"unavailable|denied"):
            lock(third)
    with open(path, "w") as free:
        lock(free)


def test_waiting_ends_when_the_holder_does(tmp_path):
    path = tmp_path / "lock"
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(0.3)"
    path.touch()
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder, open(path) as file:
        holder.stdout.readline()
        start = time.monotonic()
        lock(file, wait=60.0)
        assert time.monotonic() - start > 0.1
