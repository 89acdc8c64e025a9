"""The page of all experiments, read without a browser, and read again by a second reader who trusts no number."""

import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from normkit.lab import write_report_of
from normkit.lab.certainty import Certainty
from normkit.lab.experiments import NAMES, experiment_named
from normkit.lab.record import read_run
from normkit.lab.report import story as story_module
from normkit.lab.report import write_story
from normkit.lab.report.chapters import CHAPTERS
from normkit.lab.report.numbers import DOCUMENT
from support import report_samples
from support.html_reader import VOID, Reader
from support.written_runs import MADE_UP, write_run

DOCUMENTED = Path(__file__).parents[3] / "docs" / "lab" / "all"
PARTS = {part.name: part for chapter in CHAPTERS for part in chapter.parts}
TEXTS = [text for chapter in CHAPTERS for text in (chapter.text, *(part.text for part in chapter.parts))]
# What papers report, with what it is.
REPORTED = {
    "31.0": "million steps to 72.2%, Inception (2015, figure 3)",
    "72.2": "% of accuracy, Inception (2015, figure 3)",
    "2.1": "million steps to 72.2%, BN-x5 (2015, figure 3)",
    "14": "times fewer steps (2015, abstract)",
    "23.6": "% of error, BN, 32 images for each device (Wu & He 2018)",
    "32": "images for each device",
    "34.7": "% of error, BN, 2 images for each device",
    "2": "images for each device",
    "24.1": "% of error, group norm, 32 and 2 images for each device",
}
CITED = re.compile(r"[A-Z]\w+ (?:& [A-Z]\w+|et al\.) (20\d\d)\b")
NUMBER = re.compile(r"(?<![A-Za-z])\d+(?:,\d{3})*(?:\.\d+)?")  # L2 is a name


@pytest.fixture(scope="module")
def page(story):
    return Reader(story.read_text(encoding="utf-8"))


def test_every_experiment_has_its_place_in_the_story():
    names = [part.name for chapter in CHAPTERS for part in chapter.parts]
    assert len(names) == len(set(names))
    assert [name for name in NAMES if name not in names] == []


def test_the_verdicts_come_first_each_with_how_sure_it_is(page):
    table = page.of("table")[0]
    assert table["class"] == "verdicts"
    text = " ".join(table["text"].split())
    claims = {name: experiment_named(name).claim for name in NAMES}
    assert f"inception✓ supportedthe same in 2 of 3 seeds alone, unclear in 1{claims['inception']}" in text
    assert f"sigmoid-mlp? unclearincomplete: 0 of 2 trials have ended{claims['sigmoid-mlp']}" in text
    assert f"affinenot run{claims['affine']}" in text


def test_every_row_leads_to_an_experiment_and_every_chapter_to_its_text(page):
    targets = [e["href"] for e in page.of("a") if e["href"].startswith("#")]
    ids = [e["id"] for e in page.elements if "id" in e]
    assert len(ids) == len(set(ids))
    assert {target[1:] for target in targets} <= set(ids)
    assert set(NAMES) <= {target[1:] for target in targets}
    assert [e["id"] for e in page.of("section", class_="part")] == [name for name in PARTS if name in NAMES]


def test_it_tells_each_experiment_with_its_question_verdict_and_first_figure(page):
    (inception,) = page.of("section", id="inception")
    found = report_samples.paper_findings()
    for said in (PARTS["inception"].question, PARTS["inception"].text, found.claim, *found.reasons):
        assert said in inception["text"]
    (folded,) = [e for e in page.of("details", class_="whole") if "All of inception" in e["text"]]
    assert found.figures[0].title not in folded["text"]
    for said in (found.figures[1].title, found.tables[0].title, *found.notes, "What was run on what"):
        assert said in folded["text"]


