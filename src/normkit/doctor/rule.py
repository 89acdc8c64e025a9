"""The registry of rules: one per code, each with the page that explains it and the checks that find it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from normkit.errors import ArgumentError, did_you_mean
from normkit.finding import Finding, Severity

Seer = Literal["examine", "watch", "load", "fold", "export"]
Check = Callable[[Any], Iterator[Finding]]  # of an Evidence, if examine calls it, or of a Ledger, if watch does

RULES: dict[str, Rule] = {}
"""Every rule by its code, in the order of codes."""


@dataclass(frozen=True)
class Rule:
    """One fault that the doctor knows.

    Attributes:
        code: such as "NK101"; its meaning never changes.
        name: the fault: "untrained-statistics".
        severity: that of its findings, unless the evidence says otherwise.
        seen_by: who finds it: "examine", "watch", and `nk.load`, `nk.fold` and `nk.check_export`.
        summary: what it catches, in one sentence.
        page: what it catches, why that hurts, evidence and threshold, when it is not a fault, and the remedy.
        examine: finds it in the evidence of an examination; None if examine does not see it.
        watch: finds it in the ledger of a run; None if watch does not see it.
    """

    code: str
    name: str
    severity: Severity
    seen_by: frozenset[Seer]
    summary: str
    page: str
    examine: Check | None = None
    watch: Check | None = None


def rule(
    code: str, name: str, *, severity: Severity, seen_by: Iterable[Seer] = ("examine",)
) -> Callable[[Check], Rule]:
    """Register a function that yields findings as a rule; its docstring is the rule's page.

    The function takes the `Evidence` of an examination or, if `seen_by` has no "examine", the `Ledger` of a run. A rule
    that both see gets its second function from `watched`.
    """
    seers = frozenset(seen_by)

    def register(check: Check) -> Rule:
        made = _made(code, name, severity, seers, check.__doc__ or "")
        return _registered(replace(made, examine=check) if "examine" in seers else replace(made, watch=check))

    return register


def declared(code: str, name: str, *, severity: Severity, seen_by: Iterable[Seer], page: str) -> Rule:
    """Register a rule whose findings are made elsewhere, by a verb of surgery."""
    return _registered(_made(code, name, severity, frozenset(seen_by), page))


def watched(code: str) -> Callable[[Check], Check]:
    """Add to a rule that examine sees the function that finds it in the ledger of a run."""

    def register(check: Check) -> Check:
        known = RULES[code]
        RULES[code] = replace(known, watch=check, seen_by=known.seen_by | {"watch"})
        return check

    return register


def _made(code: str, name: str, severity: Severity, seen_by: frozenset[Seer], page: str) -> Rule:
    if not seen_by <= set(get_args(Seer)):
        raise ArgumentError(f"{code}: seen_by must be of {', '.join(get_args(Seer))}; got {', '.join(seen_by)}.")
    page = inspect.cleandoc(page)
    return Rule(code, name, severity, seen_by, " ".join(page.partition("\n\n")[0].split()), page)


def _registered(made: Rule) -> Rule:
    RULES[made.code] = made
    for code in sorted(RULES):  # keeps the dictionary itself, which other modules have imported
        RULES[code] = RULES.pop(code)
    return made


def found(
    rule: Rule,
    layer: str | None,
    message: str,
    remedy: str = "",
    *,
    severity: Severity | None = None,
    **numbers: Any,
) -> Finding:
    """Make a finding of a rule, with the numbers that show it."""
    return Finding(rule.code, rule.name, severity or rule.severity, layer, message, numbers, remedy)


def chosen(select: str | Iterable[str] | None, ignore: str | Iterable[str] | None) -> list[Rule]:
    """The rules that `select` has, all without it, except those that `ignore` has.

    Both are codes, beginnings of codes ("NK1" is every rule from NK101 to NK199) or names, in a list or with commas
    between them.
    """
    wanted, unwanted = _patterns(select), _patterns(ignore)
    return [
        one for one in RULES.values() if (select is None or _is_among(one, wanted)) and not _is_among(one, unwanted)
    ]


def _patterns(given: str | Iterable[str] | None) -> list[str]:
    listed = [] if given is None else given.split(",") if isinstance(given, str) else list(given)
    patterns = [str(one).strip() for one in listed]
    for pattern in patterns:
        if not any(_is_among(one, [pattern]) for one in RULES.values()):
            known = [*RULES, *(one.name for one in RULES.values())]
            raise ArgumentError(
                f"no rule has a code that begins with {pattern!r}, or this name. normkit doctor --rules lists them."
                f"{did_you_mean(pattern, known)}"
            )
    return patterns


def _is_among(one: Rule, patterns: Iterable[str]) -> bool:
    return any(pattern and (one.code.startswith(pattern.upper()) or one.name == pattern) for pattern in patterns)
