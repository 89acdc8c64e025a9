from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.evidence import Evidence
from normkit.doctor.rule import found, rule
from normkit.finding import Finding


@rule("NK302", "decayed-affine", severity="info")
def decayed_affine(evidence: Evidence) -> Iterator[Finding]:
    """Weight decay acts on the gamma or beta of a norm.

    Why it hurts: decay on the weights before a norm regulates their effective learning rate; on gamma and beta it pulls
    the function itself towards zero. Most recipes leave it out there, for a small gain.

    Evidence and threshold: a group of the optimizer with a weight_decay other than 0 has the parameter. Needs
    `optimizer=`.

    Not a fault when: the recipe has been tuned with it, as many of ResNets have been.

    Remedy: `nk.parameter_groups(model, weight_decay=...)`.
    """
    if evidence.optimizer is None:
        return
    decay = {id(p): g.get("weight_decay", 0) for g in evidence.optimizer.param_groups for p in g["params"]}
    for norm in evidence.norms:
        own = norm.layer._parameters if norm.spec.has_gamma else {}
        decayed = {name: decay[id(p)] for name, p in own.items() if p is not None and decay.get(id(p), 0)}
        if decayed:
            which = " and ".join(
                "gamma" if name == "weight" else "beta" if name == "bias" else name for name in decayed
            )
            yield found(
                decayed_affine,
                norm.name,
                f"weight decay {max(decayed.values()):g} acts on its {which}.",
                "optimizer = ...(nk.parameter_groups(model, weight_decay=...))",
                **{f"weight_decay_of_{name}": value for name, value in decayed.items()},
            )
