"""A module of another library that may be a norm: whether it may be tried, and a copy of it to try.

A copy has no hooks, shares nothing that its forward may change, and has random values in the place of its parameters:
defaults hide what a layer does to them.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normkit.batches import required_arguments

_TORCHS_OWN = frozenset(vars(nn.Module()))  # what every module has: its tensors, children, hooks and mode
_MOST_TENSORS = 4
_LARGEST = 1 << 15  # of more values the biased variance is too close to the unbiased one to tell them apart
_LARGEST_EPS = 1e-2

State = dict[str, Tensor]


def may_be_tried(module: nn.Module) -> bool:
    """Whether a module may be a norm, and running a copy of it is cheap and has no effect on anything else.

    It has no parameters besides vectors of one size, no children with any, and a forward that needs one argument.
    """
    if type(module).__module__.startswith(("torch.", "normkit.")) or "forward" in vars(module):
        return False
    if any(child._parameters or child._buffers or child._modules for child in module.children()):
        return False
    return _has_a_norms_state(module) and len(required_arguments(module)) == 1


def state_of(module: nn.Module) -> State:
    """A module's own parameters and buffers."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _has_a_norms_state(module: nn.Module) -> bool:
    state = state_of(module).values()
    if any(isinstance(value, Tensor) for value in vars(module).values()):  # other code computes it
        return False
    if not state:
        return _hints_at_a_norm(module)
    are_vectors = len(state) <= _MOST_TENSORS and all(map(_is_vector, state))
    return are_vectors and len({tensor.numel() for tensor in state}) == 1


def _is_vector(tensor: Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_meta or not tensor.is_floating_point():
        return False
    return tensor.dim() == 1 and 1 < tensor.numel() <= _LARGEST


def _hints_at_a_norm(module: nn.Module) -> bool:
    """Whether a module without tensors has something like an eps, or "norm" in its names: most have neither."""
    has_eps = any(0 < value <= _LARGEST_EPS for value in numbers_in(module, float))
    names = [type(module).__name__, *(name for name in vars(module) if name not in _TORCHS_OWN)]
    return has_eps or any("norm" in name.lower() for name in names)


def numbers_in(module: nn.Module, kind: type[int] | type[float]) -> list[Any]:
    """The numbers of one type among a module's attributes, also those that are alone in a tuple or list."""
    found = [value for name, value in vars(module).items() if name not in _TORCHS_OWN]
    single = [value[0] if isinstance(value, tuple | list) and len(value) == 1 else value for value in found]
    return [value for value in single if type(value) is kind]


def sizes_of(module: nn.Module) -> list[int | None]:
    """How many channels a module may take: that of its vectors, or any (None), or one of its attributes."""
    state = state_of(module).values()
    if state:
        return [next(iter(state)).numel()]
    return [None, *dict.fromkeys(size for size in numbers_in(module, int) if 1 < size <= _LARGEST)]


def any_size(module: nn.Module) -> int:
    """A number of channels that is none of a module's attributes, so that it takes it only if it takes any."""
    taken = numbers_in(module, int)
    return next(size for size in range(12, 64) if size not in taken)


def device_of(module: nn.Module) -> torch.device:
    """The device that a module computes on."""
    return next((tensor.device for tensor in state_of(module).values()), torch.device("cpu"))


def bare_copy(module: nn.Module, state: State, *, with_children: bool) -> nn.Module:
    """A copy with other tensors, in evaluation; without its children, modules that do nothing are in their place."""
    twin: nn.Module = type(module).__new__(type(module))
    nn.Module.__init__(twin)
    vars(twin).update({name: _unshared(value) for name, value in vars(module).items() if name not in _TORCHS_OWN})
    for name, parameter in module._parameters.items():
        twin._parameters[name] = None if parameter is None else nn.Parameter(state[name])
    for name, buffer in module._buffers.items():
        twin._buffers[name] = None if buffer is None else state[name].clone()
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _child(child, with_children)
    return twin.eval()


def _child(child: nn.Module, is_copied: bool) -> nn.Module:
    return bare_copy(child, {}, with_children=True) if is_copied else nn.Identity()


def _unshared(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def fingerprint(module: nn.Module) -> Hashable | None:
    """All that the function of a module depends on, but the values of its tensors; None if that cannot be told."""
    try:
        own = tuple(sorted((name, _plain(v)) for name, v in vars(module).items() if name not in _TORCHS_OWN))
    except TypeError:
        return None
    tensors = tuple((name, tensor.shape, tensor.device) for name, tensor in state_of(module).items())
    children = tuple((name, type(child), fingerprint(child)) for name, child in module.named_children())
    is_told = all(told is not None for _, _, told in children)
    return (type(module).forward, own, tensors, children) if is_told else None


def _plain(value: Any) -> Hashable:
    """A value that can be compared with another module's; raise TypeError if it cannot."""
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(map(_plain, value))
    known = int | float | str | bytes | torch.dtype | torch.device | type | FunctionType | BuiltinFunctionType
    if value is None or isinstance(value, known):
        return type(value).__name__, value
    raise TypeError
