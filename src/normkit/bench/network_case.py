"""A network that others wrote, as it is and with its norms converted to ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit.bench.case import EAGER, OURS, Case, Effort, Result, over_ours
from normkit.bench.model_case import Shape4, seeded_images, training_step
from normkit.bench.spread import Spread
from normkit.bench.timing import Step, interleave, prepare
from normkit.errors import MissingExtraError, NormkitError
from normkit.surgery import convert


class NothingConvertedError(NormkitError, RuntimeError):
    """A network of which no norm became ours, so that it would be compared with itself."""


@dataclass(frozen=True)
class Network:
    """A network of another package: how it is built for images of one size, and which of its norms become ours."""

    name: str
    package: str
    build: Callable[[int], nn.Module]
    norms: Literal["batch", "layer"] = "batch"


@dataclass(frozen=True)
class NetworkCase:
    """A training step or an evaluation of a network, before and after `nk.convert`."""

    family: str
    network: Network
    size: int
    batch: int
    mode: Literal["training", "evaluation"]
    quick: bool = False

    @property
    def name(self) -> str:
        """The network, the images and the mode."""
        mode = "" if self.mode == "training" else f" {self.mode}"
        return f"{self.network.name}{mode} {self.size}x{self.size} batch {self.batch}"

    def measure(self, effort: Effort) -> Result:
        """Time the network as it is and converted, interleaved."""
        changed: list[int] = []
        builds: dict[str, Callable[[], nn.Module]] = {OURS: partial(self._converted, changed), EAGER: self._built}
        steps, errors = prepare({name: partial(self._step, build) for name, build in builds.items()})
        seconds = interleave(steps, effort.model_rounds)
        return Result(
            self.family,
            self.name,
            torch.get_num_threads(),
            self.facts() | {"converted": sum(changed)},
            effort.model_rounds,
            {name: Spread.of(values) for name, values in seconds.items()},
            over_ours(seconds),
            errors=errors,
        )

    def facts(self) -> dict[str, Any]:
        """What the case is, for those who pick cases by it."""
        return {"network": self.network.name, "shape": list(self._shape), "mode": self.mode}

    @property
    def _shape(self) -> Shape4:
        return (self.batch, 3, self.size, self.size)

    def _built(self) -> nn.Module:
        model = _Logits(self.network.build(self.size))
        if self.mode == "evaluation":
            settle_(model, seeded_images(self._shape))
        return model

    def _converted(self, changed: list[int]) -> nn.Module:
        surgery = convert(self._built(), self.network.norms)
        if not surgery.changed:
            raise NothingConvertedError(f"{self.network.name} has no norm that convert makes {self.network.norms!r}.")
        changed.append(len(surgery.changed))
        return surgery.model

    def _step(self, build: Callable[[], nn.Module]) -> Step:
        if self.mode == "training":
            return training_step(build, self._shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build().eval()
        return partial(_evaluate, model, seeded_images(self._shape))


class _Logits(nn.Module):
    """A network whose output is a tensor, also where the package returns an object that holds it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        output = self.model(images)
        return output if isinstance(output, Tensor) else output.logits


@torch.no_grad()
def settle_(model: nn.Module, images: Tensor) -> None:
    """Give every BatchNorm the statistics of these images.

    With the initial ones, values grow or fall from layer to layer, down to those that processors are slow with.
    """
    norms = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    try:
        model.train()(torch.cat([images, images.flip(-1)]))  # two at least, or some layers would have a single value
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


def _evaluate(model: nn.Module, images: Tensor) -> None:
    with torch.no_grad():
        model(images)


def check_installed(cases: list[Case]) -> None:
    """Refuse networks whose packages are missing, before hours of measuring."""
    packages = {case.network.package for case in cases if isinstance(case, NetworkCase)}
    missing = sorted(package for package in packages if find_spec(package) is None)
    if missing:
        raise MissingExtraError(
            f'The family of networks needs {" and ".join(sorted(packages))}, with normkit\'s extra "dev"; '
            f"{' and '.join(missing)} cannot be imported. Install them in a clone: "
            "pip install --no-deps -r tests/architectures.txt."
        )
