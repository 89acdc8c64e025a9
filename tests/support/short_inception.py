"""What torchrun starts in tests: two arms of the experiment inception, with a pause in every step to be killed in.

Arguments: the run's directory, seconds of pause, and what is different about rank 1: "folder:PATH" for its data, or
nothing.
"""

import os
import sys
import time
from pathlib import Path

from normkit.cli.app import main
from normkit.lab.data import folder  # noqa: F401, imported before the first process is killed
from normkit.lab.experiments import inception


def pausing(training, seconds):
    batches = training.batches

    def slowly(start):
        for batch in batches(start):
            time.sleep(seconds)
            yield batch

    training.batches = slowly
    return training


if __name__ == "__main__":
    out, pause, *rest = sys.argv[1:]
    made, arms = inception.EXPERIMENT.training, inception.EXPERIMENT.arms
    inception.EXPERIMENT.arms = lambda scale: [arm for arm in arms(scale) if arm.name in ("inception", "bn-baseline")]
    inception.EXPERIMENT.training = lambda trial: pausing(made(trial), float(pause))
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    if rank == "1" and rest and rest[-1].startswith("folder:"):
        os.chdir(rest[-1].removeprefix("folder:"))
    Path(f"{out}.{attempt}.{rank}.pid").write_text(str(os.getpid()))
    arguments = [each for each in rest if not each.startswith("folder:")]
    main(["lab", "run", "inception", "--scale", "quick", "--out", out, *arguments])
