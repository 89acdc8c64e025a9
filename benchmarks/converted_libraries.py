"""Norms of networks that others wrote, converted to ours and back: which are taken, which are not, and why.

Every norm of each network of timm, transformers, pytorchcv and monai becomes ours of its kind, and is undone. A line of
JSON for each network: its norms, how many were taken, the reasons for the others, how far the outputs moved, over the
largest, in float32 and in float64, and whether undo gave back every bit.

    python benchmarks/converted_libraries.py [--only NAME ...] [--speed]
"""

import argparse
import copy
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # networks are shared with the tests
import normkit as nk
from normkit.batches import feed, tensors_in
from normkit.surgery.norms import survey
from normkit.surgery.parity import difference
from normkit.surgery.replace.targets import TARGETS
from support import aside  # noqa: F401  # where timm is
from support.architectures import ARCHITECTURES, wide
from support.foreign_norms import picture, same_picture
from support.language_models import LANGUAGE_MODELS

# Small networks of each family of norms that timm has: plain, with an activation inside, of maps, of tokens.
TIMM = {
    "resnet18": {},
    "mobilenetv2_050": {},
    "mobilenetv3_small_050": {},
    "efficientnet_lite0": {},
    "regnetx_002": {},
    "resnetv2_50": {},
    "densenet121": {},
    "convnext_atto": {},
    "convnextv2_atto": {},
    "vit_tiny_patch16_224": {},
    "deit_tiny_patch16_224": {},
    "swin_tiny_patch4_window7_224": {},
    "mixer_s32_224": {},
    "poolformerv2_s12": {},
    "edgenext_xx_small": {},
}
STEPS = 7


class Network:
    """A network, in evaluation, and an example for it."""

    def __init__(self, name, home, model, example):
        self.name, self.home, self.model, self.example = name, home, model, example


def networks(only):
    """Every network, built when it is its turn."""
    import timm

    for one in ARCHITECTURES:
        if not only or one.name in only:
            yield Network(one.name, one.package, one.trained(1), one.example(seed=9))
    for one in LANGUAGE_MODELS:
        if not only or one.name in only:
            yield Network(one.name, "transformers", one.build(), one.example())
    for name, options in TIMM.items():
        if not only or name in only:
            torch.manual_seed(0)
            yield Network(name, "timm", timm.create_model(name, **options).eval(), torch.randn(2, 3, 224, 224))


def outputs(model, example):
    with torch.no_grad():
        return [t.clone() for t in tensors_in(feed(model.eval(), example)) if t.is_floating_point()]


def moved(before, after):
    """The largest difference of outputs, over the largest of each."""
    return max(difference(a, b)[1] for a, b in zip(before, after, strict=True))


class Converted:
    """A model whose norms are turned, one by one, into ours of the same kind, in place."""

    def __init__(self, model):
        self.done, self.reasons = [], Counter()
        for _, layer, spec in survey(model).norms:
            result = nk.convert(layer, spec.kind, inplace=True) if spec.kind in TARGETS else None
            if result is not None and result.changed:
                self.done.append(result)
            else:
                why = f'no target "{spec.kind}"' if result is None else result.skipped[0].why
                self.reasons[why] += 1
        self.reasons.update(dict.fromkeys((f"unknown: {name}" for name in survey(model).unknown), 1))

    def undo(self):
        """Turn them back."""
        for result in self.done:
            result.undo()


def measured(network, speed):
    model, example = network.model, network.example
    ids = isinstance(example, dict) and "input_ids" in example
    before, given = picture(model), outputs(model, example)
    theirs = copy.deepcopy(model)
    ours = Converted(model)
    record = {
        "network": network.name,
        "from": network.home,
        "norms": len(ours.done) + sum(ours.reasons.values()),
        "taken": len(ours.done),
        "reasons": dict(ours.reasons),
        "float32": f"{moved(given, outputs(model, example)):.1e}",
    }
    if speed:
        record["step"] = ratio(copy.deepcopy(theirs), copy.deepcopy(model), example)
    ours.undo()
    record["undone"] = same_picture(before, picture(model.eval()))
    twin, wide_example = theirs.double(), example if ids else wide(example)
    given = outputs(twin, wide_example)
    Converted(twin)
    return record | {"float64": f"{moved(given, outputs(twin, wide_example)):.1e}"}


def ratio(model, ours, example):
    """How long a training step takes, over the original's: the median of steps in turns."""
    times = {"theirs": [], "ours": []}
    for _ in range(STEPS):
        for name, one in (("theirs", model), ("ours", ours)):
            begun = time.perf_counter()
            outputs = [t for t in tensors_in(feed(one.train(), example)) if t.requires_grad]
            sum(t.float().square().mean() for t in outputs).backward()
            times[name].append(time.perf_counter() - begun)
    return round(median(times["ours"][2:]) / median(times["theirs"][2:]), 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of networks")
    parser.add_argument("--speed", action="store_true", help="also time a training step")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    for network in networks(asked.only):
        print(json.dumps(measured(network, asked.speed)), flush=True)


if __name__ == "__main__":
    main()
