"""BN + ReLU, ours over torch eager: interleaved in one run, medians of the ratio with quartiles.

The reference kernels are built to be right, not fast. This says what that costs.
"""

import statistics
import time

import torch
from torch import nn

import normkit as nk

SHAPES = [(32, 64, 56, 56), (64, 256, 14, 14), (8, 2048, 7, 7), (256, 512), (32, 64)]
ROUNDS = 9


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


def main():
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; time over torch eager's, median (quartiles)")
    for shape in SHAPES:
        kind = {2: "1d", 4: "2d"}[len(shape)]
        x = torch.randn(shape, requires_grad=True)
        line = f"{shape!s:<20}"
        for training in (True, False):
            ours = make_step(getattr(nk, f"BatchNorm{kind}")(shape[1], activation="relu"), x, training)
            theirs = make_step(nn.Sequential(getattr(nn, f"BatchNorm{kind}")(shape[1]), nn.ReLU()), x, training)
            ours()
            theirs()
            ratios = [seconds(ours) / seconds(theirs) for _ in range(ROUNDS)]
            low, mid, high = statistics.quantiles(ratios, n=4)
            line += f"  {'training' if training else 'evaluation'} {mid:5.1f} ({low:.1f} to {high:.1f})"
        print(line)


if __name__ == "__main__":
    main()
