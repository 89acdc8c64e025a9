"""Engines: what runs the trials of a run. The records are the same, whichever it is."""

from __future__ import annotations

from normkit.errors import ArgumentError, did_you_mean
from normkit.lab.engines.engine import Engine
from normkit.lab.engines.engine import TrialError as TrialError
from normkit.lab.engines.engine import disk_trouble as disk_trouble
from normkit.lab.engines.local import LocalEngine

ENGINES = ("local", "ray")


def engine_named(name: str, cpus_per_trial: float | None = None) -> Engine:
    """The engine of this name; what it needs is imported here, so that what is missing is said before a run begins."""
    if name == "ray":
        from normkit.lab.engines.ray import RayEngine

        return RayEngine(1.0 if cpus_per_trial is None else cpus_per_trial)
    if name != "local":
        raise ArgumentError(f"--engine must be one of {', '.join(ENGINES)}; got {name!r}.{did_you_mean(name, ENGINES)}")
    if cpus_per_trial is not None:
        raise ArgumentError(
            "--cpus-per-trial is what a trial asks a Ray cluster for, and needs --engine ray. Here a trial runs on one "
            "core: --jobs says how many run side by side."
        )
    return LocalEngine()
