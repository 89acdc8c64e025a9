"""What is saved comes back bit for bit; what does not fit is refused with all that differs, and changes nothing."""

import copy
import json
import os
import pickle
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import normkit as nk
from normkit.errors import ArgumentError, NormkitError, NormkitWarning
from normkit.surgery.checkpoint import file as checkpoint
from normkit.surgery.checkpoint import load, save
from normkit.surgery.checkpoint.differences import MismatchError
from normkit.surgery.checkpoint.file import CheckpointError, FileError, MissingFileError, read_manifest
from normkit.surgery.fold import fold
from normkit.surgery.replace.convert import convert
from normkit.surgery.replace.freeze import freeze
from support.cases import CASES


def randomize_(model):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.copy_(torch.rand_like(tensor) + 0.5)
            elif tensor.dtype == torch.long:
                tensor.random_(1, 1000)
    return model


class Net(nn.Module):
    def __init__(self, eps=0.02, momentum=0.3, norm=nn.BatchNorm2d, width=4):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.bn = norm(width, eps=eps, momentum=momentum)
        self.group = nn.GroupNorm(2, width)
        self.fc = nn.Linear(width, 2)
        randomize_(self)

    def forward(self, x):
        return self.fc(self.group(self.bn(self.conv(x))).mean((2, 3)))


def everything(model):
    """All that loading may touch: values bit for bit, objects, modes, settings, hooks."""
    return {
        "state": {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)},
        "objects": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "modes": [module.training for module in model.modules()],
        "grad": [parameter.requires_grad for parameter in model.parameters()],
        "settings": [repr(module) for module in model.modules()],
        "hooks": [list(module._forward_hooks) for module in model.modules()],
    }


def assert_same(model, before):
    after = everything(model)
    now, then = after.pop("state"), before["state"]
    assert now.keys() == then.keys()
    assert all(torch.equal(bits(value), bits(then[key])) for key, value in now.items())
    assert after == {key: value for key, value in before.items() if key != "state"}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def equal_states(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layer_comes_back(case, training, path):
    model, other = nn.Sequential(case.layer(training=training)), nn.Sequential(case.layer(training=training))
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.zero_()
    save(model, path)
    load(other, path)
    assert equal_states(model, other)


def test_changed_and_undo(path):
    save(Net(), path)
    model = Net()
    model.bn.register_forward_hook(lambda *_: None)
    model.conv.weight.requires_grad_(False)
    before = everything(model)
    surgery = load(model, path)
    assert surgery.model is model
    assert [change.layer for change in surgery.changed] == ["conv", "bn", "group", "fc"]
    assert surgery.changed[1].what == "loaded weight, bias, running_mean, running_var, num_batches_tracked"
    assert str(path) in surgery.changed[0].why
    assert not surgery.skipped
    assert everything(model)["objects"] == before["objects"]  # an optimizer's parameters are still the model's
    assert surgery.undo() is model
    assert_same(model, before)


def test_a_file_is_what_others_read(path):
    model = Net()
    save(model, path)
    found = safetensors.torch.load_file(path)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())
    with safetensors.safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["normkit"])["norms"]["bn"]["eps"] == 0.02
    assert read_manifest(path)["norms"]["bn"]["momentum"] == 0.3
    other = Net()
    safetensors.torch.load_model(other, path)
    assert equal_states(model, other)


@pytest.mark.parametrize("ours", [False, True])
def test_torchs_layer_and_ours_are_the_same(ours, path):
    model = Net(norm=nk.BatchNorm2d if ours else nn.BatchNorm2d)
    other = Net(norm=nn.BatchNorm2d if ours else nk.BatchNorm2d)
    save(model, path)
    load(other, path)
    assert equal_states(model, other)


DIFFERENT = {
    "eps": (lambda: Net(eps=1e-5), ["eps is 0.02 in the file, 1e-05 in the model: bn"]),
    "momentum": (lambda: Net(momentum=0.1), ["momentum is 0.3 in the file, 0.1 in the model: bn"]),
    "mode": (lambda: Net().eval(), ["mode is train in the file, eval in the model: bn", "model.train()"]),
    "kind": (
        lambda: Net(norm=nk.BatchRenorm2d),
        ["kind is batch in the file, renorm in the model: bn"],
    ),
    "shape": (
        lambda: Net(width=6),
        [
            "num_features is 4 in the file, 6 in the model: bn, group",
            "shape is (4, 3, 3, 3) in the file, (6, 3, 3, 3) in the model: conv.weight",
            "shape is (2, 4) in the file, (2, 6) in the model: fc.weight",
        ],
    ),
    "dtype": (
        lambda: Net().half(),
        ["dtype is torch.float32 in the file, torch.float16 in the model: conv.weight, conv.bias, bn.weight"],
    ),
    "keys": (
        lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)),
        [
            "norm is BatchNorm2d in the file, None in the model: bn",
            "tensor is missing in the file, of shape (2,)",
            "1.bias",
        ],
    ),
    "several": (
        lambda: Net(eps=1.0, momentum=0.9).eval(),
        ["eps is 0.02", "momentum is 0.3", "mode is train", "strict=False"],
    ),
}


