"""`normkit doctor`: a model and batches in, findings out; 0 fine, 1 found, 2 could not run."""

import json
import re
import sys

import pytest

from normkit.cli.app import main
from normkit.doctor import RULES
from normkit.surgery.checkpoint.file import read_manifest
from support.html_reader import Reader

SOURCE = """
import torch
from torch import nn

print("printed by the user's module")


def net(channels=8):
    layers = [nn.Conv2d(3, channels, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    layers += [nn.Conv2d(channels, channels, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 4))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x):
        return self.body(x)


torch.manual_seed(0)
images = 3 * torch.randn(96, 3, 10, 10) + 2


def fitted():
    # With the statistics of these images, as if trained for long.
    torch.manual_seed(0)
    model = Net()
    for bn in (model.body[1], model.body[4]):
        bn.momentum = None
    with torch.no_grad():
        for x in images.split(32):
            model(x)
        model.body[-1].weight.mul_(20)
    for bn in (model.body[1], model.body[4]):
        bn.momentum = 0.1
        bn.num_batches_tracked.fill_(1000)
    return model.eval()


healthy, spoiled = fitted(), fitted()
labels = healthy(images).argmax(1)  # which the healthy one gets right, and the spoiled one does not
batches = list(zip(images.split(32), labels.split(32)))
named = [{"pixels": image, "labels": label} for image, label in batches]
spent = iter(batches)
list(spent)
spoiled.body[4].running_mean += 5 * spoiled.body[4].running_var.sqrt()
spoiled.body[4].running_var *= 9


class Failing(Net):
    def forward(self, x):
        raise KeyError("pixels")


class Bare(nn.Module):
    def forward(self, x):
        return x


def forward(model, batch):
    return model(batch["pixels"])
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "examinednet.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.endswith("examinednet"):
            del sys.modules[name]


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main(["doctor", *map(str, arguments)])
    return exit.value.code, *capsys.readouterr()


def run(capsys, target, *arguments, batches="batches", loss="torch.nn.functional:cross_entropy"):
    given = ["--batches", f"examinednet:{batches}", *(["--loss", loss] if loss else [])]
    return command(capsys, f"examinednet:{target}", *given, *arguments)


def test_a_healthy_model_is_fine(capsys):
    code, out, err = run(capsys, "healthy")
    assert code == 0
    assert "in 2 norm layers, 3 batches" in out
    assert "printed by the user's module" in err
    assert "printed by" not in out


def test_a_spoiled_model_is_found_with_its_layer(capsys):
    code, out, _ = run(capsys, "spoiled")
    assert code == 1
    (row,) = [line for line in out.splitlines() if "NK102" in line and "body.4" in line]
    assert "%" in row
    assert "What to do:" in out


def test_the_report_in_json(capsys):
    code, out, _ = run(capsys, "spoiled", "--format", "json")
    document = json.loads(out)
    assert code == 1
    assert (document["command"], document["target"], document["ok"]) == ("doctor", "examinednet:spoiled", False)
    assert ("NK102", "body.4") in {(found["code"], found["layer"]) for found in document["findings"]}
    assert document["cure"] is None
    assert document["evidence"]["gap"]["measure"] == "loss"


def test_the_report_in_sarif_stands_at_the_model_s_class(capsys):
    code, out, _ = run(capsys, "spoiled", "--format", "sarif", "--select", "NK102")
    assert code == 1
    (result,) = json.loads(out)["runs"][0]["results"]
    where = result["locations"][0]["physicalLocation"]
    assert where["artifactLocation"]["uri"] == "examinednet.py"
    assert SOURCE.splitlines()[where["region"]["startLine"] - 1].startswith("class Net")


@pytest.mark.parametrize("target", ["examinednet:net", pytest.param("examinednet.py:net", marks=pytest.mark.deep)])
def test_a_model_without_a_class_of_its_own_stands_in_the_file_of_its_target(capsys, target):
    given = ["--batches", "examinednet:batches", "--select", "NK101", "--format", "sarif"]
    code, out, _ = command(capsys, target, *given)
    found = json.loads(out)["runs"][0]["results"]
    assert code == 1
    uris = {result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in found}
    assert uris == {"examinednet.py"}


@pytest.mark.parametrize(("format", "begins"), [("html", "<!doctype html>"), ("json", "{"), ("text", "1 error")])
def test_the_report_goes_to_a_file(capsys, here, format, begins):
    options = ["--format", format, "--select", "NK102", "--out", "new/report"]
    code, out, err = run(capsys, "spoiled", *options)
    assert (code, out) == (1, "")
    assert "written: new/report" in err
    text = (here / "new/report").read_text(encoding="utf-8")
    assert text.startswith(begins)
    if format == "html":
        assert "body.4" in Reader(text).of("main")[0]["text"]


def test_rules_are_chosen(capsys):
    assert run(capsys, "spoiled", "--ignore", "NK1")[0] == 0
    assert run(capsys, "spoiled", "--select", "NK2,NK301")[0] == 0
    assert run(capsys, "spoiled", "--select", "NK1,NK201", "--ignore", "NK101")[0] == 1


def test_settings_are_those_of_pyproject_but_for_the_command_line(capsys, here):
    (here / "pyproject.toml").write_text('[tool.normkit.doctor]\nselect = ["NK2"]')
    assert run(capsys, "spoiled")[0] == 0
    assert run(capsys, "spoiled", "--select", "NK102")[0] == 1
    (here / "pyproject.toml").write_text('[tool.normkit.doctor.per-layer-ignores]\n"body.*" = ["NK1"]')
    code, out, _ = run(capsys, "spoiled", "--format", "json")
    assert [found for found in json.loads(out)["findings"] if found["code"].startswith("NK1")] == []
    assert code == 0


@pytest.mark.deep
def test_a_severity_fails(capsys, here):
    found = json.loads(run(capsys, "spoiled", "--select", "NK102", "--format", "json")[1])["findings"]
    assert {each["severity"] for each in found} <= {"error", "warning"}
    assert run(capsys, "spoiled", "--fail-on", "info")[0] == 1
    (here / "pyproject.toml").write_text('[tool.normkit.doctor]\nfail-on = "error"')
    expected = int(any(each["severity"] == "error" for each in found))
    assert run(capsys, "spoiled", "--select", "NK102")[0] == expected


def test_the_model_is_mended_and_written(capsys, here):
    code, out, err = run(capsys, "spoiled", "--cure", "mended.safetensors", "--format", "json")
    assert code == 1
    assert "written: mended.safetensors" in err
    step, *_ = json.loads(out)["cure"]["steps"]
    assert step["is_kept"]
    assert step["after"] < step["before"]
    assert read_manifest(here / "mended.safetensors") is not None
    options = ["--checkpoint", "mended.safetensors", "--batches", "examinednet:batches"]
    code, out, _ = command(capsys, "examinednet:Net", *options)
    assert code == 0, out


@pytest.mark.deep
def test_a_cure_is_shown_below_the_findings(capsys):
    _, out, _ = run(capsys, "spoiled", "--cure", "mended.safetensors")
    assert out.index("What to do") < out.index("loss in evaluation, remedy by remedy:")
    assert "changed 1, skipped 0" in out


@pytest.mark.deep
def test_a_loss_may_be_a_class_and_a_forward_one_s_own(capsys):
    assert run(capsys, "spoiled", loss="torch.nn:CrossEntropyLoss")[0] == 1
    options = ["--forward", "examinednet:forward"]
    assert run(capsys, "spoiled", *options, batches="named", loss=None)[0] == 1


@pytest.mark.deep
def test_the_model_is_left_in_its_modes(capsys):
    run(capsys, "spoiled")
    assert not any(module.training for module in sys.modules["examinednet"].spoiled.modules())


def test_rules_are_listed(capsys):
    code, out, _ = command(capsys, "--rules")
    assert code == 0
    assert [each for each in RULES if f"│ {each} " not in out] == []
    code, out, _ = command(capsys, "--rules", "--format", "json")
    assert [each["code"] for each in json.loads(out)] == list(RULES)


@pytest.mark.parametrize("name", ["NK102", "stale-statistics"])
def test_a_rule_explains_itself(capsys, name):
    code, out, _ = command(capsys, "--explain", name)
    assert code == 0
    assert out.startswith("NK102 stale-statistics\n")
    assert "Why it hurts" in out
    assert "Not a fault when" in out


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "a model and its batches are needed"),
    (["examinednet:healthy"], "a model and its batches are needed"),
    (["--explain", "NK999"], "no rule has .*'NK999'"),
    (["examinednet:nothing", "--batches", "examinednet:batches"], "no attribute 'nothing'"),
    (["examinednet:healthy", "--batches", "examinednet:nothing"], "no attribute 'nothing'"),
    (["examinednet:healthy", "--batches", "examinednet:spent"], "batches"),
    (["examinednet:healthy", "--batches", "examinednet:batches", "--select", "NK9"], "no rule has .*'NK9'"),
    (["examinednet:healthy", "--batches", "examinednet:batches", "--out", "."], "must be files; . is a folder"),
    (["examinednet:healthy", "--batches", "examinednet:batches", "--cure", "."], "must be files; . is a folder"),
    (["examinednet:Failing", "--batches", "examinednet:batches"], "pixels"),
    (["examinednet:Bare", "--batches", "examinednet:batches"], "norm"),
])  # fmt: skip
def test_what_cannot_run_says_why_and_exits_with_2(capsys, here, arguments, said):
    before = sorted(here.iterdir())
    code, out, err = command(capsys, *arguments)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.startswith("normkit: ")]
    assert re.search(said, lines[-1])
    assert [path for path in sorted(here.iterdir()) if path.suffix != "" and path not in before] == []


def test_a_wrong_setting_exits_with_2_before_the_work(capsys, here):
    (here / "pyproject.toml").write_text("[tool.normkit.doctor]\nselct = []")
    code, _, err = run(capsys, "healthy")
    assert code == 2
    assert 'Did you mean "select"?' in err
    assert "printed by the user's module" not in err
