"""The differences between a file and the model that is to be filled from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.errors import NormkitError
from normkit.named_layers import display_name
from normkit.snapshot import all_equal
from normkit.surgery.checkpoint.file import Checkpoint
from normkit.surgery.checkpoint.manifest import Difference, differences, manifest
from normkit.surgery.checkpoint.state import State, state_of
from normkit.surgery.result import Change

_ADVICE = {
    "mode": "model.train() and model.eval() set the mode.",
    "eps": "Make the model with the file's eps: its weights were trained with that.",
    "momentum": "Make the model with the file's momentum.",
}


class MismatchError(NormkitError, RuntimeError):
    """A file that does not fit the model.

    Attributes:
        differences: all of them.
        layers: the norms that differ in kind, eps, momentum or mode.
        code: "NK502", manifest-drift, if there are such norms, or if nothing is known of the file's; else None.
    """

    def __init__(
        self, message: str, differences: Sequence[Difference] = (), layers: Sequence[str] = (), code: str | None = None
    ) -> None:
        super().__init__(message)
        self.differences, self.layers, self.code = list(differences), list(layers), code


class Comparison(NamedTuple):
    """The result of comparing a file with a model.

    Attributes:
        of_norms: how the norms differ.
        of_tensors: how names, shapes and types of the tensors differ.
        fitting: the part of the file that can be loaded nevertheless.
        has_manifest: whether the file describes its norms.
    """

    of_norms: list[Difference]
    of_tensors: list[Difference]
    fitting: State
    has_manifest: bool

    @property
    def all(self) -> list[Difference]:
        """Every difference."""
        return [*self.of_norms, *self.of_tensors]

    def words(self) -> list[str]:
        """One line for each kind of difference, with all layers or tensors that have it."""
        lines = [] if self.has_manifest else ["it has no manifest: its eps, momentum and mode are unknown"]
        alike: dict[str, list[str]] = {}
        for difference in self.all:
            alike.setdefault(difference.words, []).append(display_name(difference.where))
        return lines + [f"{words}: {', '.join(names)}" for words, names in alike.items()]

    def refusal(self, path: str, model: nn.Module) -> MismatchError:
        """The error that lists them all."""
        found = "\n  ".join([f"{path} does not fit the {type(model).__name__}, which is unchanged:", *self.words()])
        advice = [text for what, text in _ADVICE.items() if any(d.what == what for d in self.of_norms)]
        advice += _advice_on_wrappers(self.of_tensors)
        last = "strict=False loads what fits and keeps the model's own settings."
        layers = list(dict.fromkeys(d.where for d in self.of_norms))
        code = "NK502" if layers or not self.has_manifest else None
        return MismatchError("\n".join([found, *advice, last]), self.all, layers, code)

    def skipped(self) -> list[Change]:
        """What the model keeps when the fitting part is loaded."""
        norms = [Change(d.where, f"{d.what} kept", d.words) for d in self.of_norms]
        return norms + [_skipped_tensor(d, d.where in self.fitting) for d in self.of_tensors]


def compare(file: Checkpoint, model: nn.Module) -> Comparison:
    """Compare a file with a model."""
    of_model = manifest(model)
    of_norms = [] if file.manifest is None else differences(file.manifest, of_model)
    here, saved = state_of(model), {**file.tensors, **file.extra}
    found = {key: _difference(key, saved, here) for key in {**here, **saved}}
    fitting = {key: saved[key] for key, difference in found.items() if _fits(difference)}
    return Comparison(of_norms, [d for d in found.values() if d is not None], fitting, file.manifest is not None)


def not_as_loaded(model: nn.Module, loaded: Mapping[str, Any]) -> list[Difference]:
    """Tensors that do not hold what was loaded into them, because another tensor shares their memory."""
    now = state_of(model)
    tensors = {key: value for key, value in loaded.items() if isinstance(value, Tensor)}
    lost = [key for key, value in tensors.items() if not all_equal(now[key], value.to(now[key]))]
    return [Difference(key, "memory", "its own", "that of another tensor with other values") for key in lost]


def _difference(key: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> Difference | None:
    theirs, ours = saved.get(key), here.get(key)
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        same = key in saved and key in here and isinstance(theirs, Tensor) == isinstance(ours, Tensor)
        return None if same else Difference(key, "tensor", _presence(saved, key), _presence(here, key))
    if theirs.shape != ours.shape:
        return Difference(key, "shape", tuple(theirs.shape), tuple(ours.shape))
    return None if theirs.dtype == ours.dtype else Difference(key, "dtype", theirs.dtype, ours.dtype)


def _advice_on_wrappers(found: Sequence[Difference]) -> list[str]:
    """DataParallel and torch.compile put a prefix before all names of the model they wrap."""
    of_file = {d.where for d in found if d.here == "missing"}
    of_model = {d.where for d in found if d.saved == "missing"}
    for attribute, wrapper in (("module", "DataParallel or DistributedDataParallel"), ("_orig_mod", "torch.compile")):
        if of_file and of_file == {f"{attribute}.{name}" for name in of_model}:
            return [f"The file is of a model inside {wrapper}: save wrapped.{attribute}, not the wrapper."]
        if of_model and of_model == {f"{attribute}.{name}" for name in of_file}:
            return [f"The model is inside {wrapper}: load into wrapped.{attribute}."]
    return []


def _presence(state: Mapping[str, Any], key: str) -> str:
    if key not in state:
        return "missing"
    return f"of shape {tuple(state[key].shape)}" if isinstance(state[key], Tensor) else f"a {type(state[key]).__name__}"


def _fits(difference: Difference | None) -> bool:
    """Whether nothing differs, or only the dtype, in a way that changes values by rounding alone."""
    if difference is None:
        return True
    saved, here = difference.saved, difference.here
    if not isinstance(saved, torch.dtype) or not isinstance(here, torch.dtype):
        return False
    return saved.is_floating_point == here.is_floating_point and saved.is_complex == here.is_complex


def _skipped_tensor(difference: Difference, is_loaded: bool) -> Change:
    layer, _, name = difference.where.rpartition(".")
    done = "left out" if difference.here == "missing" else "cast" if is_loaded else "kept"
    return Change(layer, f"{name} {done}", difference.words)
