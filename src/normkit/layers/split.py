"""Split batch normalization (AdvProp, Xie et al. 2020): clean and adversarial parts of a batch, each with its norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.checks import NonFinite
from normkit.errors import ArgumentError, ShapeError
from normkit.functional import batch_core, by_example
from normkit.functional.by_example import is_of_examples
from normkit.kernels.reference import count_values
from normkit.layers.affine_parts import Affine
from normkit.layers.batch import BatchNorm, BatchNorm2d
from normkit.layers.norm_layer import name


class SplitBatchNorm2d(BatchNorm, nn.BatchNorm2d, one_step=True):
    """Batch normalization of (N, C, H, W), where in training each of `num_splits` parts of a batch has its own norm.

    The first part goes through the layer itself, the others through the norms in `aux_bn`, with a gamma, a beta and
    running statistics of their own. Evaluation is by the layer itself, whatever the input is. Arguments and state_dict
    keys are timm's.

    Args, beyond BatchNorm's:
        num_splits: equal parts that a batch is cut into, in the order of its examples; at least 2.
    """

    _ranks = (4,)
    _torch = nn.BatchNorm2d
    _beyond = "auxiliary norms for parts of a batch"

    aux_bn: nn.ModuleList

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: Affine = True,
        track_running_stats: bool = True,
        num_splits: int = 2,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
        nonfinite: NonFinite = "propagate",
    ) -> None:
        terms = (num_features, eps, momentum, affine, track_running_stats, device, dtype)
        super().__init__(*terms, bias=bias, activation=activation, negative_slope=negative_slope, nonfinite=nonfinite)
        if type(num_splits) is not int or num_splits < 2:
            raise ArgumentError(
                f"num_splits must be a number of parts, 2 or more; got {num_splits!r}. For one part use BatchNorm2d."
            )
        self.num_splits = num_splits
        others = (BatchNorm2d(*terms, bias=bias, nonfinite=nonfinite) for _ in range(num_splits - 1))
        self.aux_bn = nn.ModuleList(others)
        self._share_activation()

    def reset_parameters(self) -> None:
        """Reset the layer and its auxiliary norms."""
        super().reset_parameters()
        for other in self._others():
            other.reset_parameters()

    def _set_activation(self, activation: ActivationLike | None, negative_slope: float) -> None:
        super()._set_activation(activation, negative_slope)
        self._share_activation()

    def _share_activation(self) -> None:
        """Let every part end in what the loops fuse; any other activation runs once, after all parts."""
        for other in self._others():
            other.activation = self._fused

    def _others(self) -> list[BatchNorm2d]:
        return [*self.aux_bn] if "aux_bn" in self._modules else []  # constructors call before there are any

    def _compute(  # type: ignore[override]
        self, input: Tensor, *, residual: Tensor | None, mask: Tensor | None, **given: Tensor | None
    ) -> Tensor:
        if not self.training:
            return super()._compute(input, residual=residual, mask=mask, **given)
        terms = batch_core.Terms(
            self._features(), given.get("weight"), given.get("bias"), self.eps, who=name(self._who)
        )
        by_example.parted(input, terms)[0].check(input)  # all, before a norm moves
        parts = self._parts(input, residual, mask)
        pieces = {key: self._pieces(t, len(input)) for key, t in given.items()}
        done = []
        for i, (x, r, m) in enumerate(zip(*parts, strict=True)):
            own = {key: of_parts[i] for key, of_parts in pieces.items()}
            if i == 0:
                done.append(super()._compute(x, residual=r, mask=m, **own))
            else:
                done.append(self.aux_bn[i - 1](x, residual=r, mask=m, **own))
        return torch.cat(done)

    def _pieces(self, parameter: Tensor | None, examples: int) -> Sequence[Tensor | None]:
        """What each part has of a weight or a bias from outside: its examples' own, or what all examples share."""
        if is_of_examples(parameter, self._features(), examples):
            return list(parameter.split(examples // self.num_splits))
        return [parameter] * self.num_splits

    def _parts(self, input: Tensor, residual: Tensor | None, mask: Tensor | None) -> list[Any]:
        """The input, residual and mask of each part. Everything is checked first: no norm moves if another refuses."""
        self._check_input_dim(input)
        who, examples, over = name(self._who), input.shape[0], (0, 2, 3)
        checks.same_shape(residual, input, who)
        mask = checks.position_mask(mask, input, who)
        if not batch_core.has_no_values(input):
            checks.enough_values(count_values(input, over, mask), input, who)
        if examples % self.num_splits:
            raise ShapeError(
                f"{who} needs a batch that {self.num_splits} norms can share equally; got {examples} examples. Take as "
                f"many of each kind (a DataLoader's drop_last=True drops a smaller last batch), or call .eval()."
            )
        sizes = [examples // self.num_splits] * self.num_splits
        parts = [[None] * self.num_splits if t is None else t.split(sizes) for t in (input, residual, mask)]
        for x, _, m in zip(*parts, strict=True):
            assert x is not None
            if not batch_core.has_no_values(x):
                checks.enough_values(count_values(x, over, m), input, who)
                if self.nonfinite == "raise":
                    checks.finite(batch_core.moments_of(x.detach(), self._features(), m, who), who)
        return parts

    def _is_torchs(self, **extras: Any) -> bool:
        return not self.training and super()._is_torchs(**extras)

    def extra_repr(self) -> str:
        """BatchNorm's line, and the parts."""
        return super().extra_repr() + f", num_splits={self.num_splits}"
