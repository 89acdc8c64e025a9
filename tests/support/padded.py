"""A batch of sequences of unequal lengths."""

import torch
from torch import Tensor


def ragged() -> tuple[Tensor, Tensor, list[int]]:
    """A padded batch, its mask, and the true lengths.

    Values lie at least 1 apart: two that happen to be equal would have no variance, and a gradient beyond float16.
    """
    lengths = torch.tensor([9, 4, 2, 7])
    x = torch.rand(4, 6, 9, dtype=torch.float64) + 2 * torch.randn(4, 6, 9).argsort(-1)
    return x, torch.arange(9) < lengths[:, None], lengths.tolist()
