"""What a state_dict does not hold of a model's norms: eps, momentum, mode and kind."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normkit.errors import ArgumentError, DistributedError
from normkit.jsonable import jsonable
from normkit.named_layers import display_name, named_layers
from normkit.ranks import gathered, must_be_one_model
from normkit.surgery.norms import Norm, survey

FORMAT = 1

# What must be the same for weights to mean the same, in the order in which differences are listed.
_COMPARED = (
    *("kind", "over", "scope", "updates", "affine", "num_features", "num_groups", "activation"),
    *("eps", "momentum"),
)
# The same, of what older files do not have.
_COMPARED_IF_SAVED = ("normalized_shape", "channels_first", "channel_dim", "weight_offset")
# Attributes of a layer that do not change what it computes, or that its spec already has.
_NO_OPTION = {"training", "affine", "elementwise_affine", "inplace", "nonfinite", "domain", "num_channels"}


class Difference(NamedTuple):
    """One difference between a file and the model that is to be filled from it.

    Attributes:
        where: the name of a layer, or of a tensor.
        what: "eps", "mode", "shape", ...
        saved: what the file has.
        here: what the model has.
    """

    where: str
    what: str
    saved: Any
    here: Any

    @property
    def words(self) -> str:
        """The difference, without the place."""
        return f"{self.what} is {self.saved} in the file, {self.here} in the model"

    def __str__(self) -> str:
        return f"{display_name(self.where)}: {self.words}"


def manifest(model: nn.Module, *, over_ranks: bool = False) -> dict[str, Any]:
    """What a state_dict does not hold, as plain values that JSON can hold.

    Its keys:

    - "format", "normkit" and "torch": versions.
    - "model": the class of the model.
    - "counts": "layers", "parameters" and "norms".
    - "norms": of every norm layer, by name, its "class", its "mode" ("train" or "eval"), what `describe` says of it
      (kind, over, uses, scope, updates, affine, eps, momentum, num_features, normalized_shape, num_groups, activation,
      channels_first, channel_dim, weight_offset, names, exact), its "num_batches_tracked", and "options": its other
      arguments.
    - "unknown": of layers that are norms by their names, and that `describe` does not know, "class" and "options".
    - "ranks", with `over_ranks`: how many there are ("count") and, of norms for which they differ, by name, the
      "num_batches_tracked" of each rank: the weights with which statistics of such ranks are merged.

    Args:
        model: any model.
        over_ranks: compare it with the models of all ranks of the process group, each of which must call this. An error
            says in what they differ, and on which ranks. Without it nothing is exchanged: one rank may call it alone.
    """
    own = _manifest_of(model)
    return _compared(model, own) if over_ranks else own


def _compared(model: nn.Module, own: dict[str, Any]) -> dict[str, Any]:
    """The same, once it is that of all ranks."""
    must_be_one_model(model, "manifest")
    every = gathered(own, "manifest")
    for rank, theirs in enumerate(every):
        for where, what, first, there in differences(every[0], theirs):
            raise DistributedError(
                f"All ranks need the same norms; of {display_name(where)}, {what} is {first} on rank 0, and {there} on "
                f"rank {rank}. Make, load and set the model in one way on all of them."
            )
    counts = {name: [theirs["norms"][name]["num_batches_tracked"] for theirs in every] for name in own["norms"]}
    differing = {name: of_ranks for name, of_ranks in counts.items() if any(one != of_ranks[0] for one in of_ranks)}
    return own | {"ranks": {"count": len(every), "num_batches_tracked": differing}}


def _manifest_of(model: nn.Module) -> dict[str, Any]:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module; got a {type(model).__name__}.")
    layers = dict(named_layers(model))
    found = survey(model)
    parameters = {id(p): p for layer in layers.values() for p in layer.parameters(recurse=False) if not is_lazy(p)}
    return {
        "format": FORMAT,
        "normkit": version("normkit"),
        "torch": str(torch.__version__),
        "model": _class_name(model),
        "counts": {
            "layers": len(layers),
            "parameters": sum(parameter.numel() for parameter in parameters.values()),
            "norms": len(found.norms),
        },
        "norms": {norm.name: _entry(norm) for norm in found.norms},
        "unknown": {
            name: {"class": _class_name(layer), "options": _options(layer)} for name, layer in found.unknown.items()
        },
    }


def is_manifest(found: Mapping[str, Any]) -> bool:
    """Whether it has the entries of each norm that comparisons need."""
    of_norms = found.get("norms")
    return isinstance(of_norms, dict) and all(
        isinstance(entry, dict) and {"class", "mode", "uses", "exact"} <= entry.keys() for entry in of_norms.values()
    )


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    """How the norms of two manifests differ. Torch's layers and ours of the same function do not."""
    found: list[Difference] = []
    unknown = saved.get("unknown", {})
    for name in {**saved["norms"], **here["norms"]}:
        theirs, ours = saved["norms"].get(name), here["norms"].get(name)
        if theirs is not None and ours is not None:
            found += [Difference(name, *difference) for difference in _between(theirs, ours)]
        elif name in unknown or name in here["unknown"]:  # by another version, or on the meta device
            options = _options_between(theirs or unknown[name], ours or here["unknown"][name])
            found += [Difference(name, *difference) for difference in options]
        else:
            found.append(Difference(name, "norm", _called(theirs), _called(ours)))
    for name, entry in here["unknown"].items():  # what they compute is unknown, but their options are not
        found += [Difference(name, *difference) for difference in _options_between(unknown.get(name, {}), entry)]
    return found


def _entry(norm: Norm) -> dict[str, Any]:
    _, layer, spec = norm
    counted = getattr(layer, "num_batches_tracked", None)
    return {
        "class": _class_name(layer),
        "mode": "train" if layer.training else "eval",
        **{name: jsonable(value) for name, value in asdict(spec).items()},
        "num_batches_tracked": counted.tolist() if isinstance(counted, Tensor) and not counted.is_meta else None,
        "options": {name: value for name, value in _options(layer).items() if not hasattr(spec, name)},
    }


def _options(layer: nn.Module) -> dict[str, Any]:
    """Public attributes with plain values: r_max, chunk_size, an LRN's alpha, ..."""
    public = {name: value for name, value in vars(layer).items() if not name.startswith("_") and name not in _NO_OPTION}
    return {name: jsonable(value) for name, value in public.items() if _is_plain(value)}


def _between(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What differs in one layer: the setting, its value in the file and in the model."""
    # Known classes are compared by what they do; an unknown one may do more than its spec says.
    if _called(saved) != _called(here) and not (saved["exact"] and here["exact"]):
        yield "class", _called(saved), _called(here)
    for name in (*_COMPARED, *(name for name in _COMPARED_IF_SAVED if name in saved)):
        if saved.get(name) != here.get(name):
            yield name, saved.get(name), here.get(name)
    # The mode counts only where it changes the output: not for a LayerNorm or a frozen BatchNorm.
    if saved["uses"] != here["uses"]:
        what = "mode" if saved["mode"] != here["mode"] else "uses"
        yield what, saved[what], here[what]
    yield from _options_between(saved, here)


def _options_between(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Options that both have, and that differ."""
    theirs, ours = saved.get("options", {}), here["options"]
    for name in theirs:
        if name in ours and theirs[name] != ours[name]:
            yield name, theirs[name], ours[name]


def _called(entry: Mapping[str, Any] | None) -> str | None:
    return None if entry is None else str(entry["class"]).rpartition(".")[2]


def _class_name(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | bool | numbers.Real)
