"""From which size on our loops are faster than torch's operator, layer by layer: what layer_calls.SMALL was chosen by.

One thread, float32, a training step and an evaluation of each layer on either backend, in turns. Printed is torch's
time over ours: where it is below one, torch's operator should have the call.
"""

import copy
import statistics

import torch

import normkit as nk
from normkit.bench.timing import interleave
from normkit.kernels import select

ROUNDS = 9

MAPS = [
    (32, 64, 1, 1),
    (1, 960, 2, 2),
    (4, 512, 3, 3),
    (1, 64, 8, 8),
    (16, 160, 2, 2),
    (16, 64, 4, 4),
    (16, 64, 8, 8),
    (16, 256, 8, 8),
    (16, 128, 16, 16),
    (32, 64, 28, 28),
]
LINES = [(32, 64), (272, 192), (1024, 384), (1024, 768), (4000, 192), (12608, 384)]


class OfSum(torch.nn.Module):
    """The norm of a sum, in the pass that adds; where torch is asked for, after torch's addition."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.branch = norm, torch.nn.Parameter(torch.randn(()))

    def forward(self, x):
        """What two branches that read both would be given."""
        branch = self.branch.expand_as(x).contiguous()
        if select.requested() == "native":
            y, total = self.norm(x, add=branch)
            return y + total
        with select.backend("auto"):
            total = x + branch
            return self.norm(total) + total


LAYERS = {
    "BatchNorm": (MAPS, lambda c: nk.BatchNorm2d(c)),
    "BatchNorm + ReLU": (MAPS, lambda c: nk.BatchNorm2d(c, activation="relu")),
    "BatchNorm + SiLU": (MAPS, lambda c: nk.BatchNorm2d(c, activation="silu")),
    "InstanceNorm": (MAPS[1:], lambda c: nk.InstanceNorm2d(c, affine=True)),
    "GroupNorm": (MAPS, lambda c: nk.GroupNorm(8, c)),
    "GroupNorm + ReLU": (MAPS, lambda c: nk.GroupNorm(8, c, activation="relu")),
    "GroupNorm + SiLU": (MAPS, lambda c: nk.GroupNorm(8, c, activation="silu")),
    "LayerNorm": (LINES, lambda c: nk.LayerNorm(c)),
    "LayerNorm + GELU": (LINES, lambda c: nk.LayerNorm(c, activation="gelu")),
    "RMSNorm": (LINES, lambda c: nk.RMSNorm(c)),
    "LayerNorm of a sum": (LINES, lambda c: OfSum(nk.LayerNorm(c))),
    "RMSNorm of a sum": (LINES, lambda c: OfSum(nk.RMSNorm(c))),
}


def torch_over_ours(ours, theirs):
    """The median of torch's time over ours."""
    found = interleave({"ours": ours, "torch": theirs}, ROUNDS)
    return statistics.median(torchs / own for own, torchs in zip(found["ours"], found["torch"], strict=True))


def steps(layer, x, dy, backend):
    inputs, evaluated = [x, *layer.parameters()], copy.deepcopy(layer).eval()

    def train():
        with select.backend(backend):
            torch.autograd.grad(layer(x), inputs, dy)

    def evaluate():
        with select.backend(backend), torch.no_grad():
            evaluated(x)

    return train, evaluate


def main():
    torch.set_num_threads(1)
    print(f"{'layer':<20}{'values':>9}  {'shape':<18}{'training':>9}{'evaluation':>12}")
    for name, (shapes, build) in LAYERS.items():
        for shape in shapes:
            x, dy = torch.randn(shape, requires_grad=True), torch.randn(shape)
            layer = build(shape[1])
            ours, theirs = (steps(layer, x, dy, backend) for backend in ("native", "torch"))
            ratios = [torch_over_ours(*pair) for pair in zip(ours, theirs, strict=True)]
            print(f"{name:<20}{x.numel():>9}  {shape!s:<18}{ratios[0]:>9.2f}{ratios[1]:>12.2f}", flush=True)


if __name__ == "__main__":
    main()
