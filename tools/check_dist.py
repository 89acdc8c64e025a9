"""Install each of the given wheels and sdists into an empty environment, and use it there as a reader would."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from support.pages import blocks

ROOT = Path(__file__).parents[1]


def main(distributions: list[str]) -> None:
    """Check one after the other; the first command that fails ends it all."""
    if not distributions:
        raise SystemExit("Needed the files to check; got none. Run `make dist`.")
    (ROOT / "build").mkdir(exist_ok=True)
    for distribution in distributions:
        print(f"== {distribution}", flush=True)
        with tempfile.TemporaryDirectory(prefix="dist-", dir=ROOT / "build") as folder:
            check(Path(distribution).resolve(), Path(folder))


def check(distribution: Path, folder: Path) -> None:
    """Install it and run what a reader would: an import, the README's code, `normkit env`."""
    venv.create(folder / "venv", with_pip=True)
    bin_folder = folder / "venv" / "bin"
    readme = folder / "readme.py"
    readme.write_text("\n".join(block.code for block in blocks(ROOT / "README.md")))
    run(folder, bin_folder / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", distribution)
    run(folder, bin_folder / "python", "-c", "import normkit")
    run(folder, bin_folder / "python", ROOT / "tools" / "check_install.py")
    run(folder, bin_folder / "python", readme)
    run(folder, bin_folder / "normkit", "env")


def run(folder: Path, *command: str | Path) -> None:
    """Run a command in a folder where no source of normkit is on Python's path."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    print("$", *command, flush=True)
    subprocess.run(command, cwd=folder, env=environ, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
