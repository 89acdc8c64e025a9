"""One row per layer (and per option that changes its arithmetic). Every conformance test runs over all rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import formulas
import normkit as nk


@dataclass(frozen=True)
class Case:
    name: str  # of the public class
    build: Callable[..., nn.Module]
    shape: tuple[int, ...]  # of an input
    formula: Callable[[nn.Module, Any], Any]  # the paper's, in numpy's longest float, sharing no code with us
    twin: Callable[..., nn.Module] | None = None  # torch's layer of the same function and state
    option: str = ""
    free: tuple[int, ...] = field(default=())  # dimensions of the input that may have any size

    def __str__(self) -> str:
        return f"{self.name}-{self.option}" if self.option else self.name

    def layer(self, dtype: torch.dtype = torch.float32, training: bool = True) -> nn.Module:
        return randomise_(self.build()).to(dtype).train(training)

    def torch_layer(self, layer: nn.Module) -> nn.Module:
        """Torch's twin, in the state of `layer`."""
        assert self.twin is not None
        twin = self.twin().to(next(state_tensors(layer)).dtype).train(layer.training)
        twin.load_state_dict(layer.state_dict())
        return twin

    def input(
        self,
        dtype: torch.dtype = torch.float32,
        mean: float = 0.3,
        std: float = 1.3,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        return (torch.randn(shape or self.shape, dtype=torch.float64) * std + mean).to(dtype)


def state_tensors(layer: nn.Module):
    """The floating point state; for a layer without any, one tensor of torch's default type."""
    found = [t for t in layer.state_dict().values() if t.is_floating_point()]
    return iter(found or [torch.zeros(0)])


def randomise_(layer: nn.Module) -> nn.Module:
    """Give every parameter and buffer a value that no default has: defaults hide faults."""
    with torch.no_grad():
        for name, t in layer.state_dict().items():
            if not t.is_floating_point():
                t.random_(1, 7)
            elif name.endswith("var"):
                t.uniform_(0.5, 2.0)
            else:
                t.normal_(0.2, 0.8)
    return layer


def batch_row(cls_name: str, shape: tuple[int, ...], option: str = "", *, twin: Any = None, **options: Any) -> Case:
    ours, theirs = getattr(nk, cls_name), getattr(nn, cls_name)
    if twin is None and "activation" not in options and options.get("affine", True) in (True, False):
        twin = lambda: theirs(shape[1], **options)  # noqa: E731
    return Case(
        cls_name,
        lambda: ours(shape[1], **options),
        shape,
        formulas.batch_norm,
        twin or None,
        option,
        free=(0, *range(2, len(shape))),
    )


def position_row(option: str = "", **options: Any) -> Case:
    return Case(
        "PositionBatchNorm2d",
        lambda: nk.PositionBatchNorm2d(3, 4, 5, **options),
        (6, 3, 4, 5),
        formulas.batch_norm,
        option=option,
        free=(0,),
    )


CASES = [
    batch_row("BatchNorm1d", (8, 5), "rows"),
    batch_row("BatchNorm1d", (6, 5, 7)),
    batch_row("BatchNorm2d", (4, 5, 6, 7)),
    batch_row("BatchNorm3d", (3, 4, 3, 4, 5)),
    position_row(),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "eps", eps=0.03, momentum=0.37),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "cumulative", momentum=None),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "untracked", track_running_stats=False),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "no-affine", affine=False),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "scale", affine="scale", twin=lambda: nn.BatchNorm2d(5, bias=False)),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "shift", affine="shift"),
    batch_row("BatchNorm1d", (6, 5, 7), "relu", activation="relu"),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "leaky_relu", activation="leaky_relu"),
    batch_row("BatchNorm3d", (3, 4, 3, 4, 5), "silu", activation="silu"),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "gelu", activation="gelu"),
    batch_row("BatchNorm1d", (8, 5), "rows-sigmoid", activation="sigmoid"),
    batch_row("BatchNorm2d", (4, 5, 6, 7), "tanh-scale", activation="tanh", affine="scale"),
    position_row("relu-shift", activation="relu", affine="shift", momentum=None),
]

TWINS = [case for case in CASES if case.twin is not None]
