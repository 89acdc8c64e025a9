"""A trial's state on disk: nested dictionaries and lists of tensors and numbers, in one safetensors file.

It is put in place by one rename, and nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from normkit.atomic import put_in_place
from normkit.json_lines import RecordError


def save_state(state: Mapping[str, Any], path: Path) -> None:
    """Write a state; a reader finds the old one or the new one, never a part."""
    tensors: dict[str, Tensor] = {}
    shape = json.dumps(detach_tensors(state, tensors))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # always the same name: a trial that is killed again and again leaves one file
    # safetensors' own save_file would raise its own error when the disk is full; this raises an OSError.
    part.write_bytes(save(tensors or {"0": torch.empty(0)}, metadata={"state": shape}))
    put_in_place(part, path)


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            shape = json.loads(file.metadata()["state"])
            found = attach_tensors(shape, file.get_tensor)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is not a trial's checkpoint ({error}). Remove it to begin the trial anew.") from None
    return dict(found)


# A tensor is replaced by {"tensor": its name}; a mapping becomes a list of pairs, because JSON's keys are strings and
# an optimizer's are numbers.


def detach_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What remains of a value in JSON's types, when its tensors have been put aside under the names it has for them."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"map": [[key, detach_tensors(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [detach_tensors(item, tensors) for item in value]}
    return value


def attach_tensors(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The value again, with the tensors of these names."""
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "map":
        return {key: attach_tensors(item, tensor) for key, item in content}
    return [attach_tensors(item, tensor) for item in content]
