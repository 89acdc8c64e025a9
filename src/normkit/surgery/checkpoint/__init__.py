"""Saving a model with what its state_dict does not hold, and loading it only into a model that it fits."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from torch import nn

from normkit.errors import NormkitWarning
from normkit.surgery.checkpoint.differences import compare, not_as_loaded
from normkit.surgery.checkpoint.file import Checkpoint, read, write
from normkit.surgery.checkpoint.manifest import manifest
from normkit.surgery.checkpoint.state import State, extra_of, fill, state_of, tensors_of
from normkit.surgery.operation import operation
from normkit.surgery.result import Surgery


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's state, and its manifest, into a safetensors file.

    A tensor with several names is stored once. Layers in plain lists and dictionaries, which torch does not find, are
    stored too. The file is put in place by one rename: an error leaves an older file unchanged.
    """
    about, state = manifest(model), state_of(model)
    write(Path(path), Checkpoint(tensors_of(state), extra_of(state), about))


def load(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> Surgery:
    """Fill a model, in place, from a file that `save` wrote.

    Args:
        model: what is filled. Its parameters stay the same objects, as in `load_state_dict`.
        path: a safetensors file. A pickle is refused, and never opened.
        strict: refuse a file whose norms differ from the model's in kind, eps, momentum or mode, or whose tensors
            differ in names, shapes or types, and a file without a manifest, whose eps is unknown. False loads the
            tensors that fit, leaves the model's settings as they are, and warns with the same list.
    """
    found, name = compare(read(Path(path)), model), os.fspath(path)
    if strict and found.words():
        raise found.refusal(name, model)
    with operation(model, inplace=True) as op:
        fill(model, found.fitting)
        found.of_tensors.extend(not_as_loaded(model, found.fitting))
        if strict and found.words():
            raise found.refusal(name, model)
        for layer, tensors in _by_layer(model, found.fitting).items():
            op.change(layer, f"loaded {', '.join(tensors)}", f"from {name}")
        op.skipped.extend(found.skipped())
        if found.words():
            what = f"{name} does not fit the {type(model).__name__}; what fits is loaded, settings are the model's own:"
            warnings.warn("\n  ".join([what, *found.words()]), NormkitWarning, stacklevel=2)
        return op.result()


def _by_layer(model: nn.Module, state: State) -> dict[str, list[str]]:
    """Names of tensors by layer; a layer with several names appears under its first."""
    again = {name for name, _ in model.named_modules(remove_duplicate=False)} - {
        name for name, _ in model.named_modules()
    }
    layers: dict[str, list[str]] = {}
    for key in state:
        layer, _, tensor = key.rpartition(".")
        if layer not in again:
            layers.setdefault(layer, []).append(tensor)
    return layers
