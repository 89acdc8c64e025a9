"""What all reports of a diagnosis say: how much was found, what it costs, and the findings by their codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from normkit.figures.values import cell_text, seconds_text
from normkit.finding import Finding, Severity

SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # the worst first
_COUNTED = {"error": ("error", "errors"), "warning": ("warning", "warnings"), "info": ("note", "notes")}
_ABOUT_STATISTICS = ("NK101", "NK102", "NK103", "NK104")  # a share of the gap is that of stored statistics


@dataclass(frozen=True)
class Group:
    """All findings of one code."""

    code: str
    name: str
    findings: Sequence[Finding]

    @property
    def severity(self) -> Severity:
        """The worst of them."""
        return worst(finding.severity for finding in self.findings)

    @property
    def remedies(self) -> list[str]:
        """What to do, each once: many layers share a remedy."""
        return list(dict.fromkeys(finding.remedy for finding in self.findings if finding.remedy))


def groups(findings: Iterable[Finding]) -> list[Group]:
    """Findings by code, in the order in which the codes come first."""
    by_code: dict[str, list[Finding]] = {}
    for finding in findings:
        by_code.setdefault(finding.code, []).append(finding)
    return [Group(code, found[0].name, found) for code, found in by_code.items()]


def worst(severities: Iterable[Severity]) -> Severity:
    """The worst of some severities."""
    return min(severities, key=SEVERITIES.index)


def headline(findings: Sequence[Finding]) -> str:
    """How much was found: "2 errors, 1 warning"."""
    if not findings:
        return "nothing was found"
    counts = Counter(finding.severity for finding in findings)
    found = [(counts[severity], _COUNTED[severity]) for severity in SEVERITIES if counts[severity]]
    return ", ".join(f"{number} {words[number > 1]}" for number, words in found)


def facts(evidence: Mapping[str, Any]) -> str:
    """What was looked at: "53 norm layers, 8 batches, 4.2 s"."""
    layers, batches, seconds = len(evidence.get("layers", ())), evidence.get("batches"), evidence.get("seconds")
    found = [f"{layers} norm layer{'' if layers == 1 else 's'}"]
    found += [] if batches is None else [f"{batches} batch{'' if batches == 1 else 'es'}"]
    return ", ".join(found if seconds is None else [*found, seconds_text(seconds)])


def gap_sentence(evidence: Mapping[str, Any]) -> str:
    """What the model does in training, in evaluation and with the data's own statistics; empty if not measured."""
    gap = evidence.get("gap")
    if not gap:
        return ""
    evaluation, recalibrated = (cell_text(gap[mode]) for mode in ("evaluation", "recalibrated"))
    if gap["measure"] == "loss":
        training = cell_text(gap["training"])
        return f"Loss: {training} in training mode, {evaluation} in evaluation, {recalibrated} recalibrated."
    return (
        f"Outputs in evaluation are {evaluation} of their standard deviations away from those in training mode, "
        f"recalibrated {recalibrated}."
    )


def share_of(finding: Finding, shares: Mapping[str, float]) -> float | None:
    """The part of the gap that the finding's layer causes; None for a finding that is not about stored statistics."""
    share = finding.evidence.get("share")
    if share is None and finding.code in _ABOUT_STATISTICS and finding.layer is not None:
        share = shares.get(finding.layer)
    return None if share is None else float(share)


def shares_of(evidence: Mapping[str, Any]) -> dict[str, float]:
    """The part of the gap that each layer causes, where it was measured."""
    layers = evidence.get("layers") or ()
    return {layer["name"]: float(layer["share"]) for layer in layers if layer.get("share") is not None}


def share_text(share: float | None) -> str:
    """A part of the gap as a percentage; empty where it is not known."""
    return "" if share is None else f"{share:.0%}" if abs(share) >= 0.01 or share == 0 else "<1%"
