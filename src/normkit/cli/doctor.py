"""`normkit doctor`: what is wrong with a model's normalization, and what to do about it."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from torch import nn

from normkit.cli.doctor_tables import print_rules, rules_document
from normkit.cli.model_command import fill, in_words, say
from normkit.cli.surgery import CheckpointOption, ForwardOption, Strict
from normkit.cli.surgery_tables import as_document as as_surgery_document
from normkit.cli.target import file_of, find_batches, find_function, find_model
from normkit.errors import ArgumentError
from normkit.jsonable import jsonable

if TYPE_CHECKING:
    from normkit.doctor.config import Settings
    from normkit.doctor.cure import Cure
    from normkit.doctor.diagnosis import Diagnosis

Model = Annotated[
    str | None, typer.Argument(help="The model: module:attribute or path.py:attribute, or what makes it.")
]
BatchesOption = Annotated[str | None, typer.Option("--batches", help="The batches to run, as a target.")]
LossOption = Annotated[str | None, typer.Option("--loss", help="A function of (output, target), or its class.")]
OptimizerOption = Annotated[str | None, typer.Option("--optimizer", help="A function of the model, as a target.")]
Select = Annotated[str | None, typer.Option(help="Only these rules: codes or beginnings of codes, by commas.")]
Ignore = Annotated[str | None, typer.Option(help="Not these rules: codes or beginnings of codes, by commas.")]
FailOn = Annotated[
    Literal["error", "warning", "info"] | None,
    typer.Option(help="The least severity for exit code 1; warning, if pyproject.toml says nothing else."),
]
DoctorFormat = Annotated[Literal["text", "json", "sarif", "html"], typer.Option("--format", help="What to write.")]
Out = Annotated[Path | None, typer.Option(help="A file for the report, instead of stdout.")]
CureOption = Annotated[Path | None, typer.Option("--cure", help="A safetensors file for the model, mended.")]
ListRules = Annotated[bool, typer.Option("--rules", help="List all rules, and examine nothing.")]
Explain = Annotated[str | None, typer.Option(help="Print the page of a rule, by its code or name.")]


def doctor(
    target: Model = None,
    batches: BatchesOption = None,
    loss: LossOption = None,
    forward: ForwardOption = None,
    optimizer: OptimizerOption = None,
    checkpoint: CheckpointOption = None,
    strict: Strict = True,
    select: Select = None,
    ignore: Ignore = None,
    fail_on: FailOn = None,
    format: DoctorFormat = "text",
    out: Out = None,
    cure: CureOption = None,
    rules: ListRules = False,
    explain: Explain = None,
) -> None:
    """Examine a model on some batches: what is wrong with its normalization, where, and what to do about it."""
    if rules or explain is not None:
        _show_rules(explain, format)
        return
    if target is None or batches is None:
        raise ArgumentError("a model and its batches are needed: normkit doctor TARGET --batches TARGET.")
    _check_files(out, cure)
    settings = _settings(select, ignore, fail_on)
    with redirect_stdout(sys.stderr), in_words():  # the output of a user's module is not part of ours
        model = find_model(target)
        if checkpoint is not None:
            fill(model, checkpoint, strict)
        diagnosis = _examined(model, batches, loss, optimizer, forward, settings)
        mended = None if cure is None else _mended(diagnosis, cure)
    _report(diagnosis, mended, target, format, out)
    if settings.fails(diagnosis.findings):
        raise typer.Exit(1)


def _show_rules(explain: str | None, format: str) -> None:
    from normkit.doctor.report.rule_page import terminal_page
    from normkit.doctor.rule import chosen

    found = chosen(explain, None)
    if format == "json":
        print(json.dumps(rules_document(found), indent=2))
    elif explain is None:
        print_rules(found)
    else:
        for rule in found:
            Console(highlight=False).print(terminal_page(rule))


def _check_files(*paths: Path | None) -> None:
    """Refuse what cannot be written before the work, not after it."""
    for path in paths:
        if path is not None and path.is_dir():
            raise ArgumentError(f"--out and --cure must be files; {path} is a folder. Name a file in it.")


def _settings(select: str | None, ignore: str | None, fail_on: Any) -> Settings:
    """Those of pyproject.toml, but for what the command line says."""
    from normkit.doctor.config import find_settings
    from normkit.doctor.rule import chosen

    chosen(select, ignore)  # refuses a code that no rule has before the work
    said = {
        "select": None if select is None else select.split(","),
        "ignore": None if ignore is None else ignore.split(","),
        "fail_on": fail_on,
    }
    return replace(find_settings(Path.cwd()), **{key: value for key, value in said.items() if value is not None})


def _examined(
    model: nn.Module, batches: str, loss: str | None, optimizer: str | None, forward: str | None, settings: Settings
) -> Diagnosis:
    """Examine a model with what these targets are."""
    from normkit.doctor import examine

    judge = None if loss is None else find_function(loss)
    diagnosis = examine(
        model,
        find_batches(batches),
        judge() if isinstance(judge, type) else judge,  # torch.nn:CrossEntropyLoss is a class
        None if optimizer is None else find_function(optimizer)(model),
        None if forward is None else find_function(forward),
        select=settings.select,
        ignore=settings.ignore,
    )
    return replace(diagnosis, findings=settings.counted(diagnosis.findings))


def _mended(diagnosis: Diagnosis, path: Path) -> Cure:
    from normkit.surgery.checkpoint import save

    mended = diagnosis.cure(inplace=True)  # the model is of this process alone
    save(mended.model, path)
    say(f"written: {path}")
    return mended


def _report(diagnosis: Diagnosis, mended: Cure | None, target: str, format: str, out: Path | None) -> None:
    if format == "text" and out is None:
        _print_text(diagnosis, mended)
        return
    text = _text(diagnosis, mended, target, format)
    if out is None:
        print(text)
    else:
        from normkit.figures.page import write_text

        write_text(out, f"{text.rstrip()}\n")
        say(f"written: {out}")


def _print_text(diagnosis: Diagnosis, mended: Cure | None) -> None:
    from normkit.doctor.report.text import WIDTH, terminal_report

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(terminal_report(diagnosis))
    if mended is not None:
        print(f"\n{mended}")


def _text(diagnosis: Diagnosis, mended: Cure | None, target: str, format: str) -> str:
    if format == "json":
        from normkit.doctor.report.document import as_document

        document = {"command": "doctor", "target": target, **as_document(diagnosis), "cure": _cure_document(mended)}
        return json.dumps(document, indent=2)
    if format == "sarif":
        return diagnosis.to_sarif(file_of(target))
    if format == "html":
        from normkit.doctor.report.page import diagnosis_page

        return diagnosis_page(diagnosis)
    return str(diagnosis) if mended is None else f"{diagnosis}\n\n{mended}"


def _cure_document(mended: Cure | None) -> dict[str, Any] | None:
    if mended is None:
        return None
    steps = [jsonable(step._asdict()) for step in mended.steps]
    return as_surgery_document(mended) | {"measure": mended.measure, "steps": steps}
