"""Runs made by hand, as they are on the disk: their records hold numbers that nothing else does."""

from normkit.json_lines import LineWriter
from normkit.lab.experiments import experiment_named
from normkit.lab.plan import RunPlan, write_plan
from normkit.lab.record import RECORDS
from support import report_samples

STEPS = (0, 100, 200, 300)
MADE_UP = ("sigmoid-mlp", "norm-free")  # the experiments that need no more than the lines below
LOW = ("plain",)  # arms that hardly learn begin with this


def write_run(directory, name="all", names=MADE_UP, *, seeds=2, planned=None, shift=0.0, low=LOW, status="done"):
    """A run of some experiments with some seeds, of which more may be planned; `shift` is added to accuracies.

    The arms that begin with one of `low` hardly learn. Return the directory.
    """
    directory.mkdir(exist_ok=True)
    write_plan(RunPlan(name, "quick", None, planned or seeds), directory)
    for each in names:
        for index, arm in enumerate(experiment_named(each).arms("quick")):
            for seed in range(seeds):
                top = 0.1237 if arm.name.startswith(low) else 0.8931 - 0.0107 * index
                path = directory / RECORDS / f"{each}.{arm.name}.{seed}.jsonl"
                _write(path, _header(each, arm, seed), top + shift + 0.0013 * seed, status)
    return directory


def _write(path, header, top, status):
    with LineWriter(path) as writer:
        writer.write(header)
        for step in STEPS:
            accuracy = top * (1 - 0.9 ** (1 + step / 10))
            quantiles = [[step / top + at] * 3 for at in (-1, 0, 1)]  # what learns less wanders more
            writer.write(
                {"step": step, "seconds": step / 7, "loss": 1 / top, "accuracy": accuracy, "quantiles": quantiles}
            )
        if status:
            writer.write({"status": status, "step": STEPS[-1], "seconds": STEPS[-1] / 7, "why": None})


def _header(experiment, arm, seed):
    header = report_samples.trial(arm.name, seed, None, dict(arm.settings)).header
    return header | {"experiment": experiment, "scale": "quick", "steps": STEPS[-1]}
