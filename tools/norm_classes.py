"""What `describe` makes of the norm classes of other libraries, checked against what they compute.

    python tools/norm_classes.py [transformers] [timm]

Walks the modules of each package, builds every class that is called a norm from a size, or from nothing, gives it
random state, and compares its outputs with the formula that its description stands for. A class is right if they agree,
wrong if they do not, and missed if it has no description. Classes that need more than a size, or that do not make
a tensor of one of the same shape, are not counted.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

import normkit as nk

SIZE = 24
SHAPES = [(2, 5, SIZE), (2, 3, 4, SIZE), (2, SIZE, 3, 4), (2, SIZE, 5)]
TOLERANCE = 1e-5  # relative to the largest output, in float32
# Sizes of inputs, over their usual one: at the smallest the eps of every norm shows.
SCALES = (1.0, 3e-2, 1e-3)

Outcome = Literal["right", "wrong", "missed"]
Family = Literal["RMSNorm", "LayerNorm", "other"]


class Judged(NamedTuple):
    """A class, what its name says that it is, what `describe` says, and whether that is so."""

    name: str
    family: Family
    spec: nk.NormSpec | None
    outcome: Outcome


def judged(package: str) -> list[Judged]:
    """Every class of a package that is called a norm and can be built from a size."""
    found = [one for kind in norm_classes(package) if (one := judge(kind)) is not None]
    return sorted(found, key=lambda one: (one.family, one.name))


def norm_classes(package: str) -> Iterator[type[nn.Module]]:
    """The modules of a package that have "norm" in their names, each where it is defined."""
    for name in _modules(package):
        try:
            module = importlib.import_module(name)
        except Exception:  # a model that needs a package which is not there
            continue
        for kind in vars(module).values():
            is_layer = inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == name
            if is_layer and re.search("norm", kind.__name__, re.IGNORECASE):
                yield kind


def _modules(package: str) -> list[str]:
    """The modules whose text defines a class that is called a norm: only these are imported."""
    root = importlib.import_module(package)
    found = [package]
    for one in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda name: None):
        if ".modular_" in one.name:  # what transformers makes its modeling files from
            continue
        path = Path(getattr(one.module_finder, "path", ""), f"{one.name.rpartition('.')[2]}.py")
        if path.is_file() and re.search(r"^class \w*norm\w*\(", path.read_text(), re.IGNORECASE | re.MULTILINE):
            found.append(one.name)
    return found


def judge(kind: type[nn.Module]) -> Judged | None:
    """Build a class and compare it with its description; None if it cannot be built, or does not map one tensor."""
    layer = built(kind)
    x = None if layer is None else input_of(layer)
    if layer is None or x is None:
        return None
    spec = nk.describe(layer)
    outcome: Outcome = "missed" if spec is None else "right" if agrees(layer, spec, x) else "wrong"
    return Judged(f"{kind.__module__}.{kind.__name__}", _family(kind), spec, outcome)


def _family(kind: type[nn.Module]) -> Family:
    if re.search("rms_?norm", kind.__name__, re.IGNORECASE):
        return "RMSNorm"
    return "LayerNorm" if re.search("layer_?norm", kind.__name__, re.IGNORECASE) else "other"


def built(kind: type[nn.Module]) -> nn.Module | None:
    """A layer of the class, of random state, in evaluation."""
    for arguments in ((SIZE,), ()):
        try:
            layer = kind(*arguments)
        except Exception:
            continue
        if any(child.state_dict() for child in layer.children()):  # a block with a norm in its name
            return None
        return _randomized(layer).eval()
    return None


@torch.no_grad()
def _randomized(layer: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if tensor.is_floating_point():
            drawn = torch.rand(tensor.shape, generator=generator) + 0.5
            tensor.copy_(drawn if name.endswith("var") else drawn - 0.8)
    return layer


@torch.no_grad()
def input_of(layer: nn.Module) -> Tensor | None:
    """An input of which the layer makes a tensor of the same shape; None if it takes none of those tried."""
    generator = torch.Generator().manual_seed(1)
    for shape in SHAPES:
        x = torch.randn(shape, generator=generator) + 0.4
        try:
            y = layer(x.clone())
        except Exception:
            continue
        if isinstance(y, Tensor) and y.shape == x.shape:
            return x
    return None


@torch.no_grad()
def agrees(layer: nn.Module, spec: nk.NormSpec, x: Tensor) -> bool:
    """Whether a layer computes what a description stands for, and then its activation, on inputs of several sizes."""
    for scale in SCALES:
        expected = formula(layer, spec, (scale * x).double())
        for child in layer.children():
            expected = child(expected)
        actual = layer(scale * x).double()
        if not (actual - expected).abs().max() <= TOLERANCE * expected.abs().max():
            return False
    return True


def formula(layer: nn.Module, spec: nk.NormSpec, x: Tensor) -> Tensor:
    """What a norm of this description makes of an input, written out."""
    if spec.uses == "stored":
        return _stored(layer, x, 1e-5 if spec.eps is None else spec.eps)
    grouped = x.unflatten(1, (spec.num_groups, -1)) if spec.kind == "group" else x
    over = _over(spec, grouped)
    center = grouped.mean(over, keepdim=True) if spec.subtracts_mean else torch.zeros_like(grouped)
    eps = torch.finfo(torch.float32).eps if spec.eps is None else spec.eps
    y = (grouped - center) / (((grouped - center) ** 2).mean(over, keepdim=True) + eps) ** 0.5
    y = y.reshape(x.shape)
    gammas = [-1] if spec.is_over_last else _second(x)
    weight, bias = (getattr(layer, name, None) for name in spec.names)
    if spec.affine in (True, "scale"):
        y = y * (weight.double() + spec.weight_offset).reshape(gammas)
    return y + bias.double().reshape(gammas) if spec.affine in (True, "shift") else y


def _over(spec: nk.NormSpec, x: Tensor) -> tuple[int, ...]:
    """The dimensions that share statistics."""
    if spec.kind in ("group", "instance"):
        return tuple(range(2, x.dim()))
    if spec.kind == "batch":
        return tuple(d for d in range(x.dim()) if d != 1)
    return (1,) if spec.channels_first else (x.dim() - 1,)


def _second(x: Tensor) -> list[int]:
    """The shape of one value for each channel of the second dimension."""
    return [1, -1] + [1] * (x.dim() - 2)


def _stored(layer: nn.Module, x: Tensor, eps: float) -> Tensor:
    found = [getattr(layer, name) for name in ("running_mean", "running_var", "weight", "bias")]
    mean, var, weight, bias = (tensor.double().reshape(_second(x)) for tensor in found)
    return (x - mean) / (var + eps).sqrt() * weight + bias


def main(packages: list[str]) -> None:
    """Print a table for each package."""
    warnings.simplefilter("ignore")
    for package in packages:
        found = judged(package)
        print(f"\n{package} {importlib.import_module(package).__version__}: {len(found)} classes\n")
        print("| called | right | wrong | missed | described as |\n|---|---|---|---|---|")
        for family in ("RMSNorm", "LayerNorm", "other"):
            own = [one for one in found if one.family == family]
            counts = Counter(one.outcome for one in own)
            kinds = Counter(_words(one.spec) for one in own if one.spec is not None)
            listed = ", ".join(f"{count} {words}" for words, count in kinds.most_common())
            print(f"| {family} | {counts['right']} | {counts['wrong']} | {counts['missed']} | {listed} |")
        for one in found:
            if one.outcome != "right":
                print(f"\n{one.outcome}: {one.name}", end="")
        print()


def _words(spec: nk.NormSpec) -> str:
    extras = [
        "1 + weight" if spec.weight_offset else "",
        "channels first" if spec.channels_first else "",
        "no gamma" if spec.affine is False else "",
    ]
    return " ".join(filter(None, [spec.kind, f"({', '.join(filter(None, extras))})" if any(extras) else ""]))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    if "timm" in sys.argv[1:]:
        from support import aside  # noqa: F401  # where timm is
    main(sys.argv[1:] or ["transformers"])
