"""The core, built with sanitizers, reads and writes what it was given and nothing else; see sanitized_driver.py."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("normkit._core", reason="normkit was built without its C++ core")
fcntl = pytest.importorskip("fcntl", reason="sanitizers are preloaded, which Linux can")

from support.instruction_sets import runnable  # noqa: E402

pytestmark = pytest.mark.deep  # the build alone takes minutes

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "sanitized"
DRIVER = ROOT / "tests" / "support" / "sanitized_driver.py"
INSTRUCTION_SETS = runnable()
RUNS_AVX512 = "ON" if "avx512" in INSTRUCTION_SETS else "OFF"


BUILDING = 840  # seconds, less than a test's own deadline: nine minutes of processors, which other tests keep busy too


def run(*command, timeout=600, **options):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout, check=False, **options)


def find(tool, remedy):
    """The path of a tool, beside this Python or where the shell finds it."""
    path = shutil.which(tool, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if path is None:
        pytest.skip(f"a sanitized core needs {tool}: {remedy}")
    return path


def find_cmake():
    remedy = "pip install 'cmake>=3.26'"
    cmake = find("cmake", remedy)
    version = re.search(r"(\d+)\.(\d+)", run(cmake, "--version").stdout)
    if version is None or tuple(map(int, version.groups())) < (3, 26):
        pytest.skip(f"a sanitized core needs CMake 3.26 or later, {cmake} is older: {remedy}")
    return cmake


def find_runtimes(compiler):
    """The sanitizers' own libraries, which must be in a process before anything else is."""
    paths = [run(compiler, f"-print-file-name={name}").stdout.strip() for name in ("libasan.so", "libubsan.so")]
    if not all(map(os.path.isabs, paths)):
        pytest.skip(f"{compiler} has no sanitizers: install GCC's libasan and libubsan")
    return " ".join(paths)


def key_of(compiler):
    """What a build depends on, as a name."""
    digest = hashlib.sha256(f"{run(compiler, '--version').stdout}{sys.version}{RUNS_AVX512}".encode())
    for source in (ROOT / "CMakeLists.txt", *sorted(p for p in (ROOT / "csrc").rglob("*") if p.is_file())):
        digest.update(source.relative_to(ROOT).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build(cmake, compiler, into):
    with tempfile.TemporaryDirectory(dir=CACHE) as tree:
        settings = [
            "-DNORMKIT_SANITIZE=ON",
            f"-DNORMKIT_SANITIZE_AVX512={RUNS_AVX512}",
            f"-DCMAKE_CXX_COMPILER={compiler}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        for command in (["-S", ROOT, "-B", tree, *settings], ["--build", tree, "--parallel", os.cpu_count() or 1]):
            made = run(cmake, *command, timeout=BUILDING)
            if made.returncode != 0:
                pytest.fail(f"The sanitized core does not build:\n{made.stdout[-3000:]}\n{made.stderr[-5000:]}")
        into.parent.mkdir(exist_ok=True)
        os.replace(next(Path(tree).glob("_core*.so")), into)


@pytest.fixture(scope="session")
def sanitized():
    """A function that runs the driver on the sanitized core, which is built if its sources are new."""
    compiler, cmake = find("g++", "apt install g++"), find_cmake()
    runtimes = find_runtimes(compiler)
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the tests run in several processes; one of them builds
        core = CACHE / key_of(compiler) / "_core.abi3.so"
        if not core.exists():
            build(cmake, compiler, core)
            for old in sorted(CACHE.glob("*/_core.abi3.so"), key=os.path.getmtime)[:-3]:
                shutil.rmtree(old.parent)
    environment = os.environ | {
        "LD_PRELOAD": runtimes,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own would be all that is found
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # statistics lie in a bytearray, and Python's own pool would hide what is beside it
        "OMP_WAIT_POLICY": "passive",  # threads that spin while others run tests make both slow
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    return lambda *arguments: run(sys.executable, DRIVER, core, *arguments, env=environment)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_nothing_is_found(sanitized, instruction_set):
    process = sanitized(instruction_set, "rows", "edges", "large")
    assert process.returncode == 0, process.stderr[:8000]
    assert "Sanitizer" not in process.stderr
    assert "runtime error" not in process.stderr
    calls = json.loads(process.stdout)
    assert sum(calls.values()) > 1000
    assert {"forward", "forward_sum", "backward_sum", "turn_over"} <= set(calls)


CONTROLS = {
    "short": "ERROR: AddressSanitizer: heap-buffer-overflow",
    "guard": "ERROR: AddressSanitizer: SEGV",
    "misaligned": "runtime error: .* misaligned address",
}


@pytest.mark.parametrize(
    ("instruction_set", "control"),
    # Vectors may lie anywhere; only loops of one number at a time mind where it lies.
    [*((name, "short") for name in INSTRUCTION_SETS), (INSTRUCTION_SETS[-1], "guard"), ("baseline", "misaligned")],
)
def test_what_is_amiss_is_found(sanitized, instruction_set, control):
    process = sanitized(instruction_set, control)
    assert process.returncode != 0
    assert re.search(CONTROLS[control], process.stderr), process.stderr[:8000]
    assert str(ROOT / "csrc") in process.stderr  # in the core, not in the test
