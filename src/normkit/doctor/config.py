"""Settings in `pyproject.toml`, under [tool.normkit.doctor]: which rules count, and from which severity on.

[tool.normkit.doctor]
select = ["NK1", "NK201"]
ignore = ["noisy-statistics"]
fail-on = "error"

[tool.normkit.doctor.per-layer-ignores]
"backbone.*" = ["NK203"]
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from normkit.doctor.report.summary import SEVERITIES
from normkit.doctor.rule import chosen
from normkit.errors import ArgumentError, did_you_mean
from normkit.finding import Finding, Severity

FILE, TABLE = "pyproject.toml", ("tool", "normkit", "doctor")
KEYS = ("select", "ignore", "fail-on", "per-layer-ignores")


@dataclass(frozen=True)
class Settings:
    """What counts.

    Attributes:
        select: codes, beginnings of codes such as "NK1", or names of rules; None for all.
        ignore: those that do not count.
        fail_on: the least severity that fails a run.
        per_layer_ignores: codes that do not count for layers whose names match a shell pattern.
    """

    select: Sequence[str] | None = None
    ignore: Sequence[str] | None = None
    fail_on: Severity = "warning"
    per_layer_ignores: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def counted(self, findings: Iterable[Finding]) -> list[Finding]:
        """The findings that are not ignored for their layers."""
        ignored = [
            (pattern, {rule.code for rule in chosen(codes, None)}) for pattern, codes in self.per_layer_ignores.items()
        ]
        return [finding for finding in findings if not any(_is_of(finding, *each) for each in ignored)]

    def fails(self, findings: Iterable[Finding]) -> bool:
        """Whether one of the findings is severe enough."""
        limit = SEVERITIES.index(self.fail_on)
        return any(SEVERITIES.index(finding.severity) <= limit for finding in findings)


def find_settings(folder: Path) -> Settings:
    """Those of the nearest pyproject.toml, in the folder or above it; the defaults if there is none."""
    files = (each / FILE for each in (folder, *folder.parents))
    found = next((file for file in files if file.is_file()), None)
    return Settings() if found is None else read_settings(found)


def read_settings(file: Path) -> Settings:
    """Those of one pyproject.toml."""
    try:
        table: Any = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{file} cannot be read: {error} Mend it.") from error
    for key in TABLE:
        table = table.get(key, {})
        if not isinstance(table, dict):
            raise ArgumentError(f"{file}: {key} must be a table; got {table!r}. Write [{'.'.join(TABLE)}].")
    return _settings(table, f"{file}, [{'.'.join(TABLE)}]")


def _settings(table: Mapping[str, Any], where: str) -> Settings:
    for key in table:
        if key not in KEYS:
            raise ArgumentError(f"{where}: unknown key {key!r}; there are {', '.join(KEYS)}.{did_you_mean(key, KEYS)}")
    layers = table.get("per-layer-ignores", {})
    if not isinstance(layers, dict):
        raise ArgumentError(f"{where}: per-layer-ignores must be a table of patterns with codes; got {layers!r}.")
    return Settings(
        _rules(table.get("select"), f"{where}: select"),
        _rules(table.get("ignore"), f"{where}: ignore"),
        _severity(table.get("fail-on", "warning"), f"{where}: fail-on"),
        {pattern: _rules(codes, f"{where}: {pattern!r}") or () for pattern, codes in layers.items()},
    )


def _rules(value: Any, where: str) -> list[str] | None:
    """Codes or names that rules have."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(code, str) for code in value):
        raise ArgumentError(f'{where} must be a list of codes, such as ["NK101", "NK2"]; got {value!r}.')
    try:
        chosen(value, None)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from None
    return value


def _severity(value: Any, where: str) -> Severity:
    if value not in SEVERITIES:
        known = ", ".join(SEVERITIES)
        raise ArgumentError(f"{where} must be one of {known}; got {value!r}.{did_you_mean(value, SEVERITIES)}")
    severity: Severity = value
    return severity


def _is_of(finding: Finding, pattern: str, codes: set[str]) -> bool:
    return finding.layer is not None and finding.code in codes and fnmatchcase(finding.layer, pattern)
