"""Batch normalization (Ioffe & Szegedy 2015)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor, fx, nn

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike, label
from normkit.checks import NonFinite
from normkit.functional import batch_core, by_example
from normkit.functional.batch_core import Terms
from normkit.functional.by_example import OfExamples
from normkit.kernels import layer_calls
from normkit.layers.affine_parts import Affine, check_affine, keep_parts_, reset_parts_
from normkit.layers.norm_layer import ELSEWHERE, NormLayer, name
from normkit.layers.refusals import OwnFunction, refuse_fusion
from normkit.moments import Moments
from normkit.tracing import is_recomputing


class BatchNorm(NormLayer, nn.modules.batchnorm._BatchNorm):
    """What the batch norms share: torch's arguments, parameters and buffers, with our arithmetic.

    Args:
        num_features: channels of the input, C of (N, C, ...).
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics; None averages over all batches.
        affine: gamma and beta (True), neither (False), or one of them ("scale", "shift").
        track_running_stats: keep running statistics for evaluation; without them every batch uses its own.
        device: where the parameters live.
        dtype: the parameters' type.
        bias: False is another spelling of affine="scale".
        activation: applied to the output: a name ("relu", "hardswish" and so on), a module or a function.
        negative_slope: of activation="leaky_relu".
        nonfinite: what a batch with NaN or infinity does to the running statistics: "propagate" as in torch,
            "raise", or "skip-update".
        inplace: in training, write the output over the input and keep nothing else for the backward; without an
            activation, or with "leaky_relu", which can be undone.
        dim: the dimension of the channels; -1 for (N, ..., C).

    Call:
        layer(x), layer(x, residual=r) for activation(BN(x) + r), layer(x, mask=m) for statistics over those positions
        only where m, of shape (N, ...) without the channels, is true. layer(x, weight=w, bias=b) takes gamma and beta
        from outside, in place of the layer's own: (C,), or (N, C) for each example its own.
    """

    _ranks: ClassVar[Sequence[int]]
    _takes_mask = True
    _in_one_step: ClassVar[bool] = False
    inplace = False  # also in layers that were pickled before this option existed
    dim = 1

    def __init_subclass__(cls, *, one_step: bool = False, **kwargs: Any) -> None:
        """`one_step=True` says of a class, not of its subclasses, that `_normalize_and_store_` does all of a step.

        Others go by `_normalize_batch` and `_update_`, which a subclass may override.
        """
        super().__init_subclass__(**kwargs)
        cls._in_one_step = one_step

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: Affine = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
        nonfinite: NonFinite = "propagate",
        inplace: bool = False,
        dim: int = 1,
    ) -> None:
        checks.options(eps, momentum, activation, nonfinite)
        checks.invertible(inplace, activation, negative_slope)
        if type(dim) is not int or dim != 1:
            checks.channel_dim(dim, max(self._ranks), type(self).__name__)
        has = check_affine(affine, bias)
        refuse_fusion(type(self))
        super().__init__(num_features, eps, momentum, bool(affine), track_running_stats, device, dtype)
        keep_parts_(self, affine, *has)
        self._set_activation(activation, negative_slope)
        self.nonfinite = nonfinite
        self.inplace = inplace
        if dim != 1:
            self.dim = dim

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copy or a pickle."""
        super().__setstate__(state)
        refuse_fusion(type(self))

    def reset_parameters(self) -> None:
        """Set gamma to one and beta to zero, where they are, and forget the running statistics."""
        self.reset_running_stats()
        reset_parts_(self)

    def forward(
        self,
        input: Tensor,
        *,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Normalize, with the batch's statistics in training and the stored ones in evaluation."""
        if self.dim != 1 and not isinstance(input, fx.Proxy):  # of which a graph holds the whole call
            return self._run_moved(input, residual, mask, weight, bias)
        return self._run(input, residual, mask, weight, bias)

    def _run_moved(self, input: Tensor, residual: Tensor | None, mask: Tensor | None, *given: Tensor | None) -> Tensor:
        """Run on views that have the channels where everything else expects them, and view the output as the input."""
        dim = checks.channels_at(self.dim, input, name(self._who), self.num_features, self._ranks)
        checks.same_shape(residual, input, name(self._who))
        if residual is not None:
            residual = residual.movedim(dim, 1)
        if mask is not None and mask.dim() == input.dim():  # with a dimension of one for the channels
            mask = mask.movedim(dim, 1)
        return self._run(input.movedim(dim, 1), residual, mask, *given).movedim(1, dim)

    def _run_fast(self, input: Tensor) -> Tensor | None:
        own, kept = self._parameters, self._buffers
        weight, bias = own.get("weight", ELSEWHERE), own.get("bias", ELSEWHERE)
        mean, var, count = kept.get("running_mean"), kept.get("running_var"), kept.get("num_batches_tracked")
        if weight is ELSEWHERE or bias is ELSEWHERE or mean is None or var is None:
            return None
        terms = self._ranks, self.eps, self._fused
        if not self.training:
            return layer_calls.batch_norm_evaluated(input, weight, bias, mean, var, *terms)
        momentum = self.momentum
        is_usual = self.track_running_stats and self.nonfinite == "propagate" and not self.inplace
        if not is_usual or count is None or type(momentum) is not float:
            return None
        return layer_calls.batch_norm_step_(input, weight, bias, mean, var, count, momentum, *terms)

    def _compute(  # type: ignore[override]
        self,
        input: Tensor,
        *,
        residual: Tensor | None,
        mask: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        own_weight, own_bias, stored = self._tensors()
        terms = Terms(
            self._features(),
            own_weight if weight is None else weight,
            own_bias if bias is None else bias,
            self.eps,
            self._fused,
            residual,
            mask,
            self.nonfinite,
            self.inplace,
            name(self._who),
            self._ranks_of(input),
        )
        if weight is None and bias is None:
            return self._normalized(input, terms, stored)
        terms, given = by_example.parted(input, terms)
        if given is None:
            return self._normalized(input, terms, stored)
        y = self._of_examples(input, terms, stored, given) if self._has_fast_path else None
        if y is None:
            return by_example.normalize_then_apply(input, terms, given, partial(self._normalized, stored=stored))
        return y

    def _normalized(self, input: Tensor, terms: Terms, stored: Moments | None) -> Tensor:
        if not self.training and stored is not None:
            return batch_core.normalize_stored(input, stored, terms)
        if self._moves() and stored is not None and self._in_one_step:
            return self._normalize_and_store_(input, terms, stored)
        y, batch = self._normalize_batch(input, terms, stored)
        self._keep(stored, batch)
        return y

    def _of_examples(self, input: Tensor, terms: Terms, stored: Moments | None, given: OfExamples) -> Tensor | None:
        """As `_normalized`, with parameters of each example, in the loops; None, and nothing done, if they cannot."""
        if not self.training and stored is not None:
            return by_example.normalize_stored(input, stored, terms, given)
        found = by_example.normalize_batch(input, terms, given)
        if found is None:
            return None
        self._keep(stored, found[1])
        return found[0]

    def _moves(self) -> bool:
        return self.training and self.track_running_stats and not is_recomputing()

    def _keep(self, stored: Moments | None, batch: Moments) -> None:
        """Move the running statistics, where they are to move, towards this batch's."""
        if not self._moves():
            return
        if stored is not None:
            self._update_(stored, batch)
        elif self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)  # as torch, which counts on when the statistics were taken away

    def _normalize_batch(self, input: Tensor, terms: Terms, stored: Moments | None) -> tuple[Tensor, Moments]:
        """Normalize with the batch's statistics, and return those too. Subclasses may differ here or in `_update_`."""
        return batch_core.normalize_batch(input, terms)

    def _normalize_and_store_(self, input: Tensor, terms: Terms, stored: Moments) -> Tensor:
        """Normalize with the batch's statistics and move the running ones, in one step."""
        return batch_core.normalize_and_store_(input, terms, stored, self.momentum)

    def _update_(self, stored: Moments, batch: Moments) -> None:
        """Move the running statistics towards this batch's."""
        batch_core.update_(stored, batch, batch_core.average_factor(stored, self.momentum), self.nonfinite)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The children, and before them one that no other module can take, if torch's class computes something else."""
        activation = label(self.activation)
        beyond = self._beyond_torch() if activation is None else f"the activation {activation}"
        if beyond is not None:
            yield "own_function", OwnFunction(self._who(), beyond)
        yield from super().named_children()

    def _beyond_torch(self) -> str | None:
        if self.dim != 1:
            return f"its channels in dimension {self.dim}"
        return self._beyond if self.nonfinite == "propagate" else f'nonfinite="{self.nonfinite}"'

    def extra_repr(self) -> str:
        """Torch's line, and what is set beyond it."""
        nonfinite = f", nonfinite={self.nonfinite}" if self.nonfinite != "propagate" else ""
        dim = f", dim={self.dim}" if self.dim != 1 else ""
        return super().extra_repr() + nonfinite + (", inplace=True" if self.inplace else "") + dim

    def _check_input_dim(self, input: Tensor) -> None:
        checks.batch_input(input, name(self._who), self._features(), self._ranks_of(input))

    def _ranks_of(self, input: Tensor) -> Sequence[int]:
        """The ranks that an input may have."""
        return self._ranks

    def _features(self) -> tuple[int, ...]:
        """The shape of one set of statistics."""
        return (self.num_features,)

    def _tensors(self) -> tuple[Tensor | None, Tensor | None, Moments | None]:
        """Weight, bias and running statistics, from the dictionaries: a module looks each name up in Python."""
        own, kept = self._parameters, self._buffers
        try:
            weight, bias = own["weight"], own["bias"]
            mean, var, count = kept["running_mean"], kept["running_var"], kept["num_batches_tracked"]
        except KeyError:  # one of them is parametrized, and not in the dictionary
            weight, bias = self.weight, self.bias
            mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        if mean is None or var is None:
            return weight, bias, None
        return weight, bias, Moments(mean, var, 0 if count is None else count)

    def _is_torchs(self, **extras: Any) -> bool:
        # A cumulative average makes torch's layer read a number out of the graph, which no exporter allows.
        same_update = self.nonfinite == "propagate" and self.momentum is not None
        return super()._is_torchs(**extras) and (same_update or not self.training)

    def _who(self) -> str:
        dim = f", dim={self.dim}" if self.dim != 1 else ""
        return f"{type(self).__name__}({', '.join(map(str, self._features()))}{dim})"


class BatchNorm1d(BatchNorm, nn.BatchNorm1d, fast_path=True, one_step=True):
    """Batch normalization of (N, C) or (N, C, L); with dim=-1, of (N, C) or (N, L, C)."""

    _ranks = (2, 3)
    _torch = nn.BatchNorm1d


class BatchNorm2d(BatchNorm, nn.BatchNorm2d, fast_path=True, one_step=True):
    """Batch normalization of (N, C, H, W); with dim=-1, of (N, H, W, C)."""

    _ranks = (4,)
    _torch = nn.BatchNorm2d


class BatchNorm3d(BatchNorm, nn.BatchNorm3d, fast_path=True, one_step=True):
    """Batch normalization of (N, C, D, H, W); with dim=-1, of (N, D, H, W, C)."""

    _ranks = (5,)
    _torch = nn.BatchNorm3d


class PositionBatchNorm2d(BatchNorm, one_step=True):
    """Batch normalization of every position of (N, C, H, W) on its own: one gamma and beta per channel and position.

    The paper's transform for a single activation, not shared over the map (section 3.2). Parameters and statistics
    have shape (C, H, W).
    """

    _ranks = (4,)
    _beyond = "statistics for every position"

    def __init__(
        self,
        num_features: int,
        height: int,
        width: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: Affine = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
        nonfinite: NonFinite = "propagate",
    ) -> None:
        # torch makes every tensor of the size it is given, and takes a shape for one.
        super().__init__(
            cast(int, (num_features, height, width)),
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            bias=bias,
            activation=activation,
            negative_slope=negative_slope,
            nonfinite=nonfinite,
        )
        self.num_features, self.height, self.width = num_features, height, width

    def _features(self) -> tuple[int, ...]:
        return (self.num_features, self.height, self.width)

    def extra_repr(self) -> str:
        """Torch's line, with height and width."""
        return super().extra_repr().replace(str(self.num_features), ", ".join(map(str, self._features())), 1)
