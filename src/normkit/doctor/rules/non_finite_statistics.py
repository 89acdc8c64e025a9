from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.finding import Finding
from normkit.surgery.norms import Norm


@rule("NK103", "non-finite-statistics", severity="error")
def non_finite_statistics(evidence: Evidence) -> Iterator[Finding]:
    """A buffer holds NaN, infinity or a negative variance.

    Why it hurts: a moving average never forgets a NaN or an infinity. Training goes on, because it does not read the
    running statistics, and every evaluation is NaN. A negative variance comes from averaging models as if variances
    were weights, or from subtracting, and gives NaN too.

    Evidence and threshold: one such value in a running mean or variance. If one of these batches gives the layer an
    input that is not finite, its number is named; such a batch is reported also before it has been trained on, at the
    first norm it reaches.

    Not a fault when: never.

    Remedy: `nk.recalibrate` on good batches. `nonfinite="skip-update"` in normkit's layers keeps such a batch out.
    """
    brought = {name: _bad_batches(evidence, name) for name in evidence.statistics}
    broken = set()
    for norm in evidence.norms:
        numbers = _broken(norm)
        if numbers:
            broken.add(norm.name)
            yield _finding(norm.name, numbers, brought.get(norm.name, []))
    first = next((name for name, batches in brought.items() if batches), None)
    if first is not None and not broken:
        yield found(
            non_finite_statistics,
            first,
            f"batch {brought[first][0]} (the first is 0) gives it NaN or infinity: a step on it would poison the "
            "running statistics of this layer and those after it for good.",
            "Look for the example that overflows, or use nk.convert(model, to='batch', nonfinite='skip-update').",
            severity="warning",
            batch=brought[first][0],
            batches=brought[first],
        )


def _finding(name: str, numbers: dict[str, Any], batches: list[int]) -> Finding:
    what = "; ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in numbers.items())
    which = f" Batch {batches[0]} of these (the first is 0) brings such values." if batches else ""
    return found(
        non_finite_statistics,
        name,
        f"its stored statistics are broken in some channels: {what}.{which}",
        "nk.recalibrate(model, batches, inplace=True), on batches that are finite.",
        **numbers,
        batch=batches[0] if batches else None,
    )


def _bad_batches(evidence: Evidence, name: str) -> list[int]:
    return sorted({call.batch for call in evidence.statistics[name].calls if not call.is_finite})


def _broken(norm: Norm) -> dict[str, int]:
    found_: dict[str, int] = {}
    for key, buffer in norm.layer._buffers.items():
        if not isinstance(buffer, Tensor) or not buffer.is_floating_point() or "running" not in key:
            continue
        counts = {"nan": buffer.isnan().sum(), "infinite": buffer.isinf().sum()}
        if key.endswith("var"):
            counts["negative"] = (buffer < 0).sum()
        found_ |= {f"{what}_in_{key}": int(count) for what, count in counts.items() if count}
    return found_
