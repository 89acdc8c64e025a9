"""Importing normkit imports torch and little else, and imports inside it point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import normkit

ROOT = Path(normkit.__file__).parent

# Each part may import those before it.
ORDER = [
    ["errors", "tracing", "atomic", "jsonable", "named_layers", "_core"],
    ["moments", "activations", "optional", "finding", "json_lines"],
    ["affine"],
    ["kernels"],
    ["checks"],
    ["functional"],
    ["layers"],
    ["environment", "snapshot", "batches", "hooks", "frameworks", "ranks"],
    ["spec"],
    ["figures"],
    ["surgery"],
    ["doctor", "instruments"],
    ["timm", "opacus"],
    ["lab"],
    ["bench"],
    ["cli"],
    ["__main__"],
]
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}


def test_importing_is_lean():
    """Only our own modules come on top of torch's: none of torch's heavy ones, and nothing of the command line."""
    code = "import sys, torch; before = set(sys.modules); import normkit; print(*set(sys.modules) - before)"
    added = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in added if not name.startswith("normkit")] == []
    later = (
        "normkit.cli",
        "normkit.bench",
        "normkit.lab",
        "normkit.surgery",
        "normkit.doctor",
        "normkit.instruments",
        "normkit.timm",
        "normkit.opacus",
        "normkit.environment",
        "normkit.kernels.compile_ops",
    )
    assert [name for name in added if name.startswith(later)] == []


def test_imports_point_one_way():
    seen = 0
    for path in ROOT.rglob("*.py"):
        part = path.relative_to(ROOT).with_suffix("").parts[0]
        if part == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("normkit"):
                modules = [node.module] if node.module != "normkit" else [f"normkit.{a.name}" for a in node.names]
            elif isinstance(node, ast.Import):
                modules = [a.name for a in node.names if a.name.startswith("normkit.")]
            for module in modules:
                other = module.split(".")[1]
                seen += 1
                assert other == part or LEVEL[other] < LEVEL[part], f"{path.name} imports {module}"
    assert seen > 20


def test_every_public_name_is_there():
    for name in normkit.__all__:
        assert hasattr(normkit, name)
    assert len(set(normkit.__all__)) == len(normkit.__all__)
