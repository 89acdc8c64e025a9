"""Hooks on layers for the length of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

# layer, args, kwargs -> None, or what the layer is called with instead: (args, kwargs)
BeforeForward = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[Any, dict[str, Any]] | None]
AfterForward = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]  # layer, args, kwargs, output


@contextmanager
def hooked(
    *,
    before: Iterable[tuple[nn.Module, BeforeForward]] = (),
    after: Iterable[tuple[nn.Module, AfterForward]] = (),
    first: bool = False,
    always: bool = False,
) -> Iterator[None]:
    """Call functions before and after the forwards of layers; all of them are removed at the end of the block.

    Args:
        before: layers with what to call when other hooks may have changed the input already.
        after: layers with what to call with the output.
        first: call those of `after` before all hooks that a layer has, with what its forward itself returned.
        always: call those of `after` also when a forward raises, with None for the output.
    """
    with ExitStack() as handles:
        for layer, hook in before:
            handles.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
        for layer, result_hook in after:
            handles.enter_context(
                layer.register_forward_hook(result_hook, prepend=first, with_kwargs=True, always_call=always)
            )
        yield
