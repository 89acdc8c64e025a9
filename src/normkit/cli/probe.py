"""`normkit probe`: what goes through a model's layers, batch by batch, without training it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import nn

from normkit.cli.model_command import in_words, said_warnings, say, shown_progress
from normkit.cli.options import Format
from normkit.cli.probe_tables import as_document, print_records
from normkit.cli.surgery import ForwardOption, Target
from normkit.cli.target import find_batches, find_function, find_model
from normkit.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    from normkit.instruments.probe import Probe
    from normkit.json_lines import Line

PROBES = ("ActivationQuantiles", "ActivationMoments", "DeadUnits", "StatisticsNoise")  # need no loss and no optimizer


def probe(
    target: Target,
    batches: Annotated[str, typer.Option(help="The batches to run, as a target; each is a step.")],
    probe: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PROBES)}; repeatable. All if left out.")] = None,
    forward: ForwardOption = None,
    out: Annotated[Path | None, typer.Option(help="A file of JSON lines for the records.")] = None,
    report: Annotated[Path | None, typer.Option(help="An HTML file for figures of the records.")] = None,
    format: Format = "text",
) -> None:
    """Run batches through a model as it is, and show what probes measure of its layers."""
    names = _checked(probe or PROBES)
    _check_files(out, report)
    with redirect_stdout(sys.stderr), in_words(), said_warnings():  # the output of a user's module is not part of ours
        model = find_model(target)
        records = _recorded(model, _fitting(names, model), find_batches(batches), forward, out)
        if report is not None:
            from normkit.instruments.plots import report as write_report

            say(f"written: {write_report(records, report, f'What probes recorded of {target}')}")
    if format == "json":
        print(json.dumps(as_document(target, records, out, report), indent=2))
    else:
        print_records(records)


def _checked(names: Iterable[str]) -> list[str]:
    from normkit.instruments import probes

    for name in names:
        if name in PROBES:
            continue
        if name in probes.__all__:
            raise ArgumentError(
                f"--probe {name} needs a training step, and nothing is trained here. Use nk.attach in a training loop."
            )
        raise ArgumentError(f"--probe must be one of {', '.join(PROBES)}; got {name!r}.{did_you_mean(name, PROBES)}")
    return list(dict.fromkeys(names))


def _check_files(*paths: Path | None) -> None:
    """Refuse what cannot be written before the work, not after it."""
    for path in paths:
        if path is not None and path.is_dir():
            raise ArgumentError(f"--out and --report must be files; {path} is a folder. Name a file in it.")


def _fitting(names: Iterable[str], model: nn.Module) -> list[Probe]:
    """The probes that find layers to measure; of the others it is said that they do not."""
    from normkit.instruments import probes
    from normkit.instruments.probe import Watched

    found: list[Probe] = []
    for name in names:
        made: Probe = getattr(probes, name)()
        try:
            made.begin(Watched(model, None))
        except ArgumentError as error:
            say(f"left out: {error}")
        else:
            found.append(made)
    if not found:
        raise ArgumentError(
            f"{type(model).__name__} has no layer that these probes measure. Choose others with --probe."
        )
    return found


def _recorded(
    model: nn.Module, probes: list[Probe], batches: Iterable[Any], forward: str | None, out: Path | None
) -> list[Line]:
    from normkit.batches import each_batch, feed
    from normkit.instruments import attach

    run = None if forward is None else find_function(forward)
    with attach(model, probes, every=1, out=out) as recorder, torch.no_grad(), shown_progress(batches) as progress:
        for done, batch in enumerate(each_batch(batches), 1):
            feed(model, batch, run)
            recorder.step()
            progress(done)
    if not recorder.records:
        raise ArgumentError("nothing was recorded: the batches went through none of the layers that probes measure.")
    if out is not None:
        say(f"written: {out}")
    return recorder.records
