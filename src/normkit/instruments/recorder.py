"""Attach probes to a model in training, and keep what they record."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normkit.atomic import replacing
from normkit.errors import ArgumentError, NormkitWarning
from normkit.hooks import hooked
from normkit.instruments.outputs import LogOutput, Output
from normkit.instruments.probe import Probe, Reading, Watched
from normkit.json_lines import Line, LineWriter


class Recorder:
    """What `attach` returns: the records so far, and the probes' hold on the model, which ends with `close`.

    Attributes:
        records: one dictionary for each probe, layer and recorded step: "step", "probe", "layer", and numbers.
        seconds: what each probe has taken in all, by its name.
        stopped: probes that failed, by name, with the reason. The run goes on without them.
    """

    def __init__(
        self,
        model: nn.Module,
        probes: Sequence[Probe],
        every: int | Callable[[int], bool],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.records: list[Line] = []
        self.seconds: dict[str, float] = {probe.name: 0.0 for probe in probes}
        self.stopped: dict[str, str] = {}
        self._outputs: list[Output] = []
        self._recorded = 0
        self._is_recorded: Callable[[int], bool] = every if callable(every) else lambda step: step % every == 0
        self._watched = Watched(model, optimizer)
        self._probes = list(probes)
        self._seen: set[tuple[int, str]] = set()  # which probe has seen which layer at this step
        self._is_busy = False  # a probe evaluates the model itself
        self._hold = ExitStack()
        for probe in probes:
            probe.begin(self._watched)
        after = [(layer, partial(self._saw, probe, name)) for probe in probes for name, layer in probe.layers]
        self._hold.enter_context(hooked(after=after))
        if optimizer is not None:
            self._hold.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            self._hold.callback(optimizer.register_step_post_hook(self._after_update).remove)

    def write_to(self, output: Output) -> None:
        """Write records to an output as well, from now on; it is closed with the recorder."""
        self._outputs.append(output)
        self._hold.callback(output.close)

    # ---- the run

    @property
    def is_due(self) -> bool:
        """Whether the present step is recorded."""
        return self._is_recorded(self._watched.step)

    def step(self) -> None:
        """End a step, where no optimizer was given whose steps are seen."""
        if self._watched.optimizer is not None:
            raise ArgumentError("the optimizer's own steps are counted; step() is for attach without optimizer=.")
        self._before_update()
        self._after_update()

    def close(self) -> None:
        """Let go of the model and the optimizer, which are as they were without probes. The records stay."""
        self._hold.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _saw(
        self, probe: Probe, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        key = (id(probe), name)
        # Of a run that trains, evaluations in between are not part.
        is_other = self._watched.optimizer is not None and not torch.is_grad_enabled()
        if not self.is_due or self._is_busy or is_other or key in self._seen or probe.name in self.stopped:
            return
        self._seen.add(key)
        with self._guarded(probe):
            probe.saw(name, layer, (*args, *kwargs.values()), output)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A step begins: the gradient is there, or else the closure that the step is given will compute it."""
        _, *given = args  # the optimizer itself
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            self._before_update()
            return None
        evaluations = 0

        def watched() -> Any:
            nonlocal evaluations
            loss, evaluations = closure(), evaluations + 1
            if evaluations == 1:  # those that follow are at other parameters
                self._before_update()
            return loss

        if given:
            return (optimizer, watched, *given[1:]), kwargs
        return args, {**kwargs, "closure": watched}

    def _before_update(self) -> None:
        self._collect(lambda probe: probe.before_update(self._watched))

    def _after_update(self, *_: object) -> None:
        self._collect(lambda probe: probe.after_update(self._watched))
        self._recorded += self.is_due
        self._watched.step += 1
        self._seen.clear()

    def _collect(self, event: Callable[[Probe], Iterator[Reading]]) -> None:
        if not self.is_due:
            return
        for probe in self._probes:
            if probe.name not in self.stopped:
                with self._guarded(probe):
                    self._keep(probe, list(event(probe)))

    def _keep(self, probe: Probe, readings: Iterable[Reading]) -> None:
        for layer, numbers in readings:
            record = {"step": self._watched.step, "probe": probe.name, "layer": layer, **numbers}
            self.records.append(record)
            for output in self._outputs:
                output.write(record)

    @contextmanager
    def _guarded(self, probe: Probe) -> Iterator[None]:
        """Time a probe; one that fails is stopped with a warning, and what it watches goes on."""
        start, self._is_busy = time.perf_counter(), True
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self.stopped[probe.name] = why
            warnings.warn(
                f"{probe.name} was stopped at step {self._watched.step}, and the run goes on: {why}",
                NormkitWarning,
                stacklevel=4,
            )
        finally:
            self._is_busy = False
            self.seconds[probe.name] += time.perf_counter() - start

    # ---- state, for a run that is resumed

    def state(self) -> dict[str, Any]:
        """The number of steps, and what probes remember of those before, as nested dictionaries and lists."""
        return {"step": self._watched.step, "probes": {probe.name: probe.state() for probe in self._probes}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._watched.step = int(state["step"])
        for probe in self._probes:
            probe.load_state(state["probes"].get(probe.name, {}))

    # ---- what it recorded

    def of(self, probe: str, layer: str | None = None) -> list[Line]:
        """The records of one probe, of all layers or one."""
        return [r for r in self.records if r["probe"] == probe and layer in (None, r["layer"])]

    def costs(self) -> dict[str, float]:
        """Seconds that each probe takes at a recorded step, on average."""
        return {name: seconds / max(1, self._recorded) for name, seconds in self.seconds.items()}

    def save(self, path: str | Path) -> Path:
        """Write all records so far as JSON lines; the file appears whole."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part, LineWriter(part) as writer:
            for record in self.records:
                writer.write(record)
        return path

    def plot(self, probe: str, **options: Any) -> Any:
        """A plot of one probe's records: see `normkit.instruments.plots.plot`."""
        from normkit.instruments.plots import plot

        return plot(self.records, probe, **options)

    def __repr__(self) -> str:
        costs = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in self.costs().items())
        stopped = f"; stopped: {', '.join(self.stopped)}" if self.stopped else ""
        return f"Recorder({len(self.records)} records of {self._recorded} steps; each: {costs}{stopped})"


