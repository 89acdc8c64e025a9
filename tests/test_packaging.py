"""What a release is made of: its version, its notes, its build, and what its users are asked."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
import yaml

import normkit as nk

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PYPROJECT["project"]["version"]


def test_the_version_is_the_metadata_s():
    assert nk.__version__ == metadata.version("normkit") == VERSION


@pytest.mark.parametrize("name", ["src", "tools", "docs", "CITATION.cff", "CMakeLists.txt", "Makefile"])
def test_the_version_is_written_nowhere_else(name):
    path = ROOT / name
    files = [path] if path.is_file() else path.rglob("*.py")
    assert [file for file in files if re.search(rf"\b{re.escape(VERSION)}\b", file.read_text())] == []


def test_every_tool_of_the_developers_is_pinned():
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    extras = PYPROJECT["project"]["optional-dependencies"]
    parts = [extras[name] for name in ("dev", "lab", "export", "ray")]
    asked = [*PYPROJECT["project"]["dependencies"], *chain.from_iterable(parts)]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in asked} - {"normkit"}
    assert names - pinned == set()


def test_release_notes_are_made_of_every_fragment():
    fragments = sorted((ROOT / "changelog").glob("*.*.md"))
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", VERSION]
    notes = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert fragments
    missing = [file.name for file in fragments if _in_one_line(file.read_text()) not in _in_one_line(notes)]
    assert missing == []


def _in_one_line(text):
    return " ".join(text.split())


def test_bug_reports_bring_their_environment():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    asked = [field for field in form["body"] if "normkit env --format json" in field["attributes"]["label"]]
    assert [field["validations"]["required"] for field in asked] == [True]


def test_workflows_run_what_a_developer_runs():
    steps = [step for job in _workflow("ci")["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in [step.get("run") for step in steps]
    commands = [step.get("run") for step in _workflow("wheels")["jobs"]["sdist"]["steps"]]
    assert "make dist" in commands


def test_wheels_for_releases_cannot_lose_the_core():
    assert PYPROJECT["tool"]["cibuildwheel"]["environment"]["NORMKIT_REQUIRE_CORE"] == "1"
    assert (ROOT / PYPROJECT["tool"]["cibuildwheel"]["test-command"].split("{project}/")[1]).is_file()


def _workflow(name):
    return yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())


@pytest.fixture
def configure(tmp_path):
    """Configure the C++ core as an install does, with this compiler."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("configuring the core needs CMake: pip install 'cmake>=3.26'")

    def configure(compiler, *options):
        command = [cmake, "-S", ROOT, "-B", tmp_path, f"-DPython_EXECUTABLE={sys.executable}", *options]
        environ = {**os.environ, "CXX": compiler}
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
        return done.returncode, _in_one_line(done.stdout + done.stderr)

    return configure


AFTER_A_FAILURE = "-DNORMKIT_MAY_LEAVE_OUT_CORE=ON"


def test_no_compiler_is_an_error_with_its_name(configure):
    code, said = configure("false")
    assert code != 0
    assert "needs GCC or Clang for C++, which CMake did not find" in said


def test_no_compiler_leaves_the_python_part(configure):
    code, said = configure("false", AFTER_A_FAILURE)
    assert code == 0
    assert "installed without its C++ core" in said


def test_a_compiler_that_failed_is_not_passed_over(configure):
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler: apt install g++")
    code, said = configure("g++", AFTER_A_FAILURE)
    assert code != 0
    assert "The C++ core failed to build" in said
    assert "NORMKIT_WITHOUT_CORE=1" in said
