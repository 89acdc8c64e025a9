import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from normkit.cli.app import main
from normkit.kernels import core, select


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    return exit.value.code, *capsys.readouterr()


def test_as_text(capsys):
    code, out, err = run(capsys, "env")
    assert (code, err) == (0, "")
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert ["torch", torch.__version__] in lines
    assert ["backend", select.status()["backend"]] in lines
    assert "allocator" in [name for name, _ in lines]


def test_as_json(capsys):
    code, out, err = run(capsys, "env", "--format", "json")
    assert (code, err) == (0, "")
    environment = json.loads(out)
    assert environment["kernels"] == select.status()
    assert environment["torch_threads"] == torch.get_num_threads()


def test_why_not_native_is_said(capsys, monkeypatch):
    monkeypatch.setattr(core, "WHY_NOT", "no compiler was there")
    _, out, _ = run(capsys, "env")
    assert ["backend", "torch"] in [line.split(maxsplit=1) for line in out.splitlines()]
    assert "no compiler was there" in out


def test_a_missing_extra_is_named_with_what_installs_it(capsys, monkeypatch):
    monkeypatch.setattr(
        "normkit.environment.installed_extras", lambda: {"lab": {"a": "1.0", "b": None}, "ray": {"c": "2"}}
    )
    _, out, _ = run(capsys, "env")
    assert "missing b: pip install 'normkit[lab]'" in out
    assert "present" in out


def test_an_unknown_format_cannot_run(capsys):
    code, out, err = run(capsys, "env", "--format", "xml")
    assert (code, out) == (2, "")
    assert "xml" in err
    assert "json" in err


def test_columns_are_kept_apart(capsys, monkeypatch):
    monkeypatch.setattr("normkit.environment.installed_extras", lambda: {"a-very-long-name-of-an-extra": {}, "b": {}})
    _, out, _ = run(capsys, "env")
    assert "extra 'a-very-long-name-of-an-extra'  present" in out.splitlines()
    assert len({line.index("present") for line in out.splitlines() if "present" in line}) == 1


def test_the_version(capsys):
    assert run(capsys, "--version") == (0, f"normkit {metadata.version('normkit')}\n", "")


@pytest.mark.deep
def test_it_runs_where_there_is_no_fcntl():
    """As on Windows, whose Python has no such module."""
    code = "import sys; sys.modules['fcntl'] = None; from normkit.cli.app import main; main(['env'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.__version__ in done.stdout
