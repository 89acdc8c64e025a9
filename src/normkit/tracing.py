"""What surrounds a call: a compiler, an exporter, a transform, or a backward that repeats the forward."""

import torch
from torch import Tensor, compiler
from torch._C import _current_graph_task_id, _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

# By short names: these are asked at every call, and torch's own namespace is so large that each look into it waits for
# memory.


def is_exporting() -> bool:
    """Whether a graph for other programs is being made, by torch.export, an ONNX exporter or torch.jit.trace."""
    # The flag: torch.compiler.is_exporting() is true in everything that torch 2.10 compiles.
    return compiler._is_exporting_flag or _get_tracing_state() is not None


def is_plain(x: Tensor) -> bool:
    """Whether a call is neither compiled nor recorded nor watched, and its input is nothing but a tensor."""
    return (
        type(x) is Tensor
        and not compiler.is_compiling()
        # As `is_exporting` and `is_watched`, without calls of them.
        and not compiler._is_exporting_flag
        and _get_tracing_state() is None
        and peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and _len_torch_dispatch_stack() == 0
    )


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing repeats a batch already counted."""
    return not compiler.is_compiling() and _current_graph_task_id() != -1


def is_transformed(t: Tensor) -> bool:
    """Whether a tensor lives inside a torch.func transform, and must not be kept beyond it."""
    return torch._C._functorch.is_functorch_wrapped_tensor(t)


def is_watched() -> bool:
    """Whether operators are being seen one by one, by torch.func, forward-mode derivatives or a dispatch mode."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0 or _len_torch_dispatch_stack() > 0


def is_transformed_or_dual() -> bool:
    """Whether torch.func or forward-mode derivatives are active: as much of `is_watched` as compilers can follow."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
