"""A value that compiled code may not compute a second time."""

from typing import cast

import torch
from torch import Tensor

from normkit.tracing import is_exporting


def hold(t: Tensor) -> Tensor:
    """Return a value that a compiled backward keeps and does not compute again.

    A value made from a buffer that the forward then writes to would come out differently the second time. The compiler
    computes it again wherever keeping the buffer takes less memory than keeping the value.
    """
    if not torch.compiler.is_compiling() or is_exporting():
        return t
    from normkit.kernels import compile_ops  # defines operators, which takes time that only this case should pay

    return cast(Tensor, compile_ops.hold(t))
