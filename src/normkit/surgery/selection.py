"""Which layers a verb works on: `only=` and `skip=`, by the names of layers or by shell patterns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from normkit.errors import ArgumentError, did_you_mean
from normkit.named_layers import named_layers

Patterns = str | Iterable[str]


class Selection:
    """The layers that `only=` and `skip=` leave to a verb; without them, all.

    A pattern is the name of a layer, as `named_modules()` has it, or a shell pattern (fnmatch). It also takes all that
    is inside the layers it fits. A layer that several parents share can be called by any of its names.
    """

    def __init__(self, model: nn.Module, only: Patterns | None = None, skip: Patterns | None = None) -> None:
        self._only = None if only is None else _patterns("only", only)
        self._skip = () if skip is None else _patterns("skip", skip)
        if self._only == ():
            raise ArgumentError("only= needs a name or a pattern; got none. Leave it out to take all layers.")
        self._names = _names(model) if self._only or self._skip else {}
        every = [name for names in self._names.values() for name in names]
        for argument, patterns in (("only", self._only or ()), ("skip", self._skip)):
            for pattern in patterns:
                _must_fit(argument, pattern, every, "layer of this model")

    @property
    def has_only(self) -> bool:
        """Whether the caller chose layers, and not all but some."""
        return self._only is not None

    def among(self, layers: Collection[str], what: str = "norm of this model") -> set[str]:
        """Those of these layers that are taken; an error if one of the patterns of `only=` takes none of them."""
        if self._only is None:
            return {name for name in layers if not self._takes(self._skip, name)}
        every = [name for layer in layers for name in self._names[layer]]
        for pattern in self._only:
            _must_fit("only", pattern, every, what)
        return {name for name in layers if self._takes(self._only, name) and not self._takes(self._skip, name)}

    def names(self, layer: str) -> bool:
        """Whether `only=` fits the layer itself, and not just one that it is in."""
        return any(_fits(pattern, name) for pattern in self._only or () for name in self._names[layer])

    def reason(self, layer: str) -> str:
        """Why a layer is not taken."""
        return "skip= names it" if self._takes(self._skip, layer) else "only= does not name it"

    def _takes(self, patterns: Iterable[str], layer: str) -> bool:
        return any(_takes(pattern, name) for pattern in patterns for name in self._names[layer])


def _patterns(argument: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    is_several = isinstance(given, Iterable) and not isinstance(given, bytes | Mapping | Tensor | nn.Module)
    found: tuple[object, ...] = tuple(given) if is_several else (given,)  # type: ignore[arg-type]
    wrong = [one for one in found if not isinstance(one, str)]
    if wrong:
        raise ArgumentError(
            f"{argument}= needs the name of a layer, a shell pattern, or several of them; got a "
            f'{type(wrong[0]).__name__}. Write {argument}="layer1" or {argument}=["layer1", "*.bn2"].'
        )
    return found  # type: ignore[return-value]


def _names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each layer, by the first of them, which is the one that verbs use."""
    first = {id(layer): name for name, layer in named_layers(model)}
    names = {name: [name] for name in first.values()}
    for name, layer in model.named_modules(remove_duplicate=False):
        if name != first[id(layer)]:
            names[first[id(layer)]].append(name)
    return names


def _must_fit(argument: str, pattern: str, names: Collection[str], what: str) -> None:
    if not any(_takes(pattern, name) for name in names):
        raise ArgumentError(f"{argument}={pattern!r} fits no {what}.{did_you_mean(pattern, names)}")


def _takes(pattern: str, name: str) -> bool:
    """Whether a pattern fits a layer, or one that it is in."""
    around = [name[: end.start()] for end in re.finditer(r"[.\[]", name)]  # of "blocks[0].bn": blocks, blocks[0]
    return any(_fits(pattern, one) for one in (name, *around))


def _fits(pattern: str, name: str) -> bool:
    # Brackets are part of names such as blocks[0], and a set of characters in a shell pattern.
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern.replace("[", "[[]"))
