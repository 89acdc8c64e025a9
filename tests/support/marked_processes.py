"""The processes that a command started, wherever they went: all have a mark of their own in their environment."""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

PATIENCE = 240.0  # seconds for what takes a few on an idle machine
MARK = "NORMKIT_TEST_MARK"


class Marked:
    """A command that runs, and what it started; of these nothing is left."""

    def __init__(self, command, env=(), **options):
        mark = uuid.uuid4().hex
        self._mark = f"{MARK}={mark}"
        env = os.environ | {name: str(value) for name, value in dict(env).items()} | {MARK: mark}
        self.main = subprocess.Popen([*map(str, command)], env=env, start_new_session=True, **options)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.main.kill()
        for process in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.main.communicate()

    def alive(self, title=""):
        """Its processes, or those with such a title."""
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and self._has(path, title)]

    def _has(self, process, title):
        try:
            is_marked = self._mark.encode() in (process / "environ").read_bytes().split(b"\0")
            return is_marked and (process / "cmdline").read_bytes().startswith(title.encode())
        except OSError:  # it has just ended
            return False

    def wait_until(self, is_so, needs_main=True):
        """Wait for something that it does, and return it."""
        deadline = time.monotonic() + PATIENCE
        while not (found := is_so()):
            ended = self.main.poll()
            assert ended is None or not needs_main, f"the process ended with {ended}"
            assert time.monotonic() < deadline, f"nothing happened within {PATIENCE:.0f} s"
            time.sleep(0.02)
        return found

    def ended(self):
        """Wait for its end; return its exit code, stdout and stderr."""
        out, err = self.main.communicate(timeout=PATIENCE)
        return self.main.returncode, out, err


def stopped(process):
    """Stop a process; return whether there was one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGSTOP)
        return True
    return False
