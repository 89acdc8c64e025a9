"""The project's pages, Markdown and notebooks, and the Python in them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from notebook_markdown import source_markdown

ROOT = Path(__file__).parents[2]
NOTEBOOKS = tuple(sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")))
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *NOTEBOOKS)


@dataclass(frozen=True)
class Block:
    """A Python block: its code, the line of the page above it, and what the page shows as its output, if it does."""

    code: str
    line: int
    output: str | None


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def tokens(page: Path) -> list[Token]:
    text = page.read_text()
    return MarkdownIt().parse(source_markdown(text) if page.suffix == ".ipynb" else text)


def blocks(page: Path) -> Iterator[Block]:
    found = tokens(page)
    for token, following in zip(found, [*found[1:], None], strict=True):
        if _is_fence(token, "python"):
            shown = following.content if following and _is_fence(following, "text") else None
            yield Block(token.content, token.map[0] + 1, shown)


def needs(page: Path) -> list[str]:
    """Modules that the page says it needs, by a comment `<!-- needs: timm -->`."""
    comments = [token.content.strip() for token in tokens(page) if token.type == "html_block"]
    wanted = [
        comment.removeprefix("<!-- needs:").removesuffix("-->") for comment in comments if "<!-- needs:" in comment
    ]
    return [module.strip() for modules in wanted for module in modules.split(",")]


def _is_fence(token: Token, language: str) -> bool:
    return token.type == "fence" and token.info.strip() == language
