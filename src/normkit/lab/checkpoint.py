"""A trial's state on disk: nested dictionaries and lists of tensors and numbers, in one safetensors file.

It is put in place by one rename, and nothing is pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from normkit.lab.record import RecordError


def save_state(state: Mapping[str, Any], path: Path) -> None:
    """Write a state; whoever reads finds the old one or the new one, never a part."""
    tensors: dict[str, Tensor] = {}
    shape = json.dumps(_detach(state, tensors))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    content = save(tensors or {"0": torch.empty(0)}, metadata={"state": shape})
    with open(beside, "wb") as file:  # by ourselves: what a disk refuses is an OSError then
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            shape = json.loads(file.metadata()["state"])
            found = _attach(shape, file.get_tensor)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is not a trial's checkpoint ({error}). Remove it to begin the trial anew.") from None
    return dict(found)


# A tensor is replaced by {"tensor": its name}; a mapping becomes a list of pairs, because JSON's keys are strings and
# an optimizer's are numbers.


def _detach(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"map": [[key, _detach(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [_detach(item, tensors) for item in value]}
    return value


def _attach(value: Any, tensor: Any) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "map":
        return {key: _attach(item, tensor) for key, item in content}
    return [_attach(item, tensor) for item in content]
