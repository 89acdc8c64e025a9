import json

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
    assert "reference" in out
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
