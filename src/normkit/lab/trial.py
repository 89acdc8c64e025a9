"""Run one trial. Resumed from checkpoints or not, it leaves the same record, on CPUs bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from normkit.environment import describe_environment
from normkit.json_lines import Line, LineWriter, RecordError
from normkit.lab.checkpoint import load_state, save_state
from normkit.lab.commit import commit_of_code
from normkit.lab.experiment import Experiment, Training, Trial
from normkit.lab.observation import Observation
from normkit.lab.record import RECORDS, read_trial
from normkit.lab.tensorboard import LoggedLineWriter

CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
Notify = Callable[[int, int, float | None], None]  # steps taken, steps in all, the accuracy measured last
Keep = Callable[[Line], None]  # takes the state that a resumed trial begins with


class RunOptions(NamedTuple):
    """Where the files of a run are, whether it is resumed, and whether TensorBoard's logs are written."""

    directory: Path
    resume: bool = False
    tensorboard: bool = False


class Writer(Protocol):
    """What takes the lines of a record, and says how long it is then."""

    def write(self, line: Line) -> int:
        """Write a line."""

    def close(self) -> None:
        """End the record."""


class Carrier(Protocol):
    """What carries a trial: this process alone, or all ranks of a group together."""

    def set_up(self, experiment: Experiment, trial: Trial) -> tuple[Training, Line]:
        """The training as it is run here, and what the record's first line says of that."""

    def writer(self, record: Path, size: int, logs: Path | None, step: int) -> Writer:
        """What the record is written with."""

    def save(self, state: Line, checkpoint: Path) -> None:
        """Keep a state in the place of the one before."""

    def load(self, checkpoint: Path) -> Line | None:
        """The state that was kept last, if there is one."""

    def forget(self, checkpoint: Path) -> None:
        """Remove what was kept."""


class OneProcess:
    """Carries a trial in this process."""

    def set_up(self, experiment: Experiment, trial: Trial) -> tuple[Training, Line]:
        """The training as it is."""
        return experiment.training(trial), {}

    def writer(self, record: Path, size: int, logs: Path | None, step: int) -> LineWriter:
        """What writes the record and, if they are asked for, TensorBoard's logs."""
        return LineWriter(record, size) if logs is None else LoggedLineWriter(record, size, logs, step)

    def save(self, state: Line, checkpoint: Path) -> None:
        """Keep a state in one file."""
        save_state(state, checkpoint)

    def load(self, checkpoint: Path) -> Line | None:
        """Read that file."""
        return load_state(checkpoint) if checkpoint.exists() else None

    def forget(self, checkpoint: Path) -> None:
        """Remove it."""
        checkpoint.unlink(missing_ok=True)


def run_trial(
    experiment: Experiment,
    trial: Trial,
    options: RunOptions,
    notify: Notify,
    carrier: Carrier = OneProcess(),  # noqa: B008, it has no state
) -> None:
    """Run a trial to its end, from its last checkpoint if it is resumed; one that has ended is left alone."""
    record, checkpoint = trial_paths(trial, options.directory)
    logs = options.directory / TENSORBOARD / trial.name if options.tensorboard else None
    if options.resume and is_ended(record):
        return
    with _own_random_state(trial.seed):
        training, about = carrier.set_up(experiment, trial)
        keep = partial(carrier.save, checkpoint=checkpoint)
        clock = _Clock()
        step, size, accuracy = 0, 0, None
        with closing(Observation(training)) as observation:
            if options.resume and (state := carrier.load(checkpoint)) is not None:
                step, size, accuracy = _restore(training, observation, clock, state, record, trial)
            with closing(carrier.writer(record, size, logs, step)) as writer:
                if size == 0:  # there was no checkpoint
                    writer.write(header(trial, training) | about)
                    _measure_start(training, observation, clock, writer, keep)
                _train(training, observation, step, accuracy, clock, writer, keep, notify)
    carrier.forget(checkpoint)


def trial_paths(trial: Trial, directory: Path) -> tuple[Path, Path]:
    """The files of a trial: its record and its checkpoint."""
    return directory / RECORDS / f"{trial.name}.jsonl", directory / CHECKPOINTS / f"{trial.name}.safetensors"


def is_ended(record: Path) -> bool:
    """Whether a trial has run to its end."""
    try:
        return record.exists() and read_trial(record).end is not None
    except RecordError:  # killed while its first line was written
        return False


