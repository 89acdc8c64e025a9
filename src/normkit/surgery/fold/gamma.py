"""Moving the gamma and beta of a norm on into the layers that read its output, while it keeps normalizing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from normkit.surgery.fold.affine_map import AffineMap
from normkit.surgery.fold.dataflow import Flow, memory_of
from normkit.surgery.fold.hosts import overlap
from normkit.surgery.norms import Norm
from normkit.surgery.operation import Skip


def moved_affine(norm: Norm) -> AffineMap:
    """The gamma and beta of a norm as the map that other layers take over; skip if there is nothing to move."""
    weight, bias = tensors = _tensors(norm)
    own = [tensor for tensor in tensors if tensor is not None]
    if not own:
        raise Skip("it has no gamma and no beta")
    if own[0].dim() != 1:
        raise Skip("its gamma has more than one dimension")
    one = torch.ones_like(own[0], dtype=torch.float64, requires_grad=False)
    scale = one if weight is None else weight.detach().double() + norm.spec.weight_offset
    shift = torch.zeros_like(one) if bias is None else bias.detach().double()
    if not (scale.isfinite().all() and shift.isfinite().all()):
        raise Skip("its gamma or its beta is not finite")
    if torch.equal(scale, one) and not shift.any():
        raise Skip("its gamma is one and its beta is zero")
    return AffineMap(scale, shift, norm.spec.activation, {})


@torch.no_grad()
def remove_affine_(norm: Norm) -> None:
    """Set gamma to one and beta to zero, in the tensors that the norm has."""
    weight, bias = _tensors(norm)
    if weight is not None:
        weight.fill_(1 - norm.spec.weight_offset)
    if bias is not None:
        bias.zero_()


Holders = Mapping[int, Sequence[Norm]]


def holders(norms: Iterable[Norm]) -> Holders:
    """By memory, the norms that have parameters in it."""
    found: dict[int, list[Norm]] = defaultdict(list)
    for norm in norms:
        for parameter in norm.layer.parameters():
            found[memory_of(parameter)].append(norm)
    return found


def must_own_its_affine(norm: Norm, of_memory: Holders, flow: Flow) -> None:
    """Skip a norm whose gamma or beta other layers use too."""
    for tensor in (own for own in _tensors(norm) if own is not None):
        for other in of_memory.get(memory_of(tensor), ()):
            if other.layer is not norm.layer and _is_among(tensor, other.layer.parameters()):
                raise Skip(f"it shares its parameters with {other.name}")
        for event in flow.readers(tensor):
            if _is_among(tensor, event.inputs):
                raise Skip(f"its gamma or its beta is also used by {event}")


def _is_among(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    return any(overlap(tensor, other) for other in others)


def _tensors(norm: Norm) -> tuple[Tensor | None, Tensor | None]:
    """Its gamma, without what is added to it, and its beta; None for what its description does not have."""
    held = norm.layer._parameters | norm.layer._buffers
    has = (norm.spec.affine in (True, "scale"), norm.spec.affine in (True, "shift"))
    weight, bias = (held.get(name) if has_it else None for name, has_it in zip(norm.spec.names, has, strict=True))
    if (weight is not None, bias is not None) != has:
        raise Skip("its gamma or its beta is computed from something else")
    return weight, bias
