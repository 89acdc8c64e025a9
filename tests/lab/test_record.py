"""Records are written line by line, and read whatever moment their writer died at."""

import errno
import math
import os

import pytest
import torch

from normkit.json_lines import LineWriter, RecordError
from normkit.lab.checkpoint import load_state, save_state
from normkit.lab.record import read_run, read_trial

HEADER = {"experiment": "toy", "arm": "a", "seed": 3}


def write(path, *lines):
    with LineWriter(path) as writer:
        return [writer.write(line) for line in lines]


def test_a_record_comes_back(tmp_path):
    path = tmp_path / "records" / "toy.a.3.jsonl"
    write(path, HEADER, {"step": 0, "x": 1.5}, {"step": 5, "x": math.nan}, {"status": "done"})
    found = read_trial(path)
    assert (found.header, found.end) == (HEADER, {"status": "done"})
    steps, values = found.series("x")
    assert steps == [0.0, 5.0]
    assert values[0] == 1.5
    assert math.isnan(values[1])
    assert [trial.seed for trial in read_run(tmp_path).of("a")] == [3]


@pytest.mark.parametrize("lost", range(1, 20))
def test_half_a_line_is_no_line(tmp_path, lost):
    path = tmp_path / "r.jsonl"
    *_, before, size = write(path, HEADER, {"step": 1}, {"step": 2})
    path.write_bytes(path.read_bytes()[: max(before, size - lost)])
    found = read_trial(path)
    assert [line["step"] for line in found.measured] == [1]
    assert found.end is None


def test_writing_continues_after_the_given_size(tmp_path):
    path = tmp_path / "r.jsonl"
    sizes = write(path, HEADER, {"step": 1}, {"step": 2})
    with LineWriter(path, sizes[1]) as writer:
        writer.write({"step": 7})
    assert [line["step"] for line in read_trial(path).measured] == [1, 7]


@pytest.mark.parametrize(("text", "message"), [("{}\n", "first line"), ("", "first line"), ("nonsense\n", "line 1")])
def test_what_is_no_record_is_refused(tmp_path, text, message):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(RecordError, match=message):
        read_trial(path)


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(RecordError, match="holds no run"):
        read_run(tmp_path)


def test_a_state_comes_back(tmp_path):
    state = {
        "step": 3,
        "seconds": 0.1 + 0.2,
        "model": {"weight": torch.randn(3, 4).t(), "count": torch.tensor(7)},
        "optimizer": {"state": {0: {"step": torch.tensor(2.0), "flag": None}}, "param_groups": [{"params": [0, 1]}]},
        "random": torch.get_rng_state(),
    }
    path = tmp_path / "state.safetensors"
    save_state(state, path)
    found = load_state(path)
    assert found["seconds"] == state["seconds"]
    assert torch.equal(found["model"]["weight"], state["model"]["weight"])
    assert found["optimizer"]["state"][0]["flag"] is None
    assert found["optimizer"]["param_groups"] == [{"params": [0, 1]}]
    assert torch.equal(found["random"], state["random"])
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]


def test_a_broken_state_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    save_state({"a": torch.randn(100)}, path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RecordError, match="not a trial's checkpoint"):
        load_state(path)


def test_a_record_without_a_whole_line_is_not_read_yet(tmp_path):
    write(tmp_path / "records" / "toy.a.3.jsonl", HEADER)
    (tmp_path / "records" / "toy.b.3.jsonl").write_text("")
    (tmp_path / "records" / "toy.c.3.jsonl").write_text('{"experiment": "to')
    assert [trial.arm for trial in read_run(tmp_path).trials] == ["a"]


def test_a_checkpoint_on_a_full_disk_is_the_systems_own_error(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    save_state({"step": 1, "x": torch.ones(2)}, path)

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        save_state({"step": 2, "x": torch.zeros(2)}, path)
    assert caught.value.errno == errno.ENOSPC
    assert load_state(path)["step"] == 1
