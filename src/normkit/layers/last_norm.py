"""What the norms over the last dimensions share: parameters from outside, and a sum that is normalized."""

from __future__ import annotations

from typing import ClassVar, cast, overload

from torch import Tensor, fx

from normkit import checks
from normkit.functional import within as functional
from normkit.kernels import layer_calls
from normkit.kernels.reference import Recipe
from normkit.layers.norm_layer import NormLayer, _as_leaf
from normkit.tracing import is_plain


class LastNorm(NormLayer):
    """A norm of x over its last dimensions, `normalized_shape`."""

    _centred: ClassVar[bool] = True

    normalized_shape: tuple[int, ...]

    @overload
    def forward(
        self,
        input: Tensor,
        *,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        add: None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        input: Tensor,
        *,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        add: Tensor,
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        input: Tensor,
        *,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        add: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize each example over its last dimensions; with `add`, return input + add normalized, and that sum."""
        if add is None:
            if residual is None and not (weight is None and bias is None):
                y = self._run_given(input, weight, bias)
                if y is not None:
                    return y
            return self._run(input, residual, None, weight, bias)
        if isinstance(input, fx.Proxy):
            given = {"residual": residual, "weight": weight, "bias": bias, "add": add}
            return cast(tuple[Tensor, Tensor], _as_leaf(self, input, **given))
        return self._run_sum(input, add, residual, weight, bias)

    def _run_given(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
        """As `_run_fast`, with parameters from outside."""
        may_be = layer_calls.may_be_given(weight) and layer_calls.may_be_given(bias)
        if not (may_be and self._has_fast_path and is_plain(input) and input.is_cpu):
            return None
        own_weight, own_bias = self._own()
        y = self._call(input, own_weight if weight is None else weight, own_bias if bias is None else bias)
        return self._activated(y) if y is not None and self._runs_after else y

    def _run_sum(
        self, one: Tensor, other: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if other.shape != one.shape:
            checks.same_shape(other, one, self._who(), "an add")
        is_bare = residual is None and weight is None and bias is None
        if is_bare and self._has_fast_path and is_plain(one) and layer_calls.takes_sum(one):
            own = *self._own(), self.normalized_shape, self._eps_for(one), self._fused, self._centred
            found = layer_calls.last_norm_of_sum(one, other, *own)
            if found is not None:
                y, total = found
                return (self._activated(y) if self._runs_after else y), total
        total = one + other
        return self._run(total, residual, None, weight, bias), total

    def _compute(  # type: ignore[override]
        self,
        input: Tensor,
        *,
        residual: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        shape = self.normalized_shape
        own_weight, own_bias = self._own()
        weight, bias = own_weight if weight is None else weight, own_bias if bias is None else bias
        recipe = Recipe(functional.last(input, shape), self._eps_for(input), self._fused, self._centred)
        return functional.normalize_last(input, shape, weight, bias, recipe, residual, who=self._who())

    def _own(self) -> tuple[Tensor | None, Tensor | None]:
        """Gamma and beta."""
        return cast(Tensor | None, self.weight), getattr(self, "bias", None)

    def _call(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
        """The call on the fast path, with these parameters."""
        raise TypeError(f"{type(self).__name__} must define _call")

    def _eps_for(self, input: Tensor) -> float:
        raise TypeError(f"{type(self).__name__} must define _eps_for")

    def _who(self) -> str:
        return f"{type(self).__name__}({list(self.normalized_shape)})"
