"""How often a call goes through memory, and how many bytes that is: counted operator by operator, not timed.

An operator is taken to read each tensor that it is given, and to write each that it returns, once. What a kernel does
inside is its own affair, so that the figure compares ways to compose the same operators, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ALLOCATE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # memory that nobody touches yet
_OVERWRITE = ("copy_", "fill_", "zero_", "set_")  # whose first argument is written and not read


@dataclass
class Traffic:
    """Operators that read or wrote a tensor of at least so many elements, and the bytes of these tensors."""

    passes: int = 0
    bytes: int = 0
    operators: list[str] = field(default_factory=list)  # one for each pass, in order


class Counter(TorchDispatchMode):
    """Counts what runs inside the block, forward and backward, into `traffic`."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.traffic = Traffic()
        self._least = least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and count it if it touches a large tensor."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _ALLOCATE and not _is_view(func, args, result):
            bytes_ = self._bytes(_read(func, name, args, kwargs or {})) + self._bytes(_tensors(result))
            if bytes_:
                self.traffic.passes += 1
                self.traffic.bytes += bytes_
                self.traffic.operators.append(name)
        return result

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        """The memory of the large tensors among these, each once."""
        sizes = {id(t): _elements(t) * t.itemsize for t in tensors if _elements(t) >= self._least}
        return sum(sizes.values())


def measure(step: Callable[[], object], least: int) -> Traffic:
    """Count the passes of a step over tensors of at least `least` elements, and their bytes."""
    counter = Counter(least)
    with counter:
        step()
    return counter.traffic


def _read(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    takes_shape_alone = name.startswith("new_") or name.endswith("_like")
    given = _tensors(args[1:] if name in _OVERWRITE or takes_shape_alone else args)
    only_written = {a.name for a in func._schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write}
    return [*given, *_tensors([value for key, value in kwargs.items() if key not in only_written])]


def _is_view(func: Any, args: Any, result: Any) -> bool:
    """Whether an operator only describes memory anew: by its schema, or because nothing but the description changed."""
    if func._schema.is_mutable:
        return False
    if any(r.alias_info is not None for r in func._schema.returns):
        return True
    return isinstance(result, Tensor) and any(_shares(result, t) for t in _tensors(args))


def _shares(a: Tensor, b: Tensor) -> bool:
    try:
        return a is b or (a.numel() > 0 and a.untyped_storage()._cdata == b.untyped_storage()._cdata)
    except NotImplementedError:  # tensors without memory of their own
        return False


def _tensors(nested: Any) -> list[Tensor]:
    return [t for t in tree_leaves(nested) if isinstance(t, Tensor)]


def _elements(t: Tensor) -> int:
    """How many elements lie in memory: one that is expanded is there once."""
    if t.layout is not torch.strided:
        return t.numel()
    return prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride != 0 or n == 0)
