"""Options that commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Format = Annotated[Literal["text", "json"], typer.Option("--format", help="For people, or for programs.")]
