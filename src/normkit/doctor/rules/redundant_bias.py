from __future__ import annotations

from collections.abc import Iterator

from normkit.doctor.evidence import Evidence
from normkit.doctor.evidence.wiring import is_functional_norm, redundant_biases, uses_batch_statistics
from normkit.doctor.rule import found, rule
from normkit.finding import Finding
from normkit.named_layers import display_name
from normkit.spec import NormSpec
from normkit.surgery.fold.dataflow import Event

_KINDS = ("batch", "renorm", "accumulated", "split", "domain", "whitened", "instance")


@rule("NK301", "redundant-bias", severity="info")
def redundant_bias(evidence: Evidence) -> Iterator[Finding]:
    """A layer has a bias that the norm after it removes.

    Why it hurts: the norm subtracts the mean of each channel, and the bias with it. It costs memory and time, its
    gradient is zero but for rounding, and with weight decay it only shrinks. The results are not wrong.

    Evidence and threshold: the operators of one forward show that all values of the layer go to norms that subtract
    each channel's mean, and nowhere else, whichever module calls them. The layer with the bias is named.

    Not a fault when: the norm is frozen, so that it subtracts a constant; such norms are not reported.

    Remedy: `bias=False`.
    """
    if evidence.flow is None:
        return
    specs = {norm.name: norm.spec for norm in evidence.norms}

    def removes(event: Event) -> int | None:
        if event.norm is None:
            return 1 if is_functional_norm(event) and uses_batch_statistics(event) else None
        spec = specs[event.norm]
        return spec.channel_dim if _subtracts_channel_means(spec) else None

    for layer, norm in redundant_biases(evidence.model, evidence.flow, removes).items():
        yield found(
            redundant_bias,
            layer,
            f"has a bias, which {display_name(norm)} after it subtracts with the mean of each channel.",
            "Build it with bias=False.",
            norm=norm,
        )


def _subtracts_channel_means(spec: NormSpec) -> bool:
    if spec.kind == "group":
        return spec.num_groups == spec.num_features
    is_frozen = spec.uses == "stored" and spec.updates == "never"
    return spec.kind in _KINDS and not is_frozen
