"""A diagnosis as SARIF 2.1.0, which GitHub, GitLab and editors show beside the code.

A finding of `watch` stands on the line that wrote the statistics. One of `examine` is about a layer, not a line: it
stands where the model's class is defined, or in the file that is named for such findings; its layer is a logical
location.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from torch import nn

from normkit.doctor.report.rule_page import as_markdown, sections
from normkit.doctor.report.summary import SEVERITIES
from normkit.doctor.rule import RULES, Rule
from normkit.environment import version_of
from normkit.finding import Finding, Severity
from normkit.jsonable import jsonable
from normkit.named_layers import display_name

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
DOCUMENTATION = "https://normkit.github.io/normkit/"
_ROOT = "%SRCROOT%"  # the folder that relative addresses belong to, by the name that GitHub gives it
_LEVELS: dict[Severity, str] = dict(zip(SEVERITIES, ("error", "warning", "note"), strict=True))


class Place(NamedTuple):
    """A line of a file."""

    file: str
    line: int = 1


def sarif_text(findings: Sequence[Finding], place: Place | None = None) -> str:
    """Findings of a diagnosis or of a ledger as a SARIF file; all rules are described in it.

    Args:
        findings: what was found.
        place: where findings stand that no line of code is known for.
    """
    return json.dumps(sarif_document(findings, list(RULES.values()), place), indent=2)


def sarif_document(findings: Sequence[Finding], rules: Sequence[Rule], place: Place | None = None) -> dict[str, Any]:
    """Findings, and the rules that they come from.

    Args:
        findings: of a diagnosis or of a ledger.
        rules: all that could have been found.
        place: where findings stand that no line of code is known for.
    """
    index = {rule.code: number for number, rule in enumerate(rules)}
    driver: dict[str, Any] = {
        "name": "normkit doctor",
        "informationUri": f"{DOCUMENTATION}doctor/index.html",
        "rules": [_descriptor(rule) for rule in rules],
    }
    version = version_of("normkit")
    run = {
        "tool": {"driver": driver if version is None else driver | {"version": version}},
        "columnKind": "utf16CodeUnits",
        "results": [_result(finding, index, place) for finding in findings],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def place_of(model: nn.Module) -> Place | None:
    """Where a model's class is defined; None if that is in an installed package, or not in a file."""
    try:
        file, (_, line) = inspect.getfile(type(model)), inspect.getsourcelines(type(model))
    except (OSError, TypeError):  # defined in a console, or built in
        return None
    return Place(file, line) if _is_within(Path(file), Path.cwd()) else None


def _descriptor(rule: Rule) -> dict[str, Any]:
    markdown = as_markdown(rule)
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": " ".join(sections(rule)[0].text.split())},
        "help": {"text": markdown.replace("**", "").replace("`", ""), "markdown": markdown},
        "helpUri": f"{DOCUMENTATION}doctor/{rule.code}.html",
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"tags": ["normalization"]},
    }


def _result(finding: Finding, index: dict[str, int], place: Place | None) -> dict[str, Any]:
    where = "" if finding.layer is None else f"{display_name(finding.layer)}: "
    seen = finding.evidence.get("file")
    at = place if seen is None else Place(str(seen), int(finding.evidence.get("line", 1)))
    location = dict(_location(finding.layer, at))
    return {
        "ruleId": finding.code,
        **({"ruleIndex": index[finding.code]} if finding.code in index else {}),
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{where}{finding.message} {finding.remedy}".rstrip()},
        "locations": [location] if location else [],
        "partialFingerprints": {"normkitFinding/v1": _fingerprint(finding)},
        "properties": jsonable(dict(finding.evidence)),
    }


def _location(layer: str | None, place: Place | None) -> Iterator[tuple[str, Any]]:
    if place is not None:
        yield (
            "physicalLocation",
            {"artifactLocation": _artifact(Path(place.file)), "region": {"startLine": max(1, place.line)}},
        )
    if layer is not None:
        name = layer or display_name(layer)
        yield "logicalLocations", [{"name": name.rpartition(".")[2], "fullyQualifiedName": name, "kind": "member"}]


def _artifact(file: Path) -> dict[str, str]:
    """The address of a file: relative where it is in the folder that we are in, which GitHub needs."""
    here = Path.cwd()
    if _is_within(file, here):
        return {"uri": quote(Path(os.path.abspath(file)).relative_to(here).as_posix()), "uriBaseId": _ROOT}
    return {"uri": Path(os.path.abspath(file)).as_uri()}


def _is_within(file: Path, folder: Path) -> bool:
    path = Path(os.path.abspath(file))
    return path.is_relative_to(folder) and "site-packages" not in path.parts


def _fingerprint(finding: Finding) -> str:
    """The same for the same fault of the same layer in another run, so that it is not reported twice."""
    return hashlib.sha256(f"{finding.code}\n{finding.layer}".encode()).hexdigest()[:32]
