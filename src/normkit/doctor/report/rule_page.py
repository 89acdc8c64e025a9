"""The page of a rule, which is its docstring: as Markdown, and on a terminal."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

if TYPE_CHECKING:
    from normkit.doctor.rule import Rule

TITLES = ("Why it hurts", "Evidence and threshold", "Not a fault when", "Remedy")
_TITLE = re.compile(rf"^({'|'.join(TITLES)}):[ \t]*", re.MULTILINE)

# What sees a fault, as users call it.
_CALLS = {
    "examine": "nk.examine",
    "watch": "nk.watch",
    "load": "nk.load",
    "fold": "nk.fold",
    "export": "nk.check_export",
}


class Section(NamedTuple):
    """A part of a rule's page; the first has no title."""

    title: str
    text: str


def sections(rule: Rule) -> list[Section]:
    """The parts of a rule's page, in the order in which it has them."""
    first, *rest = _TITLE.split(inspect.cleandoc(rule.page))
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return [Section("", first.strip()), *(Section(title, inspect.cleandoc(text)) for title, text in pairs)]


def as_markdown(rule: Rule) -> str:
    """The page without a heading, so that it can stand under any."""
    parts = [part for title, text in sections(rule) for part in (f"**{title}**" if title else "", text) if part]
    return "\n\n".join([*parts, seen_sentence(rule)])


def seen_sentence(rule: Rule) -> str:
    """How severe a rule's findings are, and what finds them."""
    seen = " and ".join(f"`{call}`" for way, call in _CALLS.items() if way in rule.seen_by)
    return f"Severity: {rule.severity}. Seen by {seen}."


def terminal_page(rule: Rule) -> RenderableType:
    """The page for rich to print."""
    return Group(*_parts(rule))


def _parts(rule: Rule) -> Iterator[RenderableType]:
    yield Text(f"{rule.code} {rule.name}", style="bold")
    for title, text in sections(rule):
        yield Text(f"\n{title}" if title else "", style="bold")
        yield from (Padding(Text(line), (0, 0, 0, 2 if title else 0)) for line in _paragraphs(text))
    yield Text(f"\n{seen_sentence(rule).replace('`', '')}", style="dim")


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs as single lines, which the terminal wraps; code, which is indented, and lists as they are."""
    for paragraph in re.split(r"\n\s*\n", text):
        is_kept = all(line.startswith(("    ", "- ", "  ")) for line in paragraph.splitlines())
        yield paragraph if is_kept else " ".join(paragraph.split())
