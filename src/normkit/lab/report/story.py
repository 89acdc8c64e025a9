"""The report of all experiments: one page that tells their story in order, with the verdicts at its top."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from normkit.figures.page import rendered, write_text
from normkit.lab.experiment import Experiment
from normkit.lab.findings import Outcome
from normkit.lab.report.chapters import CHAPTERS, Chapter, Part
from normkit.lab.report.page import SectionView, section_view
from normkit.lab.report.section import Section

NOT_RUN = "not run"


class PartView(NamedTuple):
    """An experiment as the template takes it."""

    part: Part
    experiment: Experiment
    view: SectionView | None  # None: it has not been run


class ChapterView(NamedTuple):
    """A chapter as the template takes it."""

    id: str
    chapter: Chapter
    parts: list[PartView]


def write_story(sections: Sequence[Section], experiments: Sequence[Experiment], command: str, path: Path) -> Path:
    """Write the story of these experiments, those without a section as not run; return its path.

    The command is the one that runs the rest.
    """
    views = {section.title: section_view(section, section.title) for section in sections}
    chapters = _chapter_views({each.name: each for each in experiments}, views)
    parts = [part for chapter in chapters for part in chapter.parts]
    text = rendered(
        "story.html",
        [figure for part in parts if part.view for figure in part.view.figures],
        package="normkit.lab.report",
        chapters=chapters,
        summary=_summary(parts),
        conditions=_conditions(sections),
        is_quick=any(section.run.header["scale"] == "quick" for section in sections),
        command=None if all(map(_is_complete, parts)) else command,
    )
    return write_text(path, text)


def _chapter_views(experiments: Mapping[str, Experiment], views: Mapping[str, SectionView]) -> list[ChapterView]:
    """The chapters that have one of these experiments."""
    found: list[ChapterView] = []
    for chapter in CHAPTERS:
        named = [part for part in chapter.parts if part.name in experiments]
        if named:
            parts = [PartView(part, experiments[part.name], views.get(part.name)) for part in named]
            found.append(ChapterView(f"chapter-{len(found) + 1}", chapter, parts))
    return found


def _summary(parts: Sequence[PartView]) -> str:
    """Count verdicts: "20 experiments: 15 supported, 3 unclear, 2 not run"."""
    counts = Counter(part.view.section.findings.outcome if part.view else NOT_RUN for part in parts)
    found = ", ".join(f"{counts[each]} {each}" for each in (*get_args(Outcome), NOT_RUN) if counts[each])
    return f"{len(parts)} experiment{'' if len(parts) == 1 else 's'}: {found}"


def _conditions(sections: Sequence[Section]) -> str:
    """On what scale and data all this was run."""
    headers = [trial.header for section in sections for trial in section.run.trials]
    return " · ".join("; ".join(dict.fromkeys(str(header[key]) for header in headers)) for key in ("scale", "data"))


def _is_complete(part: PartView) -> bool:
    certainty = part.view and part.view.section.certainty
    return certainty is not None and certainty.is_complete
