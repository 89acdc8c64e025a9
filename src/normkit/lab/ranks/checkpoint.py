"""A trial's state, written by all ranks together with torch.distributed.checkpoint.

The folder of a checkpoint is written under another name and renamed when all of it is on the disk, and the one before
is removed after that: of those that are there, the last is the state. What ranks have in common is written once, the
random state by each.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from normkit.json_lines import Line, RecordError
from normkit.lab.checkpoint import attach_tensors, detach_tensors
from normkit.lab.ranks.group import Ranks

_STATE = "state"  # all that is not a tensor, as JSON
_RANDOM = "random"


def save_together(state: Line, path: Path, ranks: Ranks) -> None:
    """Write a state; a reader finds the old one or the new one, never a part."""
    tensors: dict[str, Tensor] = {}
    shape = json.dumps(detach_tensors({key: value for key, value in state.items() if key != _RANDOM}, tensors))
    for kind, own in _random_states(state[_RANDOM], ranks).items():
        tensors[f"{_RANDOM} {kind} {ranks.rank}"] = own
    if ranks.rank == 0:  # what the others have in its place was not measured
        tensors[_STATE] = torch.frombuffer(bytearray(shape.encode()), dtype=torch.uint8)
    part, final = path / "part", path / f"{state['step']:012d}"
    ranks.from_first(lambda: _make_empty(part))
    save(tensors, storage_writer=FileSystemWriter(part), process_group=ranks.control)
    ranks.from_first(lambda: _put_in_place(part, final))


def load_together(path: Path, ranks: Ranks) -> Line | None:
    """Read what `save_together` wrote last, if anything; restore what is random here and on no other rank."""
    found = ranks.from_first(lambda: [each.name for each in _complete(path)])
    if not found:
        return None
    reader = FileSystemReader(path / found[-1])
    tensors = ranks.together(lambda: _places_for(reader, path, ranks.rank))
    load(tensors, storage_reader=reader, process_group=ranks.control)
    state = attach_tensors(json.loads(bytes(tensors[_STATE].tolist())), tensors.__getitem__)
    if ranks.device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"{_RANDOM} cuda {ranks.rank}"])
    return {**state, _RANDOM: tensors[f"{_RANDOM} cpu {ranks.rank}"]}


def forget_together(path: Path, ranks: Ranks) -> None:
    """Remove what was kept."""
    ranks.from_first(lambda: shutil.rmtree(path, ignore_errors=True))


def _random_states(cpu: Tensor, ranks: Ranks) -> dict[str, Tensor]:
    return {"cpu": cpu} if ranks.device.type == "cpu" else {"cpu": cpu, "cuda": torch.cuda.get_rng_state()}


def _places_for(reader: FileSystemReader, path: Path, rank: int) -> dict[str, Tensor]:
    """Empty tensors for all that this rank reads."""
    try:
        entries = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise RecordError(f"{path} has no checkpoint that can be read ({error}). Remove it to begin anew.") from None
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and (not name.startswith(_RANDOM) or name.endswith(f" {rank}"))
    }


def _complete(path: Path) -> list[Path]:
    return sorted(each for each in path.glob("*") if each.name.isdigit()) if path.is_dir() else []


def _make_empty(part: Path) -> None:
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def _put_in_place(part: Path, final: Path) -> None:
    shutil.rmtree(final, ignore_errors=True)  # of a run before, that was killed after this rename
    os.replace(part, final)
    for older in _complete(final.parent)[:-1]:
        shutil.rmtree(older, ignore_errors=True)