@pytest.mark.parametrize(("build", "messages"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_what_differs_is_refused(build, messages, path):
    save(Net(), path)
    model = build()
    before = everything(model)
    with pytest.raises(MismatchError) as refusal:
        load(model, path)
    assert isinstance(refusal.value, NormkitError)
    assert isinstance(refusal.value, RuntimeError)  # as load_state_dict raises
    assert refusal.value.differences
    for message in messages:
        assert message in str(refusal.value)
    assert_same(model, before)


@pytest.mark.parametrize(("build", "messages"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_not_strict_loads_what_fits(build, messages, path):
    saved = Net()
    save(saved, path)
    model = build()
    before = everything(model)
    with pytest.warns(NormkitWarning) as caught:
        surgery = load(model, path, strict=False)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    said = str(caught[0].message)
    assert all(message in said for message in messages if message not in ("model.train()", "strict=False"))
    assert surgery.skipped
    theirs, now = saved.state_dict(), model.state_dict()
    for key, value in now.items():
        fits = key in theirs and theirs[key].shape == value.shape
        expected = theirs[key].to(value.dtype) if fits else before["state"][key]
        assert torch.equal(value, expected), key
    assert everything(model)["settings"] == before["settings"]  # its own eps
    assert everything(model)["modes"] == before["modes"]
    surgery.undo()
    assert_same(model, before)


def test_wrappers_are_recognized(path):
    model = Net()
    wrapped = nn.DataParallel(model)
    save(model, path)
    with pytest.raises(MismatchError, match=r"The model is inside DataParallel.*load into wrapped\.module"):
        load(wrapped, path)
    load(wrapped.module, path)
    save(torch.compile(model), path)
    with pytest.raises(MismatchError, match=r"of a model inside torch\.compile: save wrapped\._orig_mod"):
        load(model, path)


def test_a_warning_that_is_an_error_leaves_the_model(path):
    save(Net(), path)
    model = Net(eps=1.0)
    before = everything(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NormkitWarning):
            load(model, path, strict=False)
    assert_same(model, before)


def test_a_file_without_a_manifest(path):
    saved, model = Net(), Net()
    safetensors.torch.save_file(saved.state_dict(), path)
    before = everything(model)
    with pytest.raises(MismatchError, match=r"no manifest: its eps, momentum and mode are unknown[\s\S]*strict=False"):
        load(model, path)
    assert_same(model, before)
    with pytest.warns(NormkitWarning, match="no manifest"):
        load(model, path, strict=False)
    assert equal_states(saved, model)
    assert read_manifest(path) is None


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.norm = self.again = nn.BatchNorm1d(3)
        whole = torch.randn(4, 6)
        self.register_buffer("left", whole[:, :3])
        self.register_buffer("turned", whole.t())
        self.register_buffer("row", whole[1])
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("void", torch.empty(0, 3))
        if tied:
            self.out.weight = self.embed.weight
        else:
            randomize_(self)


def test_shared_tensors_and_views(path):
    model, other = Tied(), Tied()
    save(model, path)
    with safetensors.safe_open(path, framework="pt") as file:
        stored, metadata = set(file.keys()), file.metadata()
    assert "out.weight" not in stored
    assert "again.running_var" not in stored
    assert metadata["out.weight"] == "embed.weight"
    assert {"left", "turned", "row", "empty", "void"} <= stored
    surgery = load(other, path)
    assert equal_states(model, other)
    assert other.out.weight is other.embed.weight
    assert other.left.untyped_storage().data_ptr() == other.turned.untyped_storage().data_ptr()
    assert [change.layer for change in surgery.changed].count("norm") == 1
    assert "again" not in [change.layer for change in surgery.changed]


def test_a_tied_model_takes_no_two_values(path):
    untied, tied = Tied(tied=False), Tied()
    assert not torch.equal(untied.out.weight, untied.embed.weight)
    save(untied, path)
    before = everything(tied)
    with pytest.raises(MismatchError, match="memory is its own in the file, that of another"):
        load(tied, path)
    assert_same(tied, before)
    with pytest.warns(NormkitWarning, match="memory is its own"):
        load(tied, path, strict=False)
    loose = Tied(tied=False)
    save(tied, path)
    load(loose, path)  # the other way both simply get the value
    assert torch.equal(loose.out.weight, tied.embed.weight)


def test_layers_in_plain_lists_and_dictionaries(path):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.blocks = [nn.BatchNorm1d(3), {"deep": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))}]
            for part in (self.fc, self.blocks[0], self.blocks[1]["deep"]):
                randomize_(part)

    model, other = Hidden(), Hidden()
    save(model, path)
    assert not torch.equal(model.blocks[0].running_mean, other.blocks[0].running_mean)
    surgery = load(other, path)
    assert equal_states(model.blocks[0], other.blocks[0])
    assert equal_states(model.blocks[1]["deep"], other.blocks[1]["deep"])
    assert "blocks[0]" in [change.layer for change in surgery.changed]
    other.blocks[0].eps = 0.7
    with pytest.raises(MismatchError, match=r"eps is 1e-05 in the file, 0.7 in the model: blocks\[0\]"):
        load(other, path)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int32, torch.complex64]
)
def test_types_and_layouts(dtype, path):
    def build():
        model = nn.Module()
        model.register_buffer("plain", (torch.randn(3, 4) * 5).to(dtype))
        model.register_buffer("channels_last", torch.randn(2, 3, 4, 5).to(dtype).to(memory_format=torch.channels_last))
        model.register_buffer("scalar", torch.randn(()).to(dtype))
        return model

    model, other = build(), build()
    save(model, path)
    load(other, path)
    assert equal_states(model, other)
    assert other.channels_last.is_contiguous(memory_format=torch.channels_last)


