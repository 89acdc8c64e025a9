"""Shuffled batch normalization, for contrastive learning (He et al. 2020): random parts of a batch share statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit import checks
from normkit.functional.by_example import is_of_examples
from normkit.layers.ghost import GhostBatchNorm
from normkit.layers.norm_layer import name


class ShuffledBatchNorm(GhostBatchNorm):
    """What the shuffled norms share: in training, chunks of the batch in a random order have statistics of their own.

    The order is drawn at each forward from torch's generator, as dropout draws; the output is in the order of the
    input. Running statistics move chunk by chunk, as a GhostBatchNorm's.
    """

    _beyond = "statistics for random chunks of a batch"

    def _compute(  # type: ignore[override]
        self, input: Tensor, *, residual: Tensor | None, mask: Tensor | None, **given: Tensor | None
    ) -> Tensor:
        if not self.training:
            return super()._compute(input, residual=residual, mask=mask, **given)
        self._check_input_dim(input)
        if len(self._sizes(input)) == 1:  # which has no order
            return super()._compute(input, residual=residual, mask=mask, **given)
        who = name(self._who)
        checks.same_shape(residual, input, who)
        checks.position_mask(mask, input, who)
        order = self._order(input)
        # By indices, which keep the layout of the memory: index_select does not.
        along = {key: None if t is None else t[order] for key, t in (("residual", residual), ("mask", mask))}
        along |= {key: t[order] if is_of_examples(t, self._features(), len(input)) else t for key, t in given.items()}
        return super()._compute(input[order], **along)[order.argsort()]

    def _order(self, input: Tensor) -> Tensor:
        return torch.randperm(input.shape[0], device=input.device)


class ShuffledBatchNorm1d(ShuffledBatchNorm, nn.BatchNorm1d, one_step=True):
    """Shuffled batch normalization of (N, C) or (N, C, L)."""

    _ranks = (2, 3)
    _torch = nn.BatchNorm1d


class ShuffledBatchNorm2d(ShuffledBatchNorm, nn.BatchNorm2d, one_step=True):
    """Shuffled batch normalization of (N, C, H, W)."""

    _ranks = (4,)
    _torch = nn.BatchNorm2d