def test_what_was_not_run_is_said_and_how_to_run_it(page):
    (affine,) = page.of("section", id="affine")
    assert "affine has not been run." in affine["text"]
    assert experiment_named("affine").claim in affine["text"]
    header = page.of("header", class_="page")[0]["text"]
    assert f"{len(NAMES)} experiments: 1 supported, 1 unclear, {len(NAMES) - 2} not run." in header
    assert "normkit lab run all --out story --resume" in header


def test_what_is_complete_needs_no_command(tmp_path):
    section = report_samples.story_sections()[0]
    path = write_story([section], [experiment_named("inception")], "the command", tmp_path / "r.html")
    whole = Reader(path.read_text(encoding="utf-8"))
    assert "the command" not in whole.of("body")[0]["text"]
    assert "1 experiment: 1 supported." in whole.of("header", class_="page")[0]["text"]
    assert len(whole.of("section", class_="chapter")) == 1


def test_figures_hold_the_numbers_of_the_findings(page):
    drawn = json.loads(page.of("script", id="figures")[0]["text"])
    assert list(drawn) == [e["id"] for e in page.of("figure")]
    figures = report_samples.paper_findings().figures
    curves = [drawn[f"inception-figure-{i}"]["curves"] for i in (1, 2)]
    assert [[curve["x"] for curve in of] for of in curves] == [[curve.x for curve in of.curves] for of in figures]
    assert {curve["colour"] for curve in drawn["sigmoid-mlp-figure-1"]["curves"]} == {0}  # each part begins anew


def test_nothing_breaks_out_and_nothing_is_fetched(page):
    assert [s.get("type") for s in page.of("script")] == ["application/json", None, None]
    assert page.of("b") == []
    links = [e.get("src") or e.get("href") for e in page.elements if "src" in e or "href" in e]
    assert [link for link in links if not link.startswith(("#", "data:"))] == []


# ---- the second reader


def sentences(text):
    return re.split(r"(?<=[.?:;])(?<!et al\.) ", text)


def numbers_without_a_source(text):
    """Numbers of a text that no paper reports, or in a sentence that names none."""
    found = []
    for sentence in sentences(text):
        years = CITED.findall(sentence)
        numbers = [number for number in NUMBER.findall(sentence) if number not in years]
        found += [number for number in numbers if number not in REPORTED or not years]
    return found


