"""`normkit fold`, `convert`, `freeze`, `recalibrate`: targets in, a table and a file out, exit codes 0, 1 and 2."""

import importlib
import io
import json
import os
import sys

import pytest
import safetensors.torch
import torch
from rich.console import Console

from normkit.cli import model_command
from normkit.cli.app import main
from normkit.surgery.checkpoint import load, save
from normkit.surgery.checkpoint.file import read_manifest
from normkit.surgery.result import Change, Parity, Surgery

SOURCE = """
import torch
from torch import nn

print("printed by the user's module")
a_number = 3


class Net(nn.Module):
    def __init__(self, eps=0.02, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8, eps=eps, momentum=0.3)
        self.free = nn.BatchNorm2d(8)
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
                else:
                    tensor.fill_(7)

    def forward(self, x):
        return self.free(torch.relu(self.bn(self.conv(x))))


def build():
    return Net()


def needs_an_argument(size):
    return Net()


def breaks():
    raise RuntimeError("no such weights")


class Nested:
    model = Net()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(x)


model = Net()
x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
flat = torch.randn(4, 3)
pair = {"x": x}
batches = [3 * x[:n] + 1 for n in (4, 2, 3)]


def make_batches():
    return list(batches)


def forward(model, batch):
    return model(batch["x"])


def failing(model, batch):
    raise KeyError("pixels")


def leave_alone(spec):
    return None
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "clinet.py").write_text(SOURCE)
    (tmp_path / "broken_net.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "ending_net.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.endswith(("clinet", "broken_net", "ending_net")):
            del sys.modules[name]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    return exit.value.code, *capsys.readouterr()


def net(**options):
    import clinet

    return clinet.Net(**options)


def x():
    import clinet

    return clinet.x


def as_json(capsys, *arguments):
    code, out, _ = run(capsys, *arguments, "--format", "json")
    return code, json.loads(out)


def test_fold(capsys, here):
    code, out, err = run(capsys, "fold", "clinet:build", "--example", "clinet:x", "--out", "folded.safetensors")
    assert code == 0, err
    assert "changed 1, skipped 1" in out
    assert "bn" in out
    assert "Outputs on the example moved by at most" in out
    assert "put into evaluation" in err
    assert "written: folded.safetensors" in err
    assert "printed by the user's module" in err
    assert "printed" not in out
    found = safetensors.torch.load_file(here / "folded.safetensors")
    model = net().eval()
    scale = model.bn.weight / torch.sqrt(model.bn.running_var + 0.02)
    torch.testing.assert_close(found["conv.weight"], model.conv.weight * scale[:, None, None, None])
    assert list(read_manifest("folded.safetensors")["norms"]) == ["free"]


@pytest.mark.parametrize("target", ["clinet", "clinet.py", "./clinet.py"])
@pytest.mark.parametrize("attribute", ["build", "model", "Net", "Nested.model"])
def test_targets(capsys, target, attribute):
    code, found = as_json(capsys, "freeze", f"{target}:{attribute}", "--example", f"{target}:x", "--dry-run")
    assert code == 0
    assert [change["layer"] for change in found["changed"]] == ["bn", "free"]
    assert found["parity"]["max_rel"] < 1e-6
    assert found["out"] is None


def test_a_file_elsewhere_finds_its_neighbours(capsys, here):
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "neighbour_clinet.py").write_text(SOURCE)
    (here / "elsewhere" / "user_clinet.py").write_text("from neighbour_clinet import model\n")
    code, found = as_json(capsys, "freeze", "elsewhere/user_clinet.py:model", "--dry-run")
    assert code == 0
    assert len(found["changed"]) == 2


def test_freeze(capsys, here):
    assert run(capsys, "freeze", "clinet:build", "--out", "frozen.safetensors")[0] == 0
    norms = read_manifest(here / "frozen.safetensors")["norms"]
    assert {norm["class"].rpartition(".")[2] for norm in norms.values()} == {"FrozenBatchNorm2d"}
    found = safetensors.torch.load_file(here / "frozen.safetensors")
    assert torch.equal(found["bn.running_var"], net().bn.running_var)
    code, found = as_json(capsys, "freeze", "clinet:build", "--no-affine", "--dry-run")
    assert code == 0
    assert len(found["changed"]) == 2


def test_convert(capsys, here):
    command = ["convert", "clinet:build", "--to", "group", "--groups", "4", "--example", "clinet:x"]
    code, found = as_json(capsys, *command, "--calibrate", "clinet:batches", "--out", "group.safetensors")
    assert code == 0
    assert [change["what"] for change in found["changed"]] == ["BatchNorm2d -> GroupNorm(4, 8)"] * 2
    assert found["parity"]["max_abs"] > 0
    assert found["out"] == "group.safetensors"
    assert read_manifest(here / "group.safetensors")["norms"]["bn"]["num_groups"] == 4


def test_convert_with_options(capsys, here):
    command = ["convert", "clinet:build", "--out", "out.safetensors"]
    assert run(capsys, *command, "--to", "ghost", "--option", "chunk_size=2")[0] == 0
    assert read_manifest(here / "out.safetensors")["norms"]["bn"]["options"]["chunk_size"] == 2
    assert run(capsys, *command, "--to", "sync", "--classes", "torch")[0] == 0
    assert read_manifest(here / "out.safetensors")["norms"]["bn"]["class"].startswith("torch.nn")
    code, found = as_json(capsys, *command, "--to", "clinet:leave_alone")
    assert (code, found["changed"]) == (0, [])


def test_recalibrate(capsys, here):
    command = [
        "recalibrate",
        "clinet:build",
        "--batches",
        "clinet:make_batches",
        "--example",
        "clinet:x",
    ]
    code, _, err = run(capsys, *command, "--out", "new.safetensors")
    assert code == 0, err
    found = safetensors.torch.load_file(here / "new.safetensors")
    model = net()
    with torch.no_grad():
        seen = torch.cat([model.conv(3 * x()[:n] + 1) for n in (4, 2, 3)]).double()
    torch.testing.assert_close(found["bn.running_mean"].double(), seen.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["bn.running_var"].double(), seen.var((0, 2, 3)), rtol=1e-5, atol=1e-6)
    for more in (["--exact"], ["--method", "paper"]):
        code, found = as_json(capsys, *command, *more, "--dry-run")
        assert code == 0
        assert len(found["changed"]) == 2


def test_only_and_skip(capsys, here):
    command = ["freeze", "clinet:build", "--dry-run"]
    choices = (
        (["--only", "bn"], ["bn"]),
        (["--skip", "b*"], ["free"]),
        (["--only", "bn", "--only", "fr*"], ["bn", "free"]),
    )
    for more, expected in choices:
        code, found = as_json(capsys, *command, *more)
        assert code == 0
        assert [change["layer"] for change in found["changed"]] == expected
    options = {
        "fold": ["--example", "clinet:x"],
        "convert": ["--to", "group"],
        "recalibrate": ["--batches", "clinet:batches"],
    }
    for verb, needed in options.items():
        code, found = as_json(capsys, verb, "clinet:build", *needed, "--only", "bn", "--skip", "free", "--dry-run")
        assert code == 0
        assert [change["layer"] for change in found["changed"]] == ["bn"]
        assert [(left["layer"], left["why"]) for left in found["skipped"]] == [("free", "skip= names it")]


def test_every_kind_of_norm(capsys, here):
    command = ["convert", "clinet:build", "--out", "out.safetensors", "--example", "clinet:x"]
    for to, options in (
        ("accumulated", ["micro_batches=2"]),
        ("domain", ["num_domains=2"]),
        ("whitened", ["method=zca", "group_size=4"]),
        ("position", []),
        ("evo-s0", ["groups=2"]),
    ):
        code, _, err = run(capsys, *command, "--to", to, *[part for o in options for part in ("--option", o)])
        assert code == 0, err
        assert {norm["kind"] for norm in read_manifest("out.safetensors")["norms"].values()} <= {to, "batch"}


def test_what_was_asked_for_and_left_is_a_message(capsys):
    code, out, err = run(capsys, "convert", "clinet:build", "--to", "rms", "--dry-run")
    assert code == 0
    assert "Nothing was changed." in out
    assert "normkit: 2 layers that were asked for are left as before" in err
    assert "Warning" not in err


def test_forward(capsys):
    command = ["fold", "clinet:build", "--example", "clinet:pair"]
    assert as_json(capsys, *command, "--forward", "clinet:forward", "--dry-run")[0] == 0
    code, _, err = run(capsys, *command, "--forward", "clinet:failing", "--dry-run")
    assert code == 2
    assert "KeyError: 'pixels'" in err


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_checkpoint_fills_the_model_whatever_its_mode(capsys, here, mode):
    import_here()
    trained = net(seed=5).train(mode == "train")
    save(trained, "trained.safetensors")
    command = ["freeze", "clinet:build", "--checkpoint", "trained.safetensors", "--out", "out.safetensors"]
    code, _, err = run(capsys, *command)
    assert code == 0, err
    found = safetensors.torch.load_file(here / "out.safetensors")
    assert torch.equal(found["conv.weight"], trained.conv.weight)
    assert torch.equal(found["bn.running_mean"], trained.bn.running_mean)
    assert read_manifest("out.safetensors")["norms"]["bn"]["mode"] == mode


def import_here():
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def test_a_checkpoint_that_does_not_fit(capsys, here):
    import_here()
    save(net(eps=0.5, seed=5), "other.safetensors")
    command = ["freeze", "clinet:build", "--checkpoint", "other.safetensors", "--out", "out.safetensors"]
    capsys.readouterr()  # what the module printed when it was imported here
    code, out, err = run(capsys, *command)
    assert (code, out) == (2, "")
    assert "eps is 0.5 in the file, 0.02 in the model: bn" in err
    assert "--no-strict loads what fits" in err
    assert not (here / "out.safetensors").exists()
    code, _, err = run(capsys, *command, "--no-strict")
    assert code == 0
    assert "eps is 0.5 in the file" in err
    found = safetensors.torch.load_file(here / "out.safetensors")
    assert torch.equal(found["conv.weight"], net(seed=5).conv.weight)


def test_a_plain_checkpoint_needs_no_strict(capsys, here):
    import_here()
    safetensors.torch.save_file(net(seed=5).state_dict(), "plain.safetensors")
    command = ["freeze", "clinet:build", "--checkpoint", "plain.safetensors", "--dry-run"]
    code, _, err = run(capsys, *command)
    assert code == 2
    assert "no manifest" in err
    assert run(capsys, *command, "--no-strict")[0] == 0
    torch.save(net().state_dict(), "pickle.pt")
    code, _, err = run(capsys, "freeze", "clinet:build", "--checkpoint", "pickle.pt", "--dry-run", "--no-strict")
    assert code == 2
    assert "is a pickle" in err


def test_the_file_that_is_written_goes_back_into_such_a_model(capsys, here):
    import_here()
    run(capsys, "recalibrate", "clinet:build", "--batches", "clinet:batches", "--out", "new.safetensors")
    model = net(seed=3)
    load(model, "new.safetensors")
    assert torch.equal(model.conv.weight, net().conv.weight)


def test_dry_run_writes_nothing(capsys, here):
    before = sorted(here.iterdir())
    command = ["fold", "clinet:build", "--example", "clinet:x", "--dry-run", "--out", "out.safetensors"]
    assert run(capsys, *command)[0] == 0
    assert [path for path in sorted(here.iterdir()) if path.name != "__pycache__"] == before


def test_nothing_to_change_is_fine(capsys, here):
    code, out, err = run(capsys, "freeze", "clinet:Plain", "--example", "clinet:flat", "--out", "out.safetensors")
    assert code == 0, err
    assert "Nothing was changed." in out
    assert (here / "out.safetensors").exists()


def test_an_old_file_stays_when_the_command_fails(capsys, here):
    (here / "out.safetensors").write_bytes(b"old")
    command = ["freeze", "clinet:build", "--example", "clinet:flat", "--out", "out.safetensors"]
    assert run(capsys, *command)[0] == 2
    assert (here / "out.safetensors").read_bytes() == b"old"


def test_outputs_that_should_not_have_moved(capsys, monkeypatch):
    def verb(model, example, **_):
        return Surgery(
            model, [Change("blocks[0]", "folded", "in [brackets]")], [], Parity(0.5, 0.1, "bn"), lambda: model
        )

    monkeypatch.setattr(importlib.import_module("normkit.surgery.fold"), "fold", verb)
    command = ["fold", "clinet:build", "--example", "clinet:x", "--dry-run"]
    code, out, err = run(capsys, *command)
    assert code == 1
    assert "blocks[0]" in out
    assert "in [brackets]" in out
    assert "moved by at most 0.5 (0.1 relative, first at bn)" in out
    assert "fold should not do" in err


def test_infinity_is_json(capsys, monkeypatch):
    def verb(model, **_):
        return Surgery(model, [], [], Parity(float("inf"), float("inf"), None), lambda: model)

    monkeypatch.setattr(importlib.import_module("normkit.surgery.replace.freeze"), "freeze", verb)
    code, found = as_json(capsys, "freeze", "clinet:build", "--dry-run")
    assert (code, found["parity"]["max_abs"]) == (1, "inf")


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(model_command, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=120))
    command = ["recalibrate", "clinet:build", "--batches", "clinet:batches", "--dry-run"]
    assert run(capsys, *command)[0] == 0
    assert "3/3" in screen.getvalue()


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["freeze", "clinet:build"], ["--out FILE is needed"]),
        (["freeze", "clinet:build", "--out", "no/such/out"], ["--out must be", "has no folder"]),
        (["freeze", "clinet:build", "--out", "."], ["--out must be", "is a folder"]),
        (["freeze", "clinet", "--dry-run"], ["module:attribute or path.py:attribute", "'clinet'"]),
        (["freeze", "clinet:", "--dry-run"], ["module:attribute"]),
        (["freeze", "clinet:biuld", "--dry-run"], ["no attribute 'biuld'", 'Did you mean "build"?']),
        (["freeze", "clinet:Nested.modle", "--dry-run"], ["no attribute 'Nested.modle'", 'Did you mean "model"?']),
        (["freeze", "no_such_net:build", "--dry-run"], ["no module 'no_such_net'"]),
        (["freeze", "clinte.py:build", "--dry-run"], ["there is no file", 'Did you mean "clinet.py"?']),
        (["freeze", "broken_net:build", "--dry-run"], ["cannot be imported", "nothing_of_this_name"]),
        (["freeze", "broken_net.py:build", "--dry-run"], ["cannot be imported", "nothing_of_this_name"]),
        (["freeze", "ending_net:build", "--dry-run"], ["cannot be imported: SystemExit: 3"]),
        (["freeze", "clinet:a_number", "--dry-run"], ["must be a torch.nn.Module", "got a int"]),
        (["freeze", "clinet:x", "--dry-run"], ["must be a torch.nn.Module", "got a Tensor"]),
        (["freeze", "clinet:needs_an_argument", "--dry-run"], ["raised TypeError", "size"]),
        (["freeze", "clinet:breaks", "--dry-run"], ["raised RuntimeError: no such weights"]),
        (["freeze", "clinet:build", "--checkpoint", "none", "--dry-run"], ["none does not exist"]),
        (["fold", "clinet:build", "--dry-run"], ["Missing option"]),
        (["fold", "clinet:build", "--example", "clinet:model", "--dry-run"], ["must be a tensor", "raised"]),
        (["fold", "clinet:build", "--example", "clinet:flat", "--dry-run"], ["does not run on the example"]),
        (["fold", "clinet:build", "--example", "clinet:x", "--forward", "clinet:x", "--dry-run"], ["a function"]),
        (["recalibrate", "clinet:build", "--dry-run"], ["Missing option"]),
        (["recalibrate", "clinet:build", "--batches", "clinet:x", "--dry-run"], ["iterable of batches", "Tensor"]),
        (["recalibrate", "clinet:build", "--batches", "clinet:a_number", "--dry-run"], ["iterable", "int"]),
        (["recalibrate", "clinet:build", "--batches", "clinet:batches", "--method", "mean"], ["pooled"]),
        (["convert", "clinet:build", "--dry-run"], ["Missing option"]),
        (["convert", "clinet:build", "--to", "goup", "--dry-run"], ["goup", "group"]),
        (["convert", "clinet:build", "--to", "group", "--option", "groups", "--dry-run"], ["NAME=VALUE", "'groups'"]),
        (["freeze", "clinet:build", "--dry-run", "--format", "xml"], ["xml", "json"]),
        (["freeze", "clinet:build", "--only", "freee", "--dry-run"], ["fits no layer", 'Did you mean "free"?']),
        (["fold", "clinet:build", "--example", "clinet:x", "--skip", "zz*", "--dry-run"], ["skip='zz*' fits no layer"]),
        (["recalibrate", "clinet:build", "--batches", "clinet:batches", "--only", "conv", "--dry-run"], ["no norm"]),
        (["freeze", "clinet:build", "--only"], ["requires an argument"]),
        (["convert", "clinet:build", "--to", "domain", "--dry-run"], ["needs num_domains="]),
        (["convert", "clinet:build", "--to", "position", "--dry-run"], ["needs example="]),
        (["convert", "clinet:build", "--to", "ghost", "--option", "chunk=2", "--dry-run"], ["chunk=2", "chunk_size"]),
        (["convert", "clinet:build", "--to", "group", "--option", "only=bn", "--dry-run"], ["got only, which is"]),
    ],
)  # fmt: skip
def test_what_cannot_run(capsys, arguments, messages):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    for message in messages:
        assert message in err
