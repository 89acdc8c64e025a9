"""A stream of 1,000 batches that shifts in the middle: accuracy with and without adapting to it, and its memory.

A small classifier is trained on clouds of points and then given a stream of them on other scales, which change once
more half-way. `nk.adapt` sees all batches before it predicts one; a stream sees each once, and predicts it. Then the
entropy steps of a stream are made to collapse. With `--out`, the numbers go to a record for the documentation.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the stream is shared with the tests
import normkit as nk
from normkit.surgery.statistics.stream import AdaptedStream
from support.shifting_stream import ShiftingStream, ToOneClass, evaluated, live_tensors

BATCHES, SIZE, SEEDS = 1000, 32, (0, 1, 2)
COLLAPSE_AT = 300  # steps until one that leaves one class


def still(source):
    return evaluated(source.model)


def on_all_batches(source):
    return evaluated(nk.adapt(source.model, source.inputs()).model)


def by_stream(**options):
    return lambda source: nk.adapt_stream(source.model, **options)


def collapsing(**options):
    """A stream whose steps end in a collapse, and after a reset are ordinary ones."""

    def start(source):
        steps = iter([COLLAPSE_AT, 2 * BATCHES])
        return nk.adapt_stream(source.model, "tent", optimizer=lambda p: ToOneClass(p, next(steps)), **options)

    return start


ROWS = {
    "no adaptation": still,
    "`nk.adapt`, adabn, on all batches": on_all_batches,
    "`nk.adapt_stream`, adabn": by_stream(),
    "`nk.adapt_stream`, tent": by_stream(method="tent"),
    f"tent, made to collapse after batch {COLLAPSE_AT}": collapsing(),
    "the same, not watched (`collapse=0`)": collapsing(collapse=0),
}


def measured(start, source):
    """Accuracies in both halves, the resets, and the live tensors after a fifth of the batches and after all."""
    predict, at = start(source), []

    def predicted(x):
        found = predict(x)
        if isinstance(predict, AdaptedStream) and predict.batches in (BATCHES // 5, BATCHES):
            at.append(live_tensors())
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nk.NormkitWarning)
        halves = source.accuracy(predicted)
    return halves, [one.batch for one in getattr(predict, "resets", ())], at


def spread(values):
    return f"{100 * median(values):.1f} ({100 * min(values):.1f} to {100 * max(values):.1f})"


def row(name, found):
    halves = [spread([one[0][half] for one in found]) for half in (0, 1)]
    resets = ", ".join(str(batch) for one in found for batch in one[1]) or "none"
    memory = [f"{max(at[moment][1] for *_, at in found) / 1024:.0f} KB" if found[0][2] else None for moment in (0, 1)]
    return [name, *halves, resets if found[0][2] else None, *memory]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sources = [ShiftingStream(BATCHES, SIZE, seed) for seed in SEEDS]
    columns = ["accuracy, %", "before the shift", "after it", "reset at batch", "tensors after a fifth", "after all"]
    rows = []
    for name, start in ROWS.items():
        rows.append(row(name, [measured(start, source) for source in sources]))
        print(*rows[-1], sep="\t", flush=True)
    if args.out:
        run = (
            f"`benchmarks/stream_adaptation.py`: {BATCHES:,} batches of {SIZE}, four classes, a classifier with two "
            "norms; median (range) over three seeds, and the resets of all three; the bytes of all tensors that exist."
        )
        tables = [{"title": "", "columns": columns, "rows": rows}]
        args.out.write_text(json.dumps({"run": run, "tables": tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