def attach(
    model: nn.Module,
    probes: Probe | Sequence[Probe],
    every: int | Callable[[int], bool] = 100,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    out: str | Path | None = None,
    tensorboard: str | Path | None = None,
) -> Recorder:
    """Measure a model while it trains, at every so many steps, without changing anything about the run.

    Use it as `with nk.attach(model, probes, optimizer=optimizer) as recorder:` around the training loop, or keep what
    it returns and call its `close()`.

    Args:
        model: any model; its layers are measured where they are.
        probes: what to measure: see `nk.probes`.
        every: record one step in so many, beginning with the first; or a function that says of a step, by the number of
            those before it, whether it is recorded.
        optimizer: a step ends with its `step()`; without it, call `recorder.step()` at the end of each.
        out: a file that every record is written to at once, as JSON lines.
        tensorboard: a folder for TensorBoard's logs.
    """
    probes = [probes] if isinstance(probes, Probe) else list(probes)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"attach needs a torch.nn.Module; got a {type(model).__name__}.")
    wrong = next((probe for probe in probes if not isinstance(probe, Probe)), None)
    if wrong is not None or not probes:
        got = "none" if not probes else repr(wrong)
        raise ArgumentError(f"attach needs probes, such as nk.probes.ActivationMoments(); got {got}.")
    names = [probe.name for probe in probes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ArgumentError(f"attach takes one probe of a kind; got {names.count(twice)} of {twice}.")
    if not callable(every) and (type(every) is not int or every < 1):
        raise ArgumentError(f"every must be a whole number of steps, 1 or more; got {every!r}.")
    recorder = Recorder(model, probes, every, optimizer)
    try:
        if out is not None:
            recorder.write_to(LineWriter(Path(out)))
        if tensorboard is not None:
            recorder.write_to(LogOutput(Path(tensorboard)))
    except BaseException:
        recorder.close()
        raise
    return recorder
