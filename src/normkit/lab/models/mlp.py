"""The sigmoid net of section 4.1 (Ioffe & Szegedy 2015)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from normkit.lab.models.initial import initialized
from normkit.lab.models.units import Finish, Norm, unit


class SigmoidMLP(nn.Module):
    """Hidden layers of `layer`, `norm` and `activation`, and an `output` that is never normalized.

    The input of the last hidden layer's sigmoid, figure 1 (b, c), is the argument of `hidden[-1].activation`.
    """

    hidden: nn.Sequential
    output: nn.Linear

    def __init__(self, norm: Norm | None, inputs: int, hidden: Sequence[int], classes: int) -> None:
        super().__init__()
        sizes = [inputs, *hidden]
        finish = Finish(norm, nn.Sigmoid)  # always a module of its own, so that a hook can read its input
        self.hidden = nn.Sequential(*(_hidden(*pair, finish) for pair in pairwise(sizes)))
        self.output = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images of any shape."""
        return self.output(self.hidden(x.flatten(1)))  # type: ignore[no-any-return]


def _hidden(inputs: int, outputs: int, finish: Finish) -> nn.Sequential:
    return unit(nn.Linear(inputs, outputs, bias=finish.bias), outputs, finish)


def sigmoid_mlp(
    norm: Norm | None = None,
    inputs: int = 784,
    hidden: Sequence[int] = (100, 100, 100),
    classes: int = 10,
    std: float | None = 0.1,
) -> SigmoidMLP:
    """Return the paper's MNIST net, with the norm directly before each sigmoid.

    Weights are Gaussians of standard deviation `std`, which the paper leaves open ("small"); biases are zero. With None
    they are left to a later `initialize_`.
    """
    model = SigmoidMLP(norm, inputs, hidden, classes)
    return model if std is None else initialized(model, "gaussian", std)
