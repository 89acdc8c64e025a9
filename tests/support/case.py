"""What a row of the table is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

TORCHS = {
    *("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm", "RMSNorm", "GroupNorm"),
    *("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"),
}


@dataclass(frozen=True)
class Case:
    name: str  # of the public class
    build: Callable[..., nn.Module]
    shape: tuple[int, ...]  # of an input
    formula: Callable[[nn.Module, Any], Any]  # the paper's, in numpy's longest float, sharing no code with us
    twin: Callable[..., nn.Module] | None = None  # torch's layer of the same function and state
    option: str = ""
    free: tuple[int, ...] = field(default=())  # dimensions of the input that may have any size
    exact: bool = True  # whether only the last rounding shows; not where a convolution does the work
    stops_gradient: bool = False  # by the paper, so that its gradient is not its output's derivative

    def __str__(self) -> str:
        return f"{self.name}-{self.option}" if self.option else self.name

    @property
    def is_ordinary(self) -> bool:
        """Whether the ordinary run takes it: all rows of torch's own layers, and one of each other, that of maps."""
        if self.name in TORCHS:
            return True
        return not self.option and not self.name.endswith(("1d", "3d"))

    def layer(self, dtype: torch.dtype = torch.float32, training: bool = True) -> nn.Module:
        return randomize_(self.build()).to(dtype).train(training)

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

    def slack(self, expected: Tensor, dtype: torch.dtype = torch.float32) -> float:
        """What the sums of a convolution in this type may be off by, beyond the last rounding; nothing elsewhere."""
        return 0.0 if self.exact else 4 * torch.finfo(dtype).eps * expected.detach().abs().max().item()


def state_tensors(layer: nn.Module):
    """The floating point state; for a layer without any, one tensor of torch's default type."""
    found = [t for t in layer.state_dict().values() if t.is_floating_point()]
    return iter(found or [torch.zeros(0)])


def taking_part(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the layer's mode uses: auxiliary norms are for training."""
    own = dict(layer.named_parameters())
    return own if layer.training else {name: p for name, p in own.items() if not name.startswith("aux_bn.")}


def randomize_(layer: nn.Module) -> nn.Module:
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
