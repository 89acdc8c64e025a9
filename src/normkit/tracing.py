"""What surrounds a call: a compiler, an exporter, a transform, or a backward that repeats the forward."""

import torch
from torch import Tensor


def is_exporting() -> bool:
    """Whether a graph for other programs is being made, by torch.export, an ONNX exporter or torch.jit.trace."""
    # The flag: torch.compiler.is_exporting() is true in everything that torch 2.10 compiles.
    return torch.compiler._is_exporting_flag or torch._C._get_tracing_state() is not None


def is_plain(x: Tensor) -> bool:
    """Whether a call is not being compiled, and its input is nothing but a tensor."""
    return type(x) is Tensor and not torch.compiler.is_compiling()


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing repeats a batch already counted."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def is_ordinary() -> bool:
    """Whether a call that is not being compiled is neither traced nor watched."""
    return torch._C._get_tracing_state() is None and not is_watched()


def is_transformed(t: Tensor) -> bool:
    """Whether a tensor lives inside a torch.func transform, and must not be kept beyond it."""
    return torch._C._functorch.is_functorch_wrapped_tensor(t)


def is_watched() -> bool:
    """Whether operators are being seen one by one, by torch.func, forward-mode derivatives or a dispatch mode."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
    )


def is_transformed_or_dual() -> bool:
    """Whether torch.func or forward-mode derivatives are active: as much of `is_watched` as compilers can follow."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
