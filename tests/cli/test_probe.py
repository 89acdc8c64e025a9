"""`normkit probe`: a model and batches in, the last values of its layers out."""

import io
import json
import re
import sys

import pytest
import torch
from rich.console import Console

from normkit.cli import model_command
from normkit.cli.app import main
from normkit.instruments import read_records

SOURCE = """
import torch
from torch import nn

print("printed by the user's module")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.calls = []

    def forward(self, x):
        self.calls.append((self.training, torch.is_grad_enabled()))
        return self.relu(self.bn(self.conv(x)))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(x)


class Bare(nn.Module):
    def forward(self, x):
        return x


class Failing(Net):
    def forward(self, x):
        raise KeyError("pixels")


class Idle(Net):
    def forward(self, x):
        return x


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.relu = nn.Linear(3, 2), nn.ReLU()
        self.fc.forward = lambda x: "no tensor"

    def forward(self, x):
        self.fc(x)
        return self.relu(x)


model = Net().eval()
training = Net()
batches = [torch.full((2, 3, 6, 6), float(i)) for i in range(1, 4)]
flat = [torch.randn(4, 3)]
named = [{"pixels": batch} for batch in batches]
none = []


def forward(model, batch):
    return model(batch["pixels"])
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "probednet.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.endswith("probednet"):
            del sys.modules[name]


def run(capsys, target, *arguments, batches="batches"):
    with pytest.raises(SystemExit) as exit:
        main(["probe", f"probednet:{target}", "--batches", f"probednet:{batches}", *map(str, arguments)])
    return exit.value.code, *capsys.readouterr()


def test_the_last_values_of_every_layer_are_shown(capsys):
    code, out, err = run(capsys, "model")
    assert code == 0
    for said in ("ActivationQuantiles, step 2", "ActivationMoments, step 2", "DeadUnits, step 2", "StatisticsNoise"):
        assert said in out
    rows = [line for line in out.splitlines() if "│ relu" in line]
    assert len(rows) == 1
    assert "printed by the user's module" in err
    assert "printed by" not in out


def test_values_are_those_of_the_last_batch_in_the_model_s_own_mode(capsys):
    code, out, _ = run(capsys, "model", "--probe", "ActivationMoments", "--format", "json")
    assert code == 0
    net = sys.modules["probednet"].model
    with torch.no_grad():
        expected = net.conv(sys.modules["probednet"].batches[-1]).double()
    document = json.loads(out)
    assert (document["command"], document["steps"]) == ("probe", 3)
    assert list(document["probes"]) == ["ActivationMoments"]
    found = document["probes"]["ActivationMoments"]["conv"]
    assert found["mean"] == pytest.approx(expected.mean().item())
    assert found["std"] == pytest.approx(expected.std(correction=0).item())
    assert net.calls[:3] == [(False, False)] * 3


def test_a_model_in_training_mode_stays_in_it(capsys):
    assert run(capsys, "training")[0] == 0
    assert sys.modules["probednet"].training.calls == [(True, False)] * 3


def test_records_and_a_report_are_written(capsys, here):
    code, out, err = run(capsys, "model", "--out", "records.jsonl", "--report", "new/page.html", "--format", "json")
    assert code == 0
    records = read_records(here / "records.jsonl")
    assert {record["step"] for record in records} == {0, 1, 2}
    assert "StatisticsNoise: mean_noise" in (here / "new/page.html").read_text(encoding="utf-8")
    assert "written: records.jsonl" in err
    assert "written: new/page.html" in err
    assert (json.loads(out)["out"], json.loads(out)["report"]) == ("records.jsonl", "new/page.html")


def test_probes_without_a_layer_are_said_and_left_out(capsys):
    code, out, err = run(capsys, "Plain", "--format", "json", batches="flat")
    assert code == 0
    assert list(json.loads(out)["probes"]) == ["ActivationQuantiles", "ActivationMoments"]
    assert "left out: DeadUnits finds no layer to measure in Plain" in err
    assert "left out: StatisticsNoise finds no layer" in err


def test_probes_can_be_chosen_several_times_and_once(capsys):
    chosen = ["--probe", "DeadUnits", "--probe", "ActivationMoments", "--probe", "DeadUnits"]
    _, out, _ = run(capsys, "model", *chosen, "--format", "json")
    assert list(json.loads(out)["probes"]) == ["DeadUnits", "ActivationMoments"]


def test_a_forward_of_one_s_own_takes_any_batch(capsys):
    code, out, _ = run(capsys, "model", "--forward", "probednet:forward", "--format", "json", batches="named")
    assert code == 0
    assert json.loads(out)["steps"] == 3


def test_a_probe_that_fails_is_said_and_the_others_go_on(capsys):
    code, out, err = run(capsys, "Complex", "--format", "json", batches="flat")
    assert code == 0
    assert list(json.loads(out)["probes"]) == ["DeadUnits"]
    assert "normkit: ActivationMoments was stopped at step 0" in err


@pytest.mark.parametrize(("target", "options", "said"), [
    ("model", ["--probe", "DeadUnit"], "one of ActivationQuantiles, .*got 'DeadUnit'. Did you mean \"DeadUnits"),
    ("model", ["--probe", "Landscape"], "--probe Landscape needs a training step"),
    ("model", ["--out", "."], "--out and --report must be files; . is a folder"),
    ("Bare", [], "Bare has no layer that these probes measure"),
    ("Failing", [], "KeyError: 'pixels'"),
    ("Idle", [], "nothing was recorded"),
    ("nothing", [], "no attribute 'nothing'"),
])  # fmt: skip
def test_what_cannot_run_says_why_and_exits_with_2(capsys, target, options, said):
    code, out, err = run(capsys, target, *options)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.startswith("normkit: ")]
    assert re.search(said, lines[-1])


def test_no_batches_is_an_error(capsys):
    code, _, err = run(capsys, "model", batches="none")
    assert code == 2
    assert "there are no batches" in err


def test_a_terminal_sees_progress(capsys, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(
        model_command, "Console", lambda **_: Console(file=screen, force_terminal=True, width=80, color_system=None)
    )
    assert run(capsys, "model")[0] == 0
    assert "3/3" in screen.getvalue()
