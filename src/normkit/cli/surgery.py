"""`normkit fold`, `convert`, `freeze` and `recalibrate`: a model in, a safetensors file and a table out."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from torch import nn

from normkit import surgery
from normkit.cli.model_command import ModelOptions, operate, say, shown_progress
from normkit.cli.options import Format, Only, Skip
from normkit.cli.target import find_batches, find_example, find_function
from normkit.errors import ArgumentError
from normkit.named_layers import named_layers
from normkit.surgery.replace.targets import TARGETS
from normkit.surgery.result import Surgery

Target = Annotated[
    str, typer.Argument(help="The model: module:attribute or path.py:attribute, or what makes it.", show_default=False)
]
To = Annotated[str, typer.Option(help=f"{', '.join(TARGETS)}, or a function, as a target.")]
Example = Annotated[str | None, typer.Option(help="A batch, as a target: outputs before and after are compared on it.")]
ForwardOption = Annotated[str | None, typer.Option("--forward", help="A function of (model, batch), as a target.")]
CheckpointOption = Annotated[Path | None, typer.Option("--checkpoint", help="A safetensors file to fill it from.")]
Strict = Annotated[bool, typer.Option(help="Refuse a checkpoint that does not fit, or has no manifest.")]
Out = Annotated[Path | None, typer.Option(help="The safetensors file to write.", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and write nothing.")]


def fold(
    target: Target,
    example: Annotated[str, typer.Option(help="A batch, as a target: the model is watched running on it.")],
    forward: ForwardOption = None,
    checkpoint: CheckpointOption = None,
    strict: Strict = True,
    only: Only = None,
    skip: Skip = None,
    out: Out = None,
    dry_run: DryRun = False,
    format: Format = "text",
) -> None:
    """Fold BatchNorms into the convolutions and linear layers beside them, in evaluation."""

    def verb(model: nn.Module) -> Surgery:
        from normkit.surgery.fold import fold

        _evaluate(model)
        return fold(model, find_example(example), forward=_function(forward), inplace=True, **_selected(only, skip))

    operate("fold", verb, ModelOptions(target, checkpoint, strict, out, dry_run, format), keeps_function=True)


def convert(
    target: Target,
    to: To,
    example: Example = None,
    forward: ForwardOption = None,
    groups: Annotated[int | None, typer.Option(min=1, help="For --to group: the most that a layer gets.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the new layers; repeatable.")] = None,
    calibrate: Annotated[str | None, typer.Option(help="Batches, as a target, to fit gamma and beta on.")] = None,
    classes: Annotated[Literal["normkit", "torch"], typer.Option(help="Whose layers to put in.")] = "normkit",
    checkpoint: CheckpointOption = None,
    strict: Strict = True,
    only: Only = None,
    skip: Skip = None,
    out: Out = None,
    dry_run: DryRun = False,
    format: Format = "text",
) -> None:
    """Put other norms in the place of those that the model has."""
    options = _options(option or []) | ({} if groups is None else {"groups": groups})

    def verb(model: nn.Module) -> Surgery:
        from normkit.surgery.replace.convert import convert

        kind: Any = find_function(to) if ":" in to else to
        batches = None if calibrate is None else find_batches(calibrate)
        how: dict[str, Any] = {"forward": _function(forward), "calibrate": batches, "classes": classes}
        return convert(model, kind, _example(example), inplace=True, **how, **_selected(only, skip), **options)

    operate("convert", verb, ModelOptions(target, checkpoint, strict, out, dry_run, format))


def freeze(
    target: Target,
    affine: Annotated[bool, typer.Option(help="Gamma and beta too, or the statistics alone.")] = True,
    example: Example = None,
    forward: ForwardOption = None,
    checkpoint: CheckpointOption = None,
    strict: Strict = True,
    only: Only = None,
    skip: Skip = None,
    out: Out = None,
    dry_run: DryRun = False,
    format: Format = "text",
) -> None:
    """Stop the statistics of BatchNorms, for whatever training comes."""

    def verb(model: nn.Module) -> Surgery:
        from normkit.surgery.replace.freeze import freeze

        how: dict[str, Any] = {"affine": affine, "example": _example(example), "forward": _function(forward)}
        return freeze(model, inplace=True, **how, **_selected(only, skip))

    operate("freeze", verb, ModelOptions(target, checkpoint, strict, out, dry_run, format), keeps_function=True)


def recalibrate(
    target: Target,
    batches: Annotated[str, typer.Option(help="The batches to take statistics of, as a target.")],
    method: Annotated[
        Literal["pooled", "paper"], typer.Option(help="Over all values of all batches, or averages of the batches'.")
    ] = "pooled",
    exact: Annotated[bool, typer.Option("--exact", help="Layer by layer: as many passes as there are norms.")] = False,
    example: Example = None,
    forward: ForwardOption = None,
    checkpoint: CheckpointOption = None,
    strict: Strict = True,
    only: Only = None,
    skip: Skip = None,
    out: Out = None,
    dry_run: DryRun = False,
    format: Format = "text",
) -> None:
    """Replace the statistics that norms have stored by those of the batches."""

    def verb(model: nn.Module) -> Surgery:
        from normkit.surgery.statistics.recalibrate import recalibrate

        found = find_batches(batches)
        with shown_progress(None if exact else found) as progress:
            return recalibrate(
                model,
                found,
                _function(forward),
                method=method,
                exact=exact,
                example=_example(example),
                inplace=True,
                progress=progress,
                **_selected(only, skip),
            )

    operate("recalibrate", verb, ModelOptions(target, checkpoint, strict, out, dry_run, format))


def _evaluate(model: nn.Module) -> None:
    """Put the model into evaluation: folding needs it, and a command line cannot call eval()."""
    layers = [layer for _, layer in named_layers(model)]
    if any(layer.training for layer in layers):
        say("the model is in training mode: it is put into evaluation, as folding needs it.")
    for layer in layers:
        layer.eval()


def _selected(only: list[str] | None, skip: list[str] | None) -> dict[str, Any]:
    """What verbs take; options that were not given are empty lists for some versions of typer."""
    return {"only": only or None, "skip": skip or None}


def _example(target: str | None) -> Any:
    return None if target is None else find_example(target)


def _function(target: str | None) -> Any:
    return None if target is None else find_function(target)


_OWN = set(inspect.signature(surgery.convert).parameters)


def _options(given: list[str]) -> dict[str, Any]:
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ArgumentError(f"--option must be NAME=VALUE; got {text!r}. Write it as --option groups=8.")
        if name in _OWN:
            raise ArgumentError(f"--option is for options of the new layers; got {name}, which is one of the command.")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value  # a word, such as instance
    return options
