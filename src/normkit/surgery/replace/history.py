"""What a layer was before: kept in the layer itself, so that it can become that again.

The records are plain tuples and dictionaries, which are copied and pickled with the layer, and which do not appear in
its state_dict.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.surgery.norms import STATISTICS

Former = dict[str, Any]


def formers(layer: nn.Module) -> tuple[Former, ...]:
    """Records of what the layer was, the latest first."""
    found: tuple[Former, ...] = vars(layer).get("_former", ())
    return found


def remember(new: nn.Module, old: nn.Module, with_tensors: bool) -> None:
    """Record in the new layer what the old one was: class, options, children and, on request, its tensors.

    Of each class only the latest record is kept, so that conversions back and forth do not pile up.
    """
    earlier = [former for former in formers(old) if former["class"] is not type(new)]
    if not with_tensors:
        earlier = [former | {"parameters": {}, "buffers": {}} for former in earlier]
    latest = [] if type(old) is type(new) else [_record(old, with_tensors)]
    vars(new)["_former"] = (*latest, *earlier)


def _record(layer: nn.Module, with_tensors: bool) -> Former:
    inside = {"_parameters", "_buffers", "_modules", "_former", "training"}
    parameters = {name: (p, p is not None and p.requires_grad) for name, p in layer._parameters.items()}
    return {
        "class": type(layer),
        "attributes": {name: value for name, value in vars(layer).items() if name not in inside and "hook" not in name},
        "children": dict(layer._modules),
        "parameters": parameters if with_tensors else {},
        "buffers": dict(layer._buffers) if with_tensors else {},
    }


def recalled(layer: nn.Module) -> nn.Module | None:
    """A layer of the class that this one was, in the state of this one; None if it has no record.

    The parameters and buffers are the objects of that time with the values of today.
    """
    if not formers(layer):
        return None
    former, *earlier = formers(layer)
    old: nn.Module = former["class"].__new__(former["class"])
    nn.Module.__init__(old)
    vars(old).update(former["attributes"])
    old._modules.update(former["children"])
    for name in former["parameters"]:
        old._parameters[name] = parameter_of(layer, name)
    for name, buffer in former["buffers"].items():
        old._buffers[name] = _updated(buffer, getattr(layer, name)) if name in STATISTICS else buffer
    for name in ("eps", "momentum"):
        setattr(old, name, getattr(layer, name))
    if earlier:
        vars(old)["_former"] = tuple(earlier)
    return old


def parameter_of(layer: nn.Module, name: str) -> nn.Parameter | None:
    """A layer's gamma or beta as a parameter: its own, or the one it had before it was frozen, with its new value."""
    value: Tensor | None = getattr(layer, name, None)
    if value is None or isinstance(value, nn.Parameter):
        return value
    for former in formers(layer):
        before, trainable = former["parameters"].get(name, (None, True))
        if before is not None:
            return _updated(before, value).requires_grad_(trainable)  # type: ignore[no-any-return]
    return nn.Parameter(value.detach().clone())


@torch.no_grad()
def _updated(before: Any, value: Tensor) -> Any:
    """The earlier tensor with a new value, its dtype and device; nothing is written where nothing changed."""
    if before is None or (before.dtype, before.device, before.shape) != (value.dtype, value.device, value.shape):
        if not isinstance(before, nn.Parameter):
            return value
        before.data = value.detach().clone()
    elif not torch.equal(before, value):
        before.copy_(value)
    return before
