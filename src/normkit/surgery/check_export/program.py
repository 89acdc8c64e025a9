"""An ExportedProgram of torch.export, read and run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from normkit.surgery.check_export.fx_graph import FxGraph
from normkit.surgery.check_export.fx_graph import arguments_of as arguments_of
from normkit.surgery.check_export.fx_graph import trains as trains


class ProgramGraph(FxGraph):
    """The graph of an exported program, whose tensors are inputs of it."""

    what = "the exported program"
    is_trainable = False

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program.graph_module)
        self._program = program
        signature = program.graph_signature
        self._tensor_names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}

    def written(self) -> set[str]:
        """Buffers that an operator writes in place, or that the program returns for an update."""
        return super().written() | set(self._program.graph_signature.buffers_to_mutate.values())

    def runner(self) -> nn.Module:
        """The program as a module. It may share its tensors with the model it was made from."""
        return self._program.module()

    def _name(self, value: Any) -> str | None:
        return self._tensor_names.get(value.name) if isinstance(value, fx.Node) else None

    def _held(self) -> Mapping[str, Tensor]:
        held: dict[str, Tensor] = self._program.state_dict
        return held
