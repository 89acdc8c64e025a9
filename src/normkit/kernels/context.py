"""What is going on around a call: who will run what is being recorded, and whether it ran before."""

import torch


def is_exporting() -> bool:
    """Whether a graph for other programs is being made, by torch.export, an ONNX exporter or torch.jit.trace."""
    return torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing repeats a batch already counted."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
