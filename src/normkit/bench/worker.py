"""The process that measures: one line of JSON for every case, as soon as it is done."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from normkit.bench.case import Effort, Result
from normkit.bench.cases import all_cases, case_id
from normkit.bench.machine_load import Neighbours


def measure(cases: Collection[str], effort: Effort) -> Iterator[Result]:
    """Measure the cases of these names, in the benchmark's order."""
    for case in all_cases():
        if case_id(case) in cases:
            neighbours = Neighbours()
            result = case.measure(effort)
            yield replace(result, neighbours=neighbours.busy_cores())


def main() -> None:
    """Do the job that came as the only argument: JSON with the threads, the cases' names and the effort."""
    job = json.loads(sys.argv[1])
    # Compilers and profilers print what they like; the lines of JSON keep the output for themselves.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as lines:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        torch.set_num_threads(job["threads"])
        torch.manual_seed(0)
        for result in measure(job["cases"], Effort(**job["effort"])):
            print(json.dumps(result.as_json()), file=lines, flush=True)


if __name__ == "__main__":
    main()
