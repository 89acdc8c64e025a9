"""Which code ran: the commit of a clone, or the version of an installation."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path


@cache
def commit_of_code() -> str | None:
    """The commit of the clone that this file is in, with a mark where it was changed since; None outside of one."""
    here = Path(__file__).parent
    git = ["git", "--no-optional-locks"]  # a run may be killed at this moment, too, and must not leave a clone locked
    commands = ([*git, "rev-parse", "HEAD"], [*git, "status", "--porcelain", "--untracked-files=no", "--", "."])
    try:
        head, changes = (
            subprocess.run(command, cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+changes" if changes else "")