class Story(HTMLParser):
    """The text that a reader sees before anything is unfolded, by the experiment that it is of; "" is for the rest."""

    HIDDEN = ("details", "script", "style", "title", "pre")

    def __init__(self, text):
        super().__init__()
        self.texts, self._open = {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self._open.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        if not any(tag in self.HIDDEN for tag, _ in self._open):
            parts = [of["id"] for tag, of in self._open if tag == "section" and of.get("class") == "part"]
            name = parts[0] if parts else ""
            self.texts[name] = self.texts.get(name, "") + data


def page_of(directory):
    return (directory / "report.html").read_text(encoding="utf-8")


def said_by(findings):
    """Every string that an experiment's findings bring to the story."""
    figure = findings["figures"][0]
    yield from (findings["claim"], findings["source"], *findings["reasons"])
    yield from (figure["title"], figure["note"], figure["x_title"], figure["y_title"])
    yield from (
        f"{curve['name']} (published)" if curve["is_published"] else curve["name"] for curve in figure["curves"]
    )


def counted(trials, section):
    """What may be counted in an experiment's trials and verdicts, and its arms, whose names stand by pictures."""
    arms, seeds = ({trial.header[key] for trial in trials} for key in ("arm", "seed"))
    ends = Counter(trial.end["status"] for trial in trials)
    return [
        *arms,
        *(f"{len(each)} {noun}" for each, noun in ((arms, "arm"), (seeds, "seed"), (trials, "trial"))),
        *(f"{number} {status}" for status, number in ends.items()),
        Certainty(**section["certainty"]).text(section["findings"]["outcome"]),
    ]


def unexplained(directory):
    """Numbers of a story that stem neither from its experiments' findings nor from a paper."""
    sections = {each["title"]: each for each in json.loads((directory / DOCUMENT).read_text())["sections"]}
    runs = {str(run.header["experiment"]): run for run in read_run(directory).by_experiment()}
    known = {name: [experiment_named(name).claim, experiment_named(name).source] for name in NAMES}
    for name, section in sections.items():
        known[name] += [*said_by(section["findings"]), *counted(runs[name].trials, section)]
    outcomes = Counter(section["findings"]["outcome"] for section in sections.values())
    outcomes["not run"] = len(NAMES) - len(sections)
    counts = [f"{len(NAMES)} experiments", *(f"{number} {outcome}" for outcome, number in outcomes.items())]
    known[""] = [*counts, *(text for texts in known.values() for text in texts)]
    texts = Story(page_of(directory)).texts
    return [number for name in texts for number in numbers_without_a_source(without(texts[name], known[name]))]


def without(text, strings):
    """A text from which these strings have been taken, longer ones first."""
    text = " ".join(text.split())
    for string in sorted(filter(None, strings), key=len, reverse=True):
        text = text.replace(" ".join(string.split()), " ")
    return text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = write_run(tmp_path_factory.mktemp("story") / "run")
    assert [section.findings.outcome for section in write_report_of(directory).sections] == ["supported"] * len(MADE_UP)
    return directory


def test_every_number_of_the_story_stems_from_its_findings_or_from_a_paper(run):
    assert unexplained(run) == []


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The run that the documentation keeps, with its page written again."""
    directory = tmp_path_factory.mktemp("kept") / "all"
    shutil.copytree(DOCUMENTED, directory)
    (directory / "report.html").unlink()
    assert {section.title for section in write_report_of(directory).sections} == set(NAMES)
    return directory


@pytest.mark.deep
def test_every_number_of_the_documented_story_stems_from_its_records(kept):
    assert unexplained(kept) == []


@pytest.mark.deep
def test_the_documented_page_is_the_one_that_its_records_give(kept):
    assert Story(page_of(DOCUMENTED)).texts == Story(page_of(kept)).texts
    drawn = [Reader(page_of(each)).of("script", id="figures")[0]["text"] for each in (DOCUMENTED, kept)]
    assert drawn[0] == drawn[1]


def test_numbers_that_were_typed_into_sentences_are_found(tmp_path, monkeypatch):
    typed = ("With BN it is 3.7 times faster.", "Ioffe & Szegedy 2015 report 97 layers.", "Here 2 nets are compared.")
    chapters = [each._replace(text=text) for each, text in zip(CHAPTERS, typed, strict=False)]
    monkeypatch.setattr(story_module, "CHAPTERS", (*chapters, *CHAPTERS[len(typed) :]))
    write_report_of(write_run(tmp_path))
    assert unexplained(tmp_path) == ["3.7", "97", "2"]


def test_what_the_nets_end_with_is_in_the_records(run):
    """Read again without the lab's own summaries; with two seeds a range is all there is, and a median is between."""
    trials = [trial for trial in read_run(run).trials if trial.header["experiment"] == "sigmoid-mlp"]
    ends = {arm: [t.measured[-1]["accuracy"] for t in trials if t.arm == arm] for arm in ("bn", "plain")}
    bn, plain = (f"{sum(of) / 2:.4f} ({min(of):.4f} to {max(of):.4f})" for of in ends.values())
    assert f"At the end: BN {bn}, plain {plain}." in Story(page_of(run)).texts["sigmoid-mlp"]


def test_the_chapters_hold_no_number_but_those_that_papers_report():
    assert [number for text in TEXTS for number in numbers_without_a_source(text)] == []
    assert [part.question for part in PARTS.values() if NUMBER.search(part.question)] == []
    said = {number for text in TEXTS for number in NUMBER.findall(text)}
    assert set(REPORTED) <= said
