"""What every norm layer shares: its paths through eager calls, tracers and exporters, and its activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx, nn

from normkit.activations import LEAKY_SLOPE, ActivationLike, label, parted
from normkit.kernels import select
from normkit.kernels.reference import finish
from normkit.layers.refusals import Unscriptable
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


class _Child:
    """An attribute that is not in a layer's own dictionary: it is a child, or there is none."""

    def __get__(self, layer: nn.Module | None, owner: type) -> nn.Module | None:
        return None if layer is None else layer._modules.get("activation")


class _OnceFused:
    """The fused name in a layer that was pickled before there were others: its activation."""

    def __get__(self, layer: nn.Module | None, owner: type) -> str | None:
        return None if layer is None else vars(layer).get("activation")


class NormLayer(Unscriptable):
    """A layer computes in `_compute`; its `forward` names the tensors it takes and passes them to `_run`.

    `class X(NormLayer, fast_path=True)` says of X, and not of its subclasses, that `_run_fast` computes what `_compute`
    does: a subclass that overrides any part of the arithmetic is computed by that part.

    Both compute the activation that the kernels have fused, `_fused`. Any other runs after them.
    """

    activation: ActivationLike | None = cast(Any, _Child())
    negative_slope: float = LEAKY_SLOPE
    _fused: str | None = cast(Any, _OnceFused())
    _runs_after: bool = False
    _torch: ClassVar[type[nn.Module] | None] = None
    """Torch's class of the same function, if it has one: exported graphs hold its operator in place of ours."""
    _beyond: ClassVar[str | None] = None
    """What it has in training that torch's class has not."""
    _has_fast_path: ClassVar[bool] = False
    _takes_mask: ClassVar[bool] = False

    def __init_subclass__(cls, *, fast_path: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._has_fast_path = fast_path

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Another activation takes effect at once; it has the slope that it had, if that is its."""
        if name == "activation":
            self._set_activation(value, self.negative_slope if value == "leaky_relu" else LEAKY_SLOPE)
        elif name == "negative_slope":
            self._set_activation(self.activation, value)
        else:
            super().__setattr__(name, value)

    def _set_activation(self, activation: ActivationLike | None, negative_slope: float) -> None:
        fused, after = parted(activation, negative_slope)
        self._modules.pop("activation", None)  # torch puts nothing else in the place of a child
        super().__setattr__("activation", activation)  # type: ignore[arg-type]
        own = vars(self)
        own.update(_fused=fused, _runs_after=after is not None)
        if activation == "leaky_relu":
            own["negative_slope"] = negative_slope
        else:
            own.pop("negative_slope", None)

    def _run(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        **extras: Any,
    ) -> Tensor:
        if weight is not None or bias is not None:
            extras |= {"weight": weight, "bias": bias}
        if residual is None and mask is None and not extras and self._has_fast_path and is_plain(input):
            y = self._run_fast(input)
            if y is not None:
                return self._activated(y) if self._runs_after else y
        if mask is not None or self._takes_mask:
            extras["mask"] = mask
        if isinstance(input, fx.Proxy):
            return cast(Tensor, _as_leaf(self, input, residual=residual, **extras))
        if self._torch is not None and is_exporting() and not select.exports_whole() and self._is_torchs(**extras):
            y = finish(self._torch_forward(input), None, residual, self._fused)
        else:
            y = self._compute(input, residual=residual, **extras)
        return self._activated(y) if self._runs_after else y

    def _activated(self, y: Tensor) -> Tensor:
        child = self._modules.get("activation")
        if child is not None:
            return cast(Tensor, child(y))
        return parted(self.activation, self.negative_slope).finish(y)

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

    def _beyond_torch(self) -> str | None:
        """What would be lost in training, apart from the activation, if torch's class took this layer's place."""
        return self._beyond

    def extra_repr(self) -> str:
        """Torch's line, and the activation."""
        return ", ".join(filter(None, [str(super().extra_repr()), self._activation_repr()]))

    def _activation_repr(self) -> str:
        """The activation and its slope; empty for a module, which torch prints as the child that it is."""
        if self.activation is None or isinstance(self.activation, nn.Module):
            return ""
        slope = "" if self.negative_slope == LEAKY_SLOPE else f", negative_slope={self.negative_slope:g}"
        return f"activation={label(self.activation)}{slope}"


def _as_leaf(layer: nn.Module, input: fx.Proxy, **extras: Any) -> fx.Proxy:
    """Record a call of the whole layer in a torch.fx graph, as the default tracer does for modules that torch defines.

    It looks inside all others, where the checks of a layer ask a proxy for the shape it does not have.
    """
    given = {name: value for name, value in extras.items() if value is not None}
    path = input.tracer.path_of_module(layer)  # type: ignore[attr-defined]
    return input.tracer.create_proxy("call_module", path, (input,), given)
