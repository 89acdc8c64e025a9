"""As near to float64 as torch's own layer on the same input, by the bound that all backends keep.

Where torch loses digits, far from zero, the loops are far closer. Where torch's operators run, their error is what the
user gets.
"""

import pytest
import torch
from torch import nn

from support.backends import refuses_loops
from support.bounds import bound_of_any
from support.cases import TWINS

LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def measure(layer, x, dy):
    """Everything one step computes, by name."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    y.backward(dy.to(y.dtype))
    found = {"output": y.detach(), "dx": x.grad}
    found |= {f"d{name}": p.grad for name, p in layer.named_parameters()}
    found |= {name: b for name, b in layer.named_buffers() if b.is_floating_point()}
    return {name: t.double() for name, t in found.items()}


KINDS = {"output": "output", "gradients": "dx", "statistics": "running_var"}  # as the bound calls them


def dtypes(case):
    # Torch's local response norm knows no half precision on CPUs.
    half = () if isinstance(case.build(), nn.LocalResponseNorm) else (torch.bfloat16, torch.float16)
    return (torch.float32, *half)


def layouts(case):
    return ["contiguous", *(["channels_last"] if len(case.shape) in LAYOUTS else [])]


def is_ordinary(case, dtype, mean):
    """Whether the ordinary run takes a row: far from zero, and in half precision, one for each class."""
    if dtype is torch.float32:
        return not case.option or mean < 1
    return dtype is torch.float16 and not case.option and mean < 1


ROWS = [
    pytest.param(
        *(case, training, dtype, layout, mean),
        id=f"{case}-{mode}-{str(dtype)[6:]}-{layout}-{mean:g}",
        marks=() if is_ordinary(case, dtype, mean) else pytest.mark.deep,
    )
    for case in TWINS
    for mode, training in (("train", True), ("eval", False))
    for dtype in dtypes(case)
    for layout in layouts(case)
    for mean in (0.3, 1e4)
]


@pytest.mark.parametrize(("case", "training", "dtype", "layout", "mean"), ROWS)
def test_as_near_to_float64_as_torch(case, training, dtype, layout, mean, record_property):
    shape = tuple(6 * n if d in case.free else n for d, n in enumerate(case.shape))
    ours = case.layer(dtype, training)
    theirs = case.torch_layer(ours)
    exact = case.torch_layer(ours).double()
    x, dy = case.input(dtype, mean, 1.0, shape), torch.randn(shape, dtype=torch.float64).to(dtype)
    reference = measure(exact, x.double(), dy.double())
    if layout == "channels_last":
        x, dy = (t.contiguous(memory_format=LAYOUTS[t.dim()]) for t in (x, dy))
    on_torch = refuses_loops(ours, x)
    found, torchs = measure(ours, x, dy), measure(theirs, x, dy)
    mode = "train" if training else "eval"
    for what, truth in reference.items():
        our_error = (found[what] - truth).abs().max().item()
        torch_error = (
            (torchs[what] - truth).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()
        )  # NaN is as far as can be
        if not training and what.startswith("running"):
            continue  # they do not move
        kind = "statistics" if what.startswith("running") else "gradients" if what[0] == "d" else what
        record_property("accuracy", (mode, str(dtype)[6:], layout, f"{mean:g}", kind, torch_error, our_error))
        if on_torch and mean > 1e3 and dtype.itemsize == 2:
            continue  # the numbers of this type are 8 or more apart there: of a spread of 1, nothing is left
        allowed = bound_of_any(KINDS[kind], truth).allowed(dtype).item()
        assert our_error <= max(2 * torch_error, allowed), what
        loses_digits = what == "output" and dtype is torch.float32 and torch_error > 100 * allowed
        if loses_digits and not on_torch:
            assert our_error <= torch_error / 30
