import re

import pytest

import normkit
from normkit import layers, surgery
from support.pages import PAGES, ROOT, name, tokens

DOCUMENTS = (*PAGES, ROOT / "CONTRIBUTING.md")
FOLDERS = ("src", "tests", "docs", "tools", "benchmarks", "csrc", "changelog")
FILE_NAME = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`")
LAYERS = ROOT / "docs" / "layers"
SURGERY = ROOT / "docs" / "surgery"
VERBS = [each for each in surgery.__all__ if each.islower()]
SHARED_PAGES = {"unfreeze": "freeze", "load": "save", "manifest": "save"}


def links(page):
    inside = [child for token in tokens(page) for child in token.children or ()]
    targets = [
        child.attrs.get("href") or child.attrs.get("src") for child in inside if child.type in ("link_open", "image")
    ]
    return [target for target in targets if not re.match(r"https?:|mailto:|#", target)]


def headings(folder):
    return " ".join(page.read_text().splitlines()[0] for page in folder.glob("*.md"))


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_every_relative_link_leads_to_a_file(page):
    assert [link for link in links(page) if not (page.parent / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_every_file_that_is_named_exists(page):
    assert [path for path in FILE_NAME.findall(page.read_text()) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("layer", layers.__all__)
def test_every_layer_has_a_page_and_an_api_entry(layer):
    described = " ".join(page.read_text() for page in LAYERS.glob("*.md"))
    assert re.search(rf"\b{layer}\b", described)
    assert re.search(rf":: normkit\.{layer}$", (ROOT / "docs/reference/layers.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("layer", [each for each in layers.__all__ if each[0].isupper()])
def test_a_page_is_headed_with_every_layer(layer):
    assert re.search(rf"\b{layer}\b", headings(LAYERS))


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_page_and_an_api_entry(verb):
    page = SURGERY / f"{SHARED_PAGES.get(verb, verb)}.md"
    assert f"nk.{verb}(" in page.read_text()
    assert f":: normkit.{verb}\n" in (ROOT / "docs/reference/surgery.md").read_text()


def test_every_public_name_is_in_the_reference():
    reference = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    modules = {"functional", "layers"}
    assert [each for each in normkit.__all__ if each not in modules and f":: normkit.{each}\n" not in reference] == []


def test_every_layer_and_verb_is_in_the_list_of_its_folder():
    for folder in (LAYERS, SURGERY, ROOT / "docs" / "lab", ROOT / "docs" / "reference"):
        index = (folder / "index.md").read_text()
        assert [
            page.name for page in folder.glob("*.md") if page.name != "index.md" and f"({page.name})" not in index
        ] == []
