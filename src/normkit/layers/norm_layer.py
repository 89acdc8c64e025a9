"""What every norm layer shares: how it meets tracers and exporters, and what follows the normalization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx, nn

from normkit.kernels import select
from normkit.kernels.reference import finish
from normkit.tracing import is_exporting


class Name:
    """A layer's name for errors, put together when one is printed and not before."""

    def __init__(self, who: Callable[[], str]) -> None:
        self._who = who

    def __str__(self) -> str:
        return self._who()


def name(who: Callable[[], str]) -> object:
    """Return what to call a layer in errors; a compiler, which cannot wait to see one printed, gets it at once."""
    return who() if torch.compiler.is_compiling() else Name(who)


ELSEWHERE: Any = object()  # where a parameter is that a layer has not: parametrized, or somebody else's by now


def _place(cls: type, method: str) -> int:
    """How far up among its bases a class finds a method."""
    return next(i for i, base in enumerate(cls.__mro__) if method in vars(base))


class NormLayer(nn.Module):
    """A layer computes in `_compute`; its `forward` names the tensors it takes and hands them to `_run`."""

    activation: str | None = None
    _torch: ClassVar[type[nn.Module] | None] = None
    """Torch's class of the same function, if there is one: its operator stands for us in graphs made for others."""
    _behind_call: ClassVar[tuple[str, ...]] = ("_compute", "_run")
    """Methods that `_run_ordinary` stands for. Where a class changes one of them, but not it, it no longer does."""
    _has_ordinary: ClassVar[bool] = False
    _has_bias: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = _place(cls, "_run_ordinary")
        cls._has_ordinary = all(own <= _place(cls, method) for method in cls._behind_call)

    def _run(self, input: Tensor, *, residual: Tensor | None = None, **extras: Any) -> Tensor:
        is_simple = type(input) is Tensor and residual is None and extras.get("mask") is None
        if is_simple and self._has_ordinary and not torch.compiler.is_compiling():
            y = self._run_ordinary(input)
            if y is not None:
                return y
        if isinstance(input, fx.Proxy):
            return cast(Tensor, _as_leaf(self, input, residual=residual, **extras))
        if self._torch is not None and is_exporting() and not select.exports_whole() and self._is_torchs(**extras):
            return finish(self._torch_forward(input), None, residual, self.activation)
        return self._compute(input, residual=residual, **extras)

    def _run_ordinary(self, input: Tensor) -> Tensor | None:
        """The call, if there is nothing unusual about it: of a small tensor, Python is what takes the time."""
        return None

    def _call_ordinary(self, input: Tensor, plan_of: Callable[..., Any], *terms: Any) -> Tensor | None:
        """A call with the input's own statistics and our gamma and beta."""
        own = self._parameters
        weight, bias = own.get("weight", ELSEWHERE), own.get("bias", ELSEWHERE) if self._has_bias else None
        if weight is ELSEWHERE or bias is ELSEWHERE:
            return None
        return select.layer_call(plan_of, input, weight, bias, *terms)

    def _compute(self, input: Tensor, *, residual: Tensor | None, **extras: Any) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define _compute")

    def _torch_forward(self, input: Tensor) -> Tensor:
        assert self._torch is not None
        return cast(Tensor, self._torch.forward(self, input))

    def _is_torchs(self, **extras: Any) -> bool:
        """Whether torch's operator would do the same now, so that other tools may find it in our place."""
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
