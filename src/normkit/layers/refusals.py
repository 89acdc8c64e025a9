"""Refusals of what tools of torch and of other libraries would do to a layer without a word, or cannot do at all."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from normkit.errors import UnsupportedError


class OwnFunction(nn.Module):
    """What a layer does beyond the torch class it derives from, as a child that no other module can take.

    Converters to SyncBatchNorm, torch's, timm's and apex's, make a new layer from the numbers of the old one and hand
    it the children of the old one, which it never runs. A layer names this one among its children, but does not hold
    it: it is in no `named_modules()`, repr or state_dict.
    """

    def __init__(self, layer: str, beyond: str) -> None:
        super().__init__()
        self.layer, self.beyond = layer, beyond


def _refuse_to_move(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if type(child) is OwnFunction:
        raise UnsupportedError(
            f"{child.layer} has {child.beyond}, which a {type(parent).__name__} of {type(parent).__module__} has not: "
            'the model would compute something else. Use nk.convert(model, "sync"), which says what it keeps, or '
            'nk.convert(model, classes="torch") before other tools.'
        )


register_module_module_registration_hook(_refuse_to_move)


_FUSIONS = "torch.ao.quantization.fuser_method_mappings"
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_refused: set[type[nn.Module]] = set()


def refuse_fusion(kind: type[nn.Module]) -> None:
    """Have torch.ao's `fuse_modules`, which knows torch's classes by their types, refuse this one and say what to do.

    Its table is there when somebody has imported it: a layer asks when it is made, copied or unpickled, and
    `fuse_modules` begins with a copy.
    """
    fusions = sys.modules.get(_FUSIONS)
    if fusions is None or kind in _refused:
        return
    _refused.add(kind)
    table = getattr(fusions, "_DEFAULT_OP_LIST_TO_FUSER_METHOD", {})
    for types in list(table):
        ours = tuple(kind if part in _NORMS and issubclass(kind, part) else part for part in types)
        table.setdefault(ours, _no_fusion)


def _no_fusion(is_qat: bool, *layers: nn.Module) -> nn.Module:
    ours = next(type(layer) for layer in layers if isinstance(layer, _NORMS))
    raise UnsupportedError(
        f"torch.ao.quantization fuses layers of torch's own classes; got a {ours.__name__} of {ours.__module__}. Turn "
        'the norms into torch\'s first: nk.convert(model, classes="torch").'
    )


class Unscriptable(nn.Module):
    """A module that torch.jit.script is told to leave alone: its language has no words for what our layers do."""

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse: torch.jit.script asks every module for what it is to compile."""
        raise UnsupportedError(
            f"torch.jit.script cannot compile {type(self).__name__}. Record the model with torch.jit.trace instead, or "
            'turn its norms into torch\'s own first: nk.convert(model, classes="torch").'
        )
