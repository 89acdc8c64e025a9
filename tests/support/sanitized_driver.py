"""Every layer, and every loop at sizes around its edges, on a core built with sanitizers; in a process of its own.

    python sanitized_driver.py <core> <instruction set> <name in RUNS>...

A sanitizer that finds something ends the process. If none does, the numbers of calls of the core are printed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import json
import mmap
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WORKED = (*DTYPES, torch.float64)
ACTIVATIONS = (None, "relu", "leaky_relu", "gelu")  # the smooth ones share their loops
FAMILIES = ("batch", "group", "instance", "layer", "rms", "sum")


calls: Counter[str] = Counter()
"""Of the core: a run that never came to it would find nothing either."""


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        calls[function.__name__] += 1
        return function(*arguments)

    return call


def load(file: str) -> ModuleType:
    """Load this core, for normkit to find in place of the installed one."""
    spec = importlib.util.spec_from_file_location("normkit._core", file)
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    for name, value in vars(core).items():
        if isinstance(value, BuiltinFunctionType):
            setattr(core, name, counted(value))
    sys.modules["normkit._core"] = core
    return core


# ---- memory whose ends are watched ---------------------------------------------------------------------------------


def between_guards(size: int, at_end: bool) -> ctypes.Array:
    """Memory that begins, or ends, at a page which cannot be touched.

    The address sanitizer sees what the compiler wrote; masked and streamed accesses are the processor's own, and only
    the processor stops them.
    """
    page = mmap.PAGESIZE
    inside = max(1, -(-size // page)) * page
    pages = mmap.mmap(-1, inside + 2 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for guard in (begin, begin + page + inside):
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    return (ctypes.c_char * size).from_buffer(pages, page + (inside - size if at_end else 0))


def on_heap(count: int, dtype: torch.dtype, offset: int) -> Tensor:
    """An allocation's last `count` elements: behind them lies what the address sanitizer has poisoned."""
    return empty(count + offset, dtype=dtype)[offset:]


def on_pages(count: int, dtype: torch.dtype, at_end: bool) -> Tensor:
    return torch.frombuffer(between_guards(count * dtype.itemsize, at_end), dtype=dtype)


PLACES: tuple[Callable[[int, torch.dtype], Tensor], ...] = (
    lambda count, dtype: on_heap(count, dtype, 0),
    lambda count, dtype: on_pages(count, dtype, True),
    lambda count, dtype: on_heap(count, dtype, 1),
    lambda count, dtype: on_pages(count, dtype, False),
    lambda count, dtype: on_heap(count, dtype, 3),
)
turn = itertools.count()


def elsewhere(t: Tensor) -> Tensor:
    """Memory for such a tensor, in the next of all places."""
    if t.device.type != "cpu" or t.numel() == 0:
        return t
    memory = PLACES[next(turn) % len(PLACES)](t.numel(), t.dtype)
    return memory.as_strided(t.shape, t.stride(), memory.storage_offset()).requires_grad_(t.requires_grad)


def placed(values: Tensor) -> Tensor:
    return elsewhere(values.detach()).copy_(values)


empty = torch.empty


def watch_outputs() -> None:
    """Let whatever is allocated here, for the core to write to, lie in these places as well."""
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)
        setattr(torch, name, lambda *args, _allocate=allocate, **options: elsewhere(_allocate(*args, **options)))


# ---- every row of the table ----------------------------------------------------------------------------------------


def layouts(rank: int) -> tuple[torch.memory_format, ...]:
    return (torch.contiguous_format, *([CHANNELS_LAST[rank]] if rank in CHANNELS_LAST else []))


