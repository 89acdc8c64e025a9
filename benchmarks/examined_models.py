"""Networks that others wrote, trained for some steps in an ordinary loop, and what the doctor says of them: nothing.

Prints a line for each network, and one for each finding that is more than info. Exits with 1 if there was one. Some
networks only take pictures of 224 pixels: name others with a smaller --side.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the networks are shared with the tests
import normkit as nk
from normkit.batches import feed
from normkit.surgery.fold.dataflow import outputs_of
from support.architectures import ARCHITECTURES, Architecture

LARGE = 224  # pixels: pictures of that side and more are made smaller, to be done within minutes


def pooled(output):
    """The first output as (N, classes)."""
    first = outputs_of(output)[0].float()
    return first if first.dim() == 2 else first.flatten(2).mean(2)


def loss(output, target):
    return F.cross_entropy(pooled(output), target % pooled(output).shape[1])


def of_timm(name):
    from support import aside  # noqa: F401  # where timm is

    import timm

    return Architecture(name, "timm", lambda: timm.create_model(name, num_classes=10), (3, LARGE, LARGE))


def batches_for(architecture, number, size, side):
    """Pictures of which half are brighter, with the labels 0 and 1."""
    shape = tuple(side if n >= LARGE else n for n in architecture.shape)
    found = []
    for _ in range(number):
        y = torch.randint(2, (size,))
        x = torch.randn(size, *shape) + 0.5 * y.reshape(-1, *[1] * len(shape))
        found.append((x, y))
    return found


def forward_for(architecture):
    def forward(model, batch):
        return feed(model, batch[0] if architecture.key is None else {architecture.key: batch[0]})

    return forward


def trained(architecture: Architecture, batches, steps, rate):
    torch.manual_seed(0)
    model, forward = architecture.build().train(), forward_for(architecture)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    for step in range(steps):
        batch = batches[step % len(batches)]
        optimizer.zero_grad()
        loss(forward(model, batch), batch[1]).backward()
        optimizer.step()
    return model, optimizer


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="networks, timm's as timm:NAME; all of the table by default")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--side", type=int, default=64, help="of pictures that are 224 pixels wide or more")
    args = parser.parse_args()
    known = [
        a for a in ARCHITECTURES if importlib.util.find_spec(a.package) and (not args.names or a.name in args.names)
    ]
    unwell = 0
    for architecture in known:
        torch.manual_seed(1)
        batches = batches_for(architecture, 8, args.batch, args.side)
        begun = time.perf_counter()
        model, optimizer = trained(architecture, batches, args.steps, args.rate)
        took = time.perf_counter() - begun
        for mode in (True, False):
            found = nk.examine(model.train(mode), batches, loss, optimizer, forward_for(architecture))
            bad = [one for one in found.findings if one.severity != "info"]
            unwell += not found.ok
            seconds, notes = found.evidence["seconds"], len(found.findings) - len(bad)
            mode_name = "training" if mode else "evaluation"
            print(
                f"{architecture.name}, {mode_name}: {len(bad)} bad, {notes} info; {took:.0f} s, {seconds:.1f} s",
                flush=True,
            )
            for one in bad:
                print(f"    {one.severity} {one}", flush=True)
    sys.exit(bool(unwell))


if __name__ == "__main__":
    main()
