"""The state of a model in two parts: what belongs to its norms, and the rest."""

from __future__ import annotations

from typing import Any

from torch import nn

from normkit.errors import ArgumentError
from normkit.surgery.norms import state_prefixes, survey

State = dict[str, Any]


def split_state(model: nn.Module) -> tuple[State, State]:
    """What belongs to the norms of a model and what does not, as two parts of its state_dict.

    For federated learning that keeps norms local (FedBN), and whatever else treats them apart. Norms are known by what
    they compute, from whatever library and under whatever name; layers that are norms only by the names of their
    classes count as well. The tensors are those of the model, as in its state_dict.

        norms, rest = nk.split_state(model)
        model.load_state_dict(norms | received)  # of the server's weights, everything but the norms

    Args:
        model: any model; it may itself be a norm.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"split_state needs a torch.nn.Module; got a {type(model).__name__}. A state_dict alone does not say what "
            "its layers are: pass a model that it was taken from."
        )
    found = survey(model)
    prefixes = state_prefixes(model, [*(norm.layer for norm in found.norms), *found.unknown.values()])
    norms: State = {}
    rest: State = {}
    for key, value in model.state_dict().items():
        (norms if key.startswith(prefixes) else rest)[key] = value
    return norms, rest