def grown(case, least: int) -> tuple[int, ...]:
    """The row's shape, one of its free sizes an odd one that leaves at least so many elements."""
    if not case.free or case.name.startswith("Ghost"):  # whose chunks stay small, and become many
        return case.shape
    widest = case.free[-1]
    others = prod(n for d, n in enumerate(case.shape) if d != widest)
    return tuple(-(-least // others) | 1 if d == widest else n for d, n in enumerate(case.shape))


def run_row(case, shape: tuple[int, ...], training: bool, dtype: torch.dtype, layout: torch.memory_format) -> None:
    layer = case.layer(dtype, training)
    for t in (*layer.parameters(), *layer.buffers()):
        t.data = placed(t.data)
    x = placed(case.input(dtype, shape=shape).contiguous(memory_format=layout)).requires_grad_()
    y = layer(x)
    y.backward(placed(torch.randn_like(y)))
    with torch.no_grad():
        layer(x)


def run_rows() -> None:
    """All types on one thread, and in turn on two, with inputs that are large enough to be shared out."""
    from support.cases import CASES

    dtypes = itertools.cycle(DTYPES)
    for case, training in itertools.product(CASES, (True, False)):
        before = calls.total()
        for layout in layouts(len(case.shape)):
            torch.set_num_threads(1)
            for dtype in DTYPES:
                run_row(case, case.shape, training, dtype, layout)
            if calls.total() == before:
                break  # made of torch's operators alone
            torch.set_num_threads(2)
            run_row(case, grown(case, 33_000), training, next(dtypes), layout)


# ---- every loop at the edges of its vectors, blocks and threads -----------------------------------------------------

# (examples, channels, positions): every remainder of a vector, four rows at a time or one.
EDGES = [*((3, 3, s) for s in range(1, 36)), *((5, c, 1) for c in range(2, 36)), (1, 1, 2), (9, 17, 2), (2, 70, 3)]
LARGE = [
    (1, 1, 70_001),  # few channels, shared out over their positions
    (3, 7, 5_001),
    (2, 1, 66_000),
    (7_001, 5, 1),
    (17, 33, 65),  # many channels
    (2, 600, 28),
]
STREAMED = [  # past the caches
    ((3, 70, 10_003), False, "batch"),
    ((65_600, 32, 1), True, "batch"),
    ((65_600, 32, 1), True, "layer"),
    ((65_600, 32, 1), True, "sum"),
]


def run_edges() -> None:
    torch.set_num_threads(1)
    options = itertools.cycle(itertools.product((False, True), ACTIVATIONS, *[(False, True)] * 3))
    for shape, dtype in itertools.product(EDGES, WORKED):
        for _ in range(3):  # of 64: in the course of the sizes, each type meets all options
            run_shape(shape, dtype, *next(options))


def run_large() -> None:
    options = itertools.cycle([("relu", False, True), ("leaky_relu", True, False), (None, True, True)])
    for shape, (number, dtype), rows in itertools.product(LARGE, enumerate(DTYPES), (False, True)):
        torch.set_num_threads(1 + (number + rows) % 2)
        families = FAMILIES if shape[1] > 1 else FAMILIES[:3]  # lines of one value are slow, and not for their size
        run_shape(shape, dtype, rows, *next(options), families=families)
    for shape, rows, family in STREAMED:
        run_shape(shape, torch.float32, rows, *next(options), families=[family])


def run_shape(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    rows: bool,
    activation: str | None,
    residual: bool,
    affine: bool,
    masked: bool = False,
    families: Sequence[str] = FAMILIES,
) -> None:
    """One step of each function; `rows` are channels last."""
    from normkit import functional as F
    from normkit.kernels.layer_calls import last_norm_of_sum

    n, c, s = shape

    def tensor() -> Tensor:
        values = torch.randn(n, s, 1, c).permute(0, 3, 1, 2) if rows else torch.randn(n, c, s, 1)
        return placed(values.to(dtype))

    def vector() -> Tensor | None:
        return placed(torch.randn(c)).requires_grad_() if affine else None

    x, z, w, b = tensor().requires_grad_(), tensor().requires_grad_() if residual else None, vector(), vector()
    # The last dimension is that of the channels: of rows, or of what no loop is made for.
    last_x, last_z = x.movedim(1, -1), None if z is None else z.movedim(1, -1)
    mean, var = placed(torch.randn(c)), placed(torch.rand(c))
    groups = next(g for g in (4, 3, 2, 1) if c % g == 0 and (c // g) * s > 1)
    extras, last = {"activation": activation, "residual": z}, {"activation": activation, "residual": last_z}
    counted_too = torch.rand(n, *x.shape[2:]) < 0.8
    counted_too[:, :2] = True  # enough for a variance
    mask = placed(counted_too) if masked else None

    def of_sum() -> Tensor:
        one, other = (placed(torch.randn(n * s, c).to(dtype)).requires_grad_() for _ in range(2))
        # Lines of one value have no variance about their mean, and doubles no smooth activation.
        found = last_norm_of_sum(one, other, w, b, (c,), 1e-5, activation, c > 1) or (one, other)
        return sum(found).view(n, s, 1, c).permute(0, 3, 1, 2)

    steps = {
        "batch": lambda: F.batch_norm(x, mean, var, w, b, training=n * s > 1, mask=mask, **extras),
        "group": lambda: F.group_norm(x, groups, w, b, mask=mask, **extras),
        "instance": lambda: F.instance_norm(x, mean, var, w, b, use_input_stats=s > 1, mask=mask, **extras),
        "layer": lambda: F.layer_norm(last_x, c, w, b, **last).movedim(-1, 1),
        "rms": lambda: F.rms_norm(last_x, c, w, **last).movedim(-1, 1),
        "sum": of_sum,
    }
    for family in families:
        steps[family]().backward(tensor())
    with torch.no_grad():
        F.batch_norm(x, mean, var, w, b, **extras)
        F.batch_moments(x)


# ---- what must be found --------------------------------------------------------------------------------------------


def claimed(address: int, backed: int) -> Tensor:
    """A tensor of 300 elements at this address, of which fewer are backed by memory."""
    x = torch.frombuffer((ctypes.c_float * 300).from_address(address), dtype=torch.float32)
    x[:backed] = torch.randn(backed)
    return x.view(4, 3, 5, 5)


def find_short_allocation() -> None:
    """Half of a tensor lies behind the end of its allocation."""
    from normkit import functional as F

    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    F.batch_norm(claimed(malloc(150 * 4), 150), None, None, training=True)


def find_guard() -> None:
    """The last element of a tensor lies on a page that cannot be touched."""
    from normkit import functional as F

    memory = between_guards(299 * 4, at_end=True)
    F.batch_norm(claimed(ctypes.addressof(memory), 299), None, None, training=True)


def find_misaligned() -> None:
    """Values at addresses where their type cannot lie, which only the other sanitizer minds."""
    from normkit import functional as F

    memory = (ctypes.c_char * (4 * 3 * 25 * 4)).from_buffer(bytearray(4 * 3 * 25 * 4 + 1), 1)
    F.batch_norm(torch.frombuffer(memory, dtype=torch.float32).view(4, 3, 5, 5), None, None, training=True)


RUNS = {
    "rows": run_rows,
    "edges": run_edges,
    "large": run_large,
    "short": find_short_allocation,
    "guard": find_guard,
    "misaligned": find_misaligned,
}


def main(file: str, instruction_set: str, *runs: str) -> None:
    core = load(file)
    from normkit.kernels import layer_calls, native, select

    layer_calls.SMALL = dict.fromkeys(layer_calls.SMALL, 0)  # the rows are small, and this is about our loops
    native.WORTH_TURNING = 0
    core.use_instruction_set(instruction_set)
    assert select.status().items() >= {"backend": "native", "instruction set": instruction_set}.items()
    torch.manual_seed(0)
    watch_outputs()
    calls.clear()
    for name in runs:
        RUNS[name]()
    print(json.dumps(calls))


if __name__ == "__main__":
    main(*sys.argv[1:])
