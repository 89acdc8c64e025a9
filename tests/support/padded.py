"""A batch of sequences of unequal lengths."""

import torch


def ragged():
    """A padded batch, its mask, and the true lengths."""
    x, lengths = torch.randn(4, 6, 9, dtype=torch.float64) + 2, torch.tensor([9, 4, 2, 7])
    return x, torch.arange(9) < lengths[:, None], lengths.tolist()
