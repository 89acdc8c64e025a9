"""The deep linear net of Santurkar et al. 2018: square matrices in a row, and nothing between them but norms."""

from __future__ import annotations

from torch import nn

from normkit.lab.models.initial import InitName, initialized
from normkit.lab.models.units import Finish, Norm, unit


def deep_linear(
    norm: Norm | None, *, layers: int = 25, width: int = 10, init: InitName | None = "glorot"
) -> nn.Sequential:
    """Return matrices of width x width without biases, each but the last followed by the norm if there is one.

    The paper does not say whether the last is followed by one too. Here it is not, as in classifiers.
    """
    finish = Finish(norm, None)
    hidden = (unit(nn.Linear(width, width, bias=False), width, finish) for _ in range(layers - 1))
    return initialized(nn.Sequential(*hidden, nn.Linear(width, width, bias=False)), init, 1.0)