def test_values_that_are_not_numbers(path):
    model, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model.running_mean.copy_(torch.tensor([float("nan"), float("inf"), -0.0]))
    save(model, path)
    load(other, path)
    assert torch.equal(other.running_mean.view(torch.int32), model.running_mean.view(torch.int32))


class Counting(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_extra_state(path):
    for extra in ({"steps": [1, 2], "name": "a"}, torch.tensor([3.0])):
        save(nn.Sequential(Counting(extra)), path)
        other = nn.Sequential(Counting(type(extra)() if isinstance(extra, dict) else torch.zeros(1)))
        load(other, path)
        assert other[0].extra == extra
    with pytest.raises(CheckpointError, match=r"0\._extra_state is a set, which only a pickle could hold"):
        save(nn.Sequential(Counting({1})), path)


def test_parametrized_layers(path):
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    other = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    save(model, path)
    surgery = load(other, path)
    assert equal_states(model, other)
    assert "parametrizations.weight" in [change.layer for change in surgery.changed]


def test_what_cannot_be_stored(path):
    model = nn.Module()
    for tensor, message in (
        (torch.eye(3).to_sparse(), "wide is a torch.sparse_coo; safetensors holds plain, dense tensors"),
        (torch.zeros(2, dtype=torch.complex128), "no type torch.complex128: wide"),
        (torch.zeros(2, device="meta"), "wide is on the meta device, without values"),
    ):
        model.register_buffer("wide", tensor)
        with pytest.raises((CheckpointError, ArgumentError), match=message):
            save(model, path)
        assert not list(path.parent.iterdir())
    with pytest.raises(ArgumentError, match=r"0\.weight has no shape yet"):
        save(nn.Sequential(nn.LazyLinear(3)), path)
    with pytest.raises(ArgumentError, match="must be a torch"):
        save({"a": torch.zeros(1)}, path)
    save(nn.Linear(3, 2), path)
    with pytest.raises(ArgumentError, match="to_empty"):
        load(nn.Linear(3, 2, device="meta"), path)
    with pytest.raises(ArgumentError, match="must be a torch"):
        load({}, path)


def pickled(kind, path):
    state = Net().state_dict()
    if kind == "torch":
        torch.save(state, path)
    elif kind == "legacy":
        torch.save(state, path, _use_new_zipfile_serialization=False)
    elif kind == "tar":
        with tarfile.open(path, "w") as tar:
            tar.add(__file__, arcname="storages")
    else:
        path.write_bytes(pickle.dumps(Bomb(path.with_suffix(".ran")), protocol=int(kind)))


class Bomb:
    """A pickle that leaves a trace when it is opened."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", ["torch", "legacy", "tar", "0", "2", "4", "5"])
def test_pickles_are_never_opened(kind, strict, path):
    pickled(kind, path)
    model = Net()
    before = everything(model)
    with pytest.raises(CheckpointError, match=r"pickle.*torch\.load\(path, weights_only=True\).*nk\.save"):
        load(model, path, strict=strict)
    assert not path.with_suffix(".ran").exists()
    assert_same(model, before)


def test_a_header_that_looks_like_a_pickle_is_none(path):
    """A header of 640 bytes begins as a pickle of protocol 2 does."""
    for padding in range(2000):
        content = safetensors.torch.save({"a": torch.zeros(1)}, {"pad": "x" * padding})
        if content[:2] == b"\x80\x02":
            break
    else:
        pytest.fail("no header of 640 bytes")
    path.write_bytes(content)
    with pytest.raises(MismatchError, match="no manifest"):
        load(Net(), path)


def test_damaged_files(path):
    saved, model = Net(), Net()
    before = everything(model)
    save(saved, path)
    whole = path.read_bytes()
    for length in (0, 4, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors is (cut off|damaged or cut off|not a safetensors file)"
        ):
            load(model, path)
    path.write_bytes(whole[:9] + b"\xff" * 40 + whole[49:])
    with pytest.raises(CheckpointError, match="damaged"):
        load(model, path)
    for manifest, message in (("{", "not JSON"), ("[]", "is a list"), ('{"format": 99}', "format 99.*Update normkit")):
        safetensors.torch.save_file(saved.state_dict(), path, {"normkit": manifest})
        with pytest.raises(CheckpointError, match=message):
            load(model, path)
    safetensors.torch.save_file(saved.state_dict(), path, {"normkit": '{"format": 1}'})
    with pytest.raises(CheckpointError, match="no norms"):
        load(model, path)
    with pytest.raises(MissingFileError, match="does not exist"):
        load(model, path.with_name("none"))
    with pytest.raises(FileNotFoundError):
        load(model, path.with_name("none"))
    with pytest.raises(FileError, match="cannot be read"):
        load(model, path.parent)
    assert_same(model, before)


def test_folders(tmp_path):
    with pytest.raises(MissingFileError, match="there is no folder"):
        save(Net(), tmp_path / "none" / "model.safetensors")
    with pytest.raises(FileError, match="is a folder"):
        save(Net(), tmp_path)
    model, link = Net(), tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    save(model, link)
    assert link.is_symlink()
    load(Net(), tmp_path / "real")
    os.umask(mask := os.umask(0))
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o666 & ~mask


FULL = """
import resource, sys, torch
from normkit.surgery.checkpoint.file import FileError
from normkit.surgery.checkpoint import save
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    save(torch.nn.Linear(200, 200), sys.argv[1])
except FileError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_file(path):
    """The limit of a file's size is the nearest to a full disk that a test can have; the error comes the same way."""
    model = Net()
    save(model, path)
    old = path.read_bytes()
    said = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True, check=True).stdout
    assert "cannot be written" in said
    assert "is unchanged" in said
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_whatever_breaks_while_writing_leaves_the_old_file(broken, path, monkeypatch):
    save(Net(), path)
    old = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, broken, full)
    with pytest.raises(FileError, match="No space left on device"):
        save(Net(), path)
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]


