from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn

from normkit.batches import feed
from normkit.doctor.evidence import Evidence
from normkit.doctor.evidence.runs import in_training
from normkit.doctor.rule import found, rule
from normkit.finding import Finding
from normkit.snapshot import untouched
from normkit.surgery.fold.dataflow import outputs_of


@rule("NK306", "dead-scale", severity="warning")
def dead_scale(evidence: Evidence) -> Iterator[Finding]:
    """A gamma is zero and will stay zero: these channels can never speak.

    Why it hurts: the channel's output is its beta, whatever its input; the layers before it get no gradient through it,
    and if gamma itself learns nothing, that is for good.

    Evidence and threshold: gammas that are exactly 0, and that are frozen (they require no gradient, or the optimizer
    does not have them) or get a gradient of exactly 0 on these batches, as behind a ReLU with a beta of 0 or less.

    Not a fault when: gamma starts at zero and learns, as the last norm of each residual block often does.

    Remedy: a gamma and beta above zero, or remove the channel.
    """
    zeros = {
        norm.name: gamma
        for norm in evidence.norms
        if norm.spec.has_gamma and (gamma := _gamma(norm.layer)) is not None and bool((gamma == 0).any())
    }
    learned = {name: p for name, p in zeros.items() if isinstance(p, nn.Parameter) and evidence.learns(p)}
    moved = _gradients(evidence, learned) if learned else {}
    per_domain = {norm.name for norm in evidence.norms if getattr(norm.layer, "affine_per_domain", False)}
    for name, gamma in zeros.items():
        dead = gamma.detach() == 0
        if name in learned:
            gradient = moved.get(name)
            if gradient is None:
                continue
            dead = dead & (gradient == 0)
            if name in per_domain:  # of a domain that no batch came from nothing is known
                dead = dead & gradient.any(1, keepdim=True)
        if not dead.any():
            continue
        why = "gets no gradient, as behind a ReLU that its beta keeps shut" if name in learned else "is frozen"
        yield found(
            dead_scale,
            name,
            f"gamma is 0 in {int(dead.sum())} of {dead.numel()} channels and {why}: they never pass anything on.",
            "with torch.no_grad(): layer.weight.fill_(1.0), or prune the channels.",
            channels=int(dead.sum()),
            frozen=name not in learned,
        )


def _gamma(layer: nn.Module) -> Tensor | None:
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def _gradients(evidence: Evidence, gammas: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The largest magnitude of each gradient over the batches, in training mode; nothing if it cannot be computed."""
    found_: dict[str, Tensor] = {}
    runs, model = evidence.runs, evidence.model
    for index in runs.left[:2]:
        with suppress(RuntimeError, ValueError), untouched(model), in_training(model), torch.enable_grad():
            output = feed(model, runs.batches[index], runs.forward)
            value = _projection(output) if evidence.loss is None else evidence.loss.tensor(index, output)
            gradients = torch.autograd.grad(value, list(gammas.values()), allow_unused=True)
            for (name, gamma), gradient in zip(gammas.items(), gradients, strict=True):
                new = torch.zeros_like(gamma) if gradient is None else gradient.abs()
                found_[name] = torch.maximum(found_[name], new) if name in found_ else new.detach()
    return found_


def _projection(output: object) -> Tensor:
    """A sum of all outputs with random weights, so that no gradient cancels."""
    drawing = torch.Generator().manual_seed(0)
    parts = [tensor for tensor in outputs_of(output) if tensor.requires_grad]
    weights = [torch.randn(tensor.shape, generator=drawing).to(tensor) for tensor in parts]
    return torch.stack([(part * weight).sum() for part, weight in zip(parts, weights, strict=True)]).sum()
