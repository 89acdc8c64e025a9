"""What was found wrong with a model, in words and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from normkit.named_layers import display_name

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One fault of one layer.

    Attributes:
        code: such as "NK501"; its meaning never changes.
        name: the fault that the code stands for: "training-mode-export".
        severity: "error" (results are wrong), "warning" (it is likely costing you) or "info".
        layer: the layer's name in the model, "" for the root, None if no layer can be named.
        message: what is wrong, and why.
        evidence: the numbers that show it.
        remedy: what to do.
    """

    code: str
    name: str
    severity: Severity
    layer: str | None
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""

    def __str__(self) -> str:
        where = "" if self.layer is None else f"{display_name(self.layer)}: "
        return f"{self.code} {self.name}: {where}{self.message} {self.remedy}".rstrip()
