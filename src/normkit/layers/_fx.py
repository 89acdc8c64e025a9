"""Symbolic tracing: our layers stand in a torch.fx graph as one module each, as torch's own do."""

from typing import Any

from torch import fx, nn


def as_leaf(layer: nn.Module, input: fx.Proxy, **tensors: Any) -> fx.Proxy:
    """Record a call of the whole layer instead of what it does inside.

    The default tracer does this for modules that torch defines and looks inside all others, where the checks of a
    layer ask a proxy for the shape it does not have.
    """
    given = {name: t for name, t in tensors.items() if t is not None}
    path = input.tracer.path_of_module(layer)  # type: ignore[attr-defined]
    return input.tracer.create_proxy("call_module", path, (input,), given)