def test_state_dict_versions_and_hooks_are_respected(path):
    class Renaming(nn.Module):
        """Keeps its weight under another name in checkpoints, as layers do that were renamed once."""

        _version = 3

        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))
            self.versions = []

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[f"{prefix}old_name"] = self.w.detach()

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            self.versions.append(metadata.get("version"))
            with torch.no_grad():
                self.w.copy_(state[f"{prefix}old_name"])

    model, other = nn.Sequential(Renaming()), nn.Sequential(Renaming())
    save(model, path)
    load(other, path)
    assert torch.equal(model[0].w, other[0].w)
    assert other[0].versions == [3]


def test_a_copy_that_was_trained_on_is_taken_back(path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    save(model, path)
    expected = copy.deepcopy(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 6, 6)).square().mean().backward()
        optimizer.step()
    assert not equal_states(model, expected)
    load(model, path)
    assert equal_states(model, expected)


VERBS = {
    "fold": lambda model, x: fold(model.eval(), x),
    "freeze": lambda model, x: freeze(model),
    "freeze-statistics": lambda model, x: freeze(model, affine=False),
    "convert": lambda model, x: convert(model, "group", x),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())
def test_models_that_were_operated_on(verb, path):
    """A file goes back into a model on which the same was done, and into no other."""
    x = torch.randn(2, 3, 6, 6)
    model, other, plain = verb(Net(), x).model, verb(Net(), x).model, Net()
    save(model, path)
    load(other, path)
    assert equal_states(model, other)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), other.eval()(x))
    before = everything(plain)
    with pytest.raises(MismatchError, match="in the model: bn"):
        load(plain, path)
    assert_same(plain, before)
