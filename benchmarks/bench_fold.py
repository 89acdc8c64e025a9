"""Folding on networks that others wrote: what is folded, how far the outputs move, beside torch's own fuse.

The networks are random, trained for three steps on noise, with every gamma and beta moved. Prints a table in markdown,
a row at a time; under it, what was left alone and why. "Own rounding" is how far the unfolded network in float32 is
from itself in float64: what any other order of the same sums may move. `--speed` times evaluation too, in turns, on one
thread. Needs pytorchcv, monai and transformers; the networks of a package that is missing are left out, with a line
that says so.
"""

import argparse
import collections
import importlib.util
import re
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.fx.experimental import optimization

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # networks and baselines are shared with the tests
from normkit.batches import feed
from normkit.surgery.fold import fold
from normkit.surgery.parity import compare, trace
from support.architectures import ARCHITECTURES, wide

ROUNDS = 15
BATCH_NORMS = nn.modules.batchnorm._BatchNorm


def torch_fuse(model, example):
    """How many batch norms torch's fuse removes, and the parity; or the error it raises."""
    try:
        fused = optimization.fuse(model)
        layers = dict(fused.named_modules())
        called = {node.target for node in fused.graph.nodes if node.op == "call_module"}
        left = sum(isinstance(layers[name], BATCH_NORMS) for name in called)
        moved_by = compare(trace(model, example), trace(fused, example)).max_rel
    except Exception as error:
        return f"{type(error).__name__}", ""
    return str(sum(isinstance(layer, BATCH_NORMS) for layer in model.modules()) - left), f"{moved_by:.1e}"


def speed(model, folded, example):
    """Milliseconds of an evaluation, before and after, and how many times as fast, with quartiles."""
    seconds = {"model": [], "folded": []}
    with torch.no_grad():
        for _ in range(ROUNDS + 2):
            for name, contestant in (("model", model), ("folded", folded)):
                start = time.perf_counter()
                feed(contestant, example)
                seconds[name].append(time.perf_counter() - start)
    before, after = (times[2:] for times in seconds.values())  # the first two warm up
    low, mid, high = statistics.quantiles([b / a for b, a in zip(before, after, strict=True)], n=4)
    ms = [f"{statistics.median(times) * 1e3:.1f}" for times in (before, after)]
    return [*ms, f"{mid:.2f} ({low:.2f}-{high:.2f})"]


def row(architecture, timed):
    """One network's figures, and the reasons for what was left alone."""
    model, example = architecture.trained(), architecture.example(seed=9)
    result = fold(model, example)
    theirs = torch_fuse(model, example)
    times = speed(model, result.model, example) if timed else []
    before = trace(model, example)
    own = compare(trace(model.double(), wide(example)), before).max_rel
    result64 = fold(model, wide(example))
    assert len(result64.changed) == len(result.changed)
    figures = [f"{moved:.1e}" for moved in (result.parity.max_rel, own, result64.parity.max_rel)]
    batch = sum(isinstance(layer, BATCH_NORMS) for layer in model.modules())
    return [str(batch), str(len(result.changed)), str(len(result.skipped)), *figures, *theirs, *times], result.skipped


def in_kind(why):
    """A reason without the names of layers."""
    return re.sub(r" in [\w.\[\]']+", "", re.sub(r"\b[\w\[\]']+\.[\w.\[\]']+", "another", why))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", action="store_true", help="time evaluation too")
    parser.add_argument("--only", default="", help="networks whose name or package has this in it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    heads = ["network", "from", "BN", "folded", "left", "float32", "own rounding", "float64", "fx fuse", "fx float32"]
    heads += ["ms", "ms folded", "times as fast"] if options.speed else []
    print("| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads), sep="\n")
    reasons = collections.defaultdict(collections.Counter)
    for architecture in ARCHITECTURES:
        if options.only not in f"{architecture.package} {architecture.name}":
            continue
        if importlib.util.find_spec(architecture.package) is None:
            print(f"{architecture.name}: {architecture.package} is not installed", file=sys.stderr)
            continue
        figures, skipped = row(architecture, options.speed)
        print("| " + " | ".join([architecture.name, architecture.package, *figures]) + " |", flush=True)
        for change in skipped:
            reasons[in_kind(change.why)][architecture.name] += 1
    print("\nLeft alone:\n")
    for why, names in sorted(reasons.items(), key=lambda item: -item[1].total()):
        print(f"- {names.total()} in {len(names)} networks: {why}")


if __name__ == "__main__":
    main()
