"""Options that commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Format = Annotated[Literal["text", "json"], typer.Option("--format", help="For people, or for programs.")]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", help="A layer to work on, with all inside it: a name or a shell pattern; repeatable."),
]
Skip = Annotated[
    list[str] | None,
    typer.Option("--skip", help="A layer to leave alone, with all inside it: a name or a shell pattern; repeatable."),
]
