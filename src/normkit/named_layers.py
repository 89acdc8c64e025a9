"""All layers of a model, wherever it keeps them, and what to call them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, under the name it has in `named_modules()`.

    After them come the modules that torch does not find because they are in plain lists, tuples and dictionaries:
    "blocks[0]", "heads['a'].bn".
    """
    seen: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        seen[id(module)] = module
        yield name, module
    waiting = list(model.named_modules())
    while waiting:
        name, module = waiting.pop(0)
        for path, hidden in _in_containers(module):
            prefix = f"{name}.{path}" if name else path
            for inner, layer in hidden.named_modules():
                if id(layer) not in seen:
                    seen[id(layer)] = layer
                    found = f"{prefix}.{inner}" if inner else prefix
                    waiting.append((found, layer))
                    yield found, layer


def display_name(name: str) -> str:
    """A layer's name as messages give it: the root's name is empty."""
    return name or "the model itself"


def _in_containers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, value in vars(module).items():
        if not name.startswith("_") and isinstance(value, list | tuple | dict):
            yield from _modules_in(name, value)


def _modules_in(path: str, value: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _modules_in(f"{path}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _modules_in(f"{path}[{key!r}]", item)
