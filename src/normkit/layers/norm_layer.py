"""What every norm layer shares: its paths through eager calls, tracers and exporters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx, nn

from normkit.kernels import select
from normkit.kernels.reference import finish
from normkit.tracing import is_exporting, is_plain


class Name:
    """A layer's name for errors, formatted only when one is printed."""

    def __init__(self, who: Callable[[], str]) -> None:
        self._who = who

    def __str__(self) -> str:
        return self._who()


def name(who: Callable[[], str]) -> object:
    """Return what to call a layer in errors. A compiler cannot trace `Name`, and gets the text at once."""
    return who() if torch.compiler.is_compiling() else Name(who)


ELSEWHERE: Any = object()  # found in place of a parameter that is not in the layer's own dictionary: a parametrized one


class NormLayer(nn.Module):
    """A layer computes in `_compute`; its `forward` names the tensors it takes and passes them to `_run`.

    `class X(NormLayer, fast_path=True)` says of X, and not of its subclasses, that `_run_fast` computes what `_compute`
    does: a subclass that overrides any part of the arithmetic is computed by that part.
    """

    activation: str | None = None
    _torch: ClassVar[type[nn.Module] | None] = None
    """Torch's class of the same function, if it has one: exported graphs hold its operator in place of ours."""
    _has_fast_path: ClassVar[bool] = False
    _takes_mask: ClassVar[bool] = False

    def __init_subclass__(cls, *, fast_path: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._has_fast_path = fast_path

    def _run(self, input: Tensor, residual: Tensor | None = None, mask: Tensor | None = None, **extras: Any) -> Tensor:
        if residual is None and mask is None and self._has_fast_path and is_plain(input):
            y = self._run_fast(input)
            if y is not None:
                return y
        if mask is not None or self._takes_mask:
            extras["mask"] = mask
        if isinstance(input, fx.Proxy):
            return cast(Tensor, _as_leaf(self, input, residual=residual, **extras))
        if self._torch is not None and is_exporting() and not select.exports_whole() and self._is_torchs(**extras):
            return finish(self._torch_forward(input), None, residual, self.activation)
        return self._compute(input, residual=residual, **extras)

    def _run_fast(self, input: Tensor) -> Tensor | None:
        """Return the output of a call without options, or None to leave it to `_compute`.

        With a small tensor, Python takes most of the time: this path asks no more than it must.
        """
        return None

    def _compute(self, input: Tensor, *, residual: Tensor | None, **extras: Any) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define _compute")

    def _torch_forward(self, input: Tensor) -> Tensor:
        assert self._torch is not None
        return cast(Tensor, self._torch.forward(self, input))

    def _is_torchs(self, **extras: Any) -> bool:
        """Whether torch's operator would compute the same now, so that exported graphs may hold it."""
        return all(value is None for value in extras.values())

    def extra_repr(self) -> str:
        """Torch's line, and the activation."""
        parts = [str(super().extra_repr()), f"activation={self.activation}" if self.activation else ""]
        return ", ".join(filter(None, parts))


def _as_leaf(layer: nn.Module, input: fx.Proxy, **extras: Any) -> fx.Proxy:
    """Record a call of the whole layer in a torch.fx graph, as the default tracer does for modules that torch defines.

    It looks inside all others, where the checks of a layer ask a proxy for the shape it does not have.
    """
    given = {name: value for name, value in extras.items() if value is not None}
    path = input.tracer.path_of_module(layer)  # type: ignore[attr-defined]
    return input.tracer.create_proxy("call_module", path, (input,), given)
