"""The same function in torch's own classes, for tools that compare types."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from normkit.batches import Forward, in_evaluation
from normkit.hooks import hooked
from normkit.layers.frozen import FrozenBatchNorm
from normkit.layers.norm_layer import NormLayer
from normkit.layers.sync import SyncBatchNorm
from normkit.snapshot import untouched
from normkit.surgery.norms import UNKNOWN, Norm, Survey, stored_moments
from normkit.surgery.operation import NothingToDo, Operation, Skip, become
from normkit.surgery.parity import run_example
from normkit.surgery.replace.builders import frozen_twin, place_and_type, with_parts
from normkit.surgery.replace.carry import Replacement, carry_, label, module_after
from normkit.surgery.replace.foreign import known_base, must_be_understood
from normkit.surgery.replace.sites import Site, sites

_DECIDED = {"affine", "elementwise_affine", "bias", "track_running_stats"}  # by what the layer has


def take_torch_classes(op: Operation, found: Survey, example: Any, forward: Forward | None) -> None:
    """Put torch's class of the same function in the place of every norm that has one."""
    op.ask(found, [norm.name for norm in found.norms])
    options = _options_of_calls(op.model, found.norms, example, forward)
    for site in sites(op.model, found.norms, example, forward):
        with op.attempt(site.name, label(site.layer)):
            one = _in_torch(site, options[id(site.layer)])
            op.change(site.name, one.what, "; ".join(one.notes))
            become(site.layer, one.whole)
    for name, layer in found.unknown.items():
        op.skip(name, label(layer), UNKNOWN)


def _in_torch(site: Site, options: Sequence[str]) -> Replacement:
    layer = site.layer
    if not isinstance(layer, NormLayer) and type(layer).__module__.startswith("torch.nn."):
        raise NothingToDo("is torch's own already")
    kind = None if site.spec.channels_first else _class_for(layer)  # torch's layer and RMS norms take the last
    if kind is None:
        raise Skip(f"torch has no class that computes what a {site.class_name} does")
    if site.spec.channel_dim != 1:
        raise Skip(f"its channels are in dimension {site.spec.channel_dim}, and torch's class has them in dimension 1")
    if options:
        raise Skip(f"it is called with {', '.join(options)}, which torch's layers do not take")
    must_be_understood(site, frozen_twin)
    notes = _must_be_torchs(site)
    new = _made(kind, site)
    carry_(new, layer)
    after = module_after(site)
    if after is not None:
        notes.append(f"{site.spec.activation} follows as a module: its state_dict keys begin with 0, and with 1")
    return Replacement(site, new.train(layer.training), True, notes, layer, after)


def _class_for(layer: nn.Module) -> type[nn.Module] | None:
    """Torch's class of the same evaluation, or the one that another library's norm derives from."""
    if isinstance(layer, FrozenBatchNorm):
        return None  # torch's would start to move in training
    if isinstance(layer, SyncBatchNorm):
        return nn.SyncBatchNorm
    if isinstance(layer, NormLayer):
        return layer._torch
    base = known_base(layer)
    return None if base is nn.Module or base.__module__.startswith("normkit.") else base


def _must_be_torchs(site: Site) -> list[str]:
    """Skip a layer that computes something of its own in training, unless it evaluates; return remarks."""
    beyond = site.layer._beyond_torch() if isinstance(site.layer, NormLayer) else None
    if beyond is None:
        return ["the same function"]
    if site.layer.training:
        raise Skip(
            f"in training it has {beyond}, and torch has no class with that; call eval() first if evaluation is all "
            "that is needed"
        )
    return [f"evaluation is the same; in training it would lose {beyond}"]


def _made(kind: type[nn.Module], site: Site) -> nn.Module:
    """A layer of torch's with the options of ours, in its initial state."""
    layer, taken = site.layer, inspect.signature(kind).parameters
    options = {name: getattr(layer, name) for name in taken if name not in _DECIDED and hasattr(layer, name)}
    has_affine = site.spec.affine is not False
    stores = stored_moments(layer) is not None
    decided = {"affine": has_affine, "elementwise_affine": has_affine, "track_running_stats": stores}
    options |= {name: value for name, value in decided.items() if name in taken}
    if "device" in taken:
        options |= place_and_type(layer)
    return with_parts(kind(**options), site)


def _options_of_calls(
    model: nn.Module, norms: Sequence[Norm], example: Any, forward: Forward | None
) -> dict[int, list[str]]:
    """The keyword arguments that each norm is called with on the example; none without an example."""
    seen: dict[int, dict[str, None]] = {id(norm.layer): {} for norm in norms}

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[id(layer)].update({f"{name}=": None for name in kwargs if name != "input"})

    if example is not None:
        with untouched(model), in_evaluation(model), hooked(before=[(norm.layer, record) for norm in norms]):
            run_example(model, example, forward)
    return {key: list(names) for key, names in seen.items()}