def header(trial: Trial, training: Training) -> Line:
    """The first line of a record: what the trial is, and where it runs."""
    return {
        "experiment": trial.experiment,
        "arm": trial.arm.name,
        "seed": trial.seed,
        "scale": trial.scale,
        "data": trial.data,
        "settings": dict(trial.arm.settings),
        "steps": training.steps,
        "initial_rate": training.optimizer.param_groups[0]["lr"],
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "environment": describe_environment(),
        "threads": torch.get_num_threads(),
        "commit": commit_of_code(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


class _Clock:
    """Seconds of training in all: measuring is not counted, and a resumed trial continues the count."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


def _measure_start(training: Training, observation: Observation, clock: _Clock, writer: Writer, keep: Keep) -> None:
    if training.measure_at(0):
        measured = _measure(training, 0, [], clock)
        _keep(training, observation, 0, clock, measured.get("accuracy"), writer.write(measured), keep)


def _train(
    training: Training,
    observation: Observation,
    step: int,
    accuracy: float | None,
    clock: _Clock,
    writer: Writer,
    keep: Keep,
    notify: Notify,
) -> None:
    batches = training.batches(step)
    losses: list[float] = []
    while step < training.steps:
        before = observation.seconds
        with clock.running():
            batch = next(batches)
            observation.show(batch)
            losses.append(_step(training, step, batch))
        clock.seconds -= observation.seconds - before
        step += 1
        if not math.isfinite(losses[-1]):
            writer.write(_end("diverged", step, clock, f"the loss is {losses[-1]} at step {step}"))
            return
        if training.measure_at(step) or step == training.steps:
            measured = _measure(training, step, losses, clock) | observation.records()
            losses.clear()
            accuracy = measured.get("accuracy")
            _keep(training, observation, step, clock, accuracy, writer.write(measured), keep)
        notify(step, training.steps, accuracy)
    if accuracy is not None and accuracy <= training.chance:
        writer.write(_end("diverged", step, clock, f"the accuracy is {accuracy:.3f}, no better than chance"))
    else:
        writer.write(_end("done", step, clock))


def _step(training: Training, step: int, batch: Any) -> float:
    x, y = batch
    if training.rate is not None:
        for group in training.optimizer.param_groups:
            group["lr"] = training.rate(step)
    if training.update is not None:
        return training.update(x, y)
    training.optimizer.zero_grad(set_to_none=True)
    loss = training.loss(training.model(x), y)
    loss.backward()
    training.optimizer.step()
    return loss.item()


@torch.no_grad()
def _measure(training: Training, step: int, losses: list[float], clock: _Clock) -> Line:
    model = training.model
    model.eval()
    with torch.random.fork_rng(devices=[]):
        found = training.measure(model)
    model.train()
    mean_loss = sum(losses) / len(losses) if losses else None
    return {"step": step, "seconds": round(clock.seconds, 3), "loss": mean_loss, **found}


def _end(status: str, step: int, clock: _Clock, why: str | None = None) -> Line:
    return {"status": status, "step": step, "seconds": round(clock.seconds, 3), "why": why}


# ---- checkpoints: taken after a line is written, so that record and checkpoint are of the same state


def _keep(
    training: Training,
    observation: Observation,
    step: int,
    clock: _Clock,
    accuracy: float | None,
    size: int,
    keep: Keep,
) -> None:
    state = {
        "step": step,
        "accuracy": accuracy,
        "seconds": clock.seconds,
        "record": size,
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "probes": observation.state(),
    }
    keep(state)


def _restore(
    training: Training, observation: Observation, clock: _Clock, state: Line, record: Path, trial: Trial
) -> tuple[int, int, float | None]:
    """Restore a checkpoint; return its step, the length of the record and the accuracy at that step."""
    found = read_trial(record).header
    wanted = {"settings": dict(trial.arm.settings), "scale": trial.scale, "data": trial.data, "steps": training.steps}
    other = [key for key, value in wanted.items() if found.get(key) != value]
    if other:
        raise RecordError(f"{record} is of another trial: its {' and '.join(other)} differ. Choose another --out.")
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    _lay_out_like_parameters(training.optimizer)
    torch.set_rng_state(state["random"])
    observation.load_state(state.get("probes", {}))
    clock.seconds = float(state["seconds"])
    return int(state["step"]), int(state["record"]), state["accuracy"]


def _lay_out_like_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give momenta their parameters' strides, which files do not keep: a fused optimizer reads memory in order."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[key] = torch.empty_like(parameter).copy_(value)


@contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    """Make random numbers depend on the trial's seed alone, and restore the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
