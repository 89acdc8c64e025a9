"""BN + ReLU, torch eager over ours: interleaved in one run, medians of the ratio with quartiles. More is better."""

import statistics
import time

import torch
from torch import nn

import normkit as nk
from normkit.kernels import select

MAPS = [(32, 64, 56, 56), (64, 256, 14, 14), (128, 64, 32, 32), (8, 2048, 7, 7)]
CASES = [
    *((shape, torch.contiguous_format, torch.float32) for shape in [*MAPS, (256, 512), (32, 64)]),
    *((shape, torch.channels_last, torch.float32) for shape in MAPS),
    *((MAPS[0], layout, torch.bfloat16) for layout in (torch.contiguous_format, torch.channels_last)),
    ((256, 512), torch.contiguous_format, torch.bfloat16),
]
ROUNDS = 15


def seconds(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def make_step(layer, x, training):
    layer.train(training)

    def step():
        if not training:
            with torch.no_grad():
                layer(x)
            return
        x.grad = None
        layer(x).backward(x.detach())

    return step


def ratio(shape, layout, dtype, training):
    kind = {2: "1d", 4: "2d"}[len(shape)]
    x = torch.randn(shape).to(dtype)
    if len(shape) == 4:
        x = x.contiguous(memory_format=layout)
    x.requires_grad_()
    ours = make_step(getattr(nk, f"BatchNorm{kind}")(shape[1], activation="relu"), x, training)
    theirs = make_step(nn.Sequential(getattr(nn, f"BatchNorm{kind}")(shape[1]), nn.ReLU()), x, training)
    for warm_up in (ours, theirs, ours, theirs):
        warm_up()
    return statistics.quantiles((seconds(theirs) / seconds(ours) for _ in range(ROUNDS)), n=4)


def main():
    print(f"torch {torch.__version__}, {select.status()}; torch eager's time over ours, median (quartiles)")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        medians = {"training": [], "evaluation": []}
        for shape, layout, dtype in CASES:
            name = "channels_last" if layout == torch.channels_last else ""
            line = f"{threads} threads  {shape!s:<18}{name:<14}{str(dtype)[6:]:<9}"
            for mode in medians:
                low, mid, high = ratio(shape, layout, dtype, mode == "training")
                medians[mode].append(mid)
                line += f"  {mode} {mid:5.2f} ({low:.2f} to {high:.2f})"
            print(line)
        for mode, values in medians.items():
            print(f"{threads} threads  {mode}: geometric mean {statistics.geometric_mean(values):.2f}")


if __name__ == "__main__":
    main()
