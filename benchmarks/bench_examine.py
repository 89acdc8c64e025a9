"""What an examination costs, beside one pass of training over the same batches: ResNet-50 at 64x64, 8 batches of 32.

Both are measured in seconds of the processor, so that a busy machine does not count.
"""

import argparse
import time
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        same = inputs == 4 * width and stride == 1
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        )

    def forward(self, x):
        """Add what the body makes of the input to the input."""
        return F.relu(self.body(x) + self.skip(x))


def resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, 64 * 2**stage, 2 if stage and not block else 1))
            inputs = 256 * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def training_pass(model, optimizer, batches):
    begun = time.process_time()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return time.process_time() - begun


@torch.no_grad()
def spoil(model):
    """Move all stored means by some of their standard deviations."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.add_(layer.running_var.sqrt() * 0.3 * torch.randn_like(layer.running_mean))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--side", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    nk.examine(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), [torch.randn(8, 2)])  # imports what it needs
    model = resnet50().train()
    # Classes that can be learnt: the loss of a model that only guesses has no gap to share out.
    patterns = torch.randn(10, 3, args.side, args.side)
    labels = [torch.randint(10, (args.batch,)) for _ in range(8)]
    batches = [(patterns[y] + torch.randn(args.batch, 3, args.side, args.side), y) for y in labels]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(3):
        training_pass(model, optimizer, batches)
    for name, is_spoiled in (("as trained", False), ("with a gap that all layers have a share in", True)):
        ratios = []
        for _ in range(args.rounds):
            one = training_pass(model, optimizer, batches)
            if is_spoiled:
                spoil(model)
            begun = time.process_time()
            found = nk.examine(model, batches, F.cross_entropy, optimizer)
            ratios.append((time.process_time() - begun) / one)
            shares = [layer["share"] for layer in found.evidence["layers"] if layer.get("share") is not None]
            assert shares or not is_spoiled, "there was no gap"
        shown = ", ".join(f"{ratio:.1f}" for ratio in ratios)
        print(f"{name}: examine takes {median(ratios):.1f} times one pass of training ({shown})", flush=True)


if __name__ == "__main__":
    main()
