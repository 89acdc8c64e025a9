from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.finding import Finding


@rule("NK202", "frozen-but-drifting", severity="warning")
def frozen_but_drifting(evidence: Evidence) -> Iterator[Finding]:
    """The parameters are frozen and the running statistics still move.

    Why it hurts: `requires_grad = False` does not stop a layer in training mode from updating its running statistics.
    A frozen backbone that drifts is not the one that was trained, and `model.train()` undoes an earlier `eval()`.

    Evidence and threshold: the layer is in training mode and updates its statistics, while neither its gamma and beta
    nor the weights that its input is a product of learn: they require no gradient or, if an optimizer is given, are not
    in its groups.

    Not a fault when: the statistics are meant to adapt to new data under fixed weights.

    Remedy: `nk.freeze`, which survives train(), or eval() for these layers after every train().
    """
    for norm, known in evidence.stored:
        if not evidence.modes[norm.name] or norm.spec.updates == "never" or not evidence.is_frozen(norm):
            continue
        yield found(
            frozen_but_drifting,
            norm.name,
            "trains: its running statistics move, although neither it nor the layers before it learn.",
            "nk.freeze(model.backbone, inplace=True), with the part that is frozen.",
            momentum=norm.spec.momentum,
            tracked=known.tracked,
        )
