"""A GraphModule of torch.fx, read and run: traced, exported, or prepared for quantization-aware training."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, fx, nn

from normkit.surgery.check_export.exported import ROLES, ExportedNorm
from normkit.surgery.check_export.fx_graph import FxGraph
from normkit.surgery.norms import Norm, norms

# The buffers by which the fake quantizers of torch and torchao are switched on and off.
_SWITCHES = ("fake_quant_enabled", "observer_enabled")


class ModuleGraph(FxGraph):
    """The graph of a module, which holds its tensors and may call layers as well as operators."""

    what = "the graph module"
    is_trainable = True

    def norms(self) -> Iterator[ExportedNorm]:
        """Calls of operators that normalize, and of layers that are norms or have one inside."""
        yield from self.operators()
        called = [node.target for node in self._root.graph.nodes if node.op == "call_module"]
        for norm in norms(self._root):
            if any(f"{norm.name}.".startswith(f"{target}.") for target in called):
                yield _of_layer(norm)

    def runner(self) -> nn.Module:
        """The module; a copy in which nothing is rounded, if it simulates quantization."""
        if not any(name.endswith(_SWITCHES) for name, _ in self._root.named_buffers()):
            return self._root
        precise = copy.deepcopy(self._root)
        for name, switch in precise.named_buffers():
            if name.endswith(_SWITCHES):
                switch.zero_()
        return precise

    def _name(self, value: Any) -> str | None:
        return str(value.target) if isinstance(value, fx.Node) and value.op == "get_attr" else None

    def _held(self) -> Mapping[str, Tensor]:
        return dict(chain(self._root.named_parameters(), self._root.named_buffers()))


def _of_layer(norm: Norm) -> ExportedNorm:
    held = {role: getattr(norm.layer, role, None) for role in ROLES}
    return ExportedNorm(
        norm.name,
        type(norm.layer).__name__,
        norm.spec.eps,
        norm.spec.momentum,
        norm.spec.uses == "batch" and "N" in norm.spec.over,
        {role: value.detach().cpu() for role, value in held.items() if isinstance(value, Tensor)},
    )
