"""Models of sequences as others write them, in plain torch: they know nothing of masks, but where attention does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def valid_positions(lengths: Tensor, size: int) -> Tensor:
    """True at the first positions of each example: (N, L)."""
    return torch.arange(size) < lengths[:, None]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:  # (N, L, C)
        h = self.norm(x)
        return x + self.heads(h, h, h, key_padding_mask=~valid, need_weights=False)[0]


def feed_forward(width: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))


class ConformerConvolution(nn.Module):
    def __init__(self, width: int, norms: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.pointwise, self.back = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depthwise, self.batch_norm = nn.Conv1d(width, width, 5, padding=2, groups=width), norms.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:  # (N, L, C)
        h = F.glu(self.pointwise(self.norm(x).transpose(1, 2)), 1)
        return x + self.back(F.silu(self.batch_norm(self.depthwise(h)))).transpose(1, 2)


class ConformerBlock(nn.Module):
    def __init__(self, width: int, norms: Any) -> None:
        super().__init__()
        self.first, self.last = feed_forward(width), feed_forward(width)
        self.attention, self.convolution = Attention(width), ConformerConvolution(width, norms)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        x = self.attention(x + 0.5 * self.first(x), valid)
        x = self.convolution(x)
        return self.norm(x + 0.5 * self.last(x))


class Conformer(nn.Module):
    """Spectrograms (N, L, 9), a quarter of the length after two strided convolutions, then blocks with attention."""

    def __init__(self, norms: Any = nn, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        first, second = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, stride=2)
        self.subsample = nn.Sequential(first, norms.BatchNorm2d(4), nn.ReLU(), second)
        self.project = nn.Linear(4 * 2, width)
        self.blocks = nn.ModuleList(ConformerBlock(width, norms) for _ in range(blocks))

    @staticmethod
    def lengths_after(lengths: Tensor) -> Tensor:
        return ((lengths - 1) // 2 + 1 - 3) // 2 + 1

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.subsample(x.unsqueeze(1))  # (N, C, L, F)
        h = self.project(h.transpose(1, 2).flatten(2))
        valid = valid_positions(self.lengths_after(lengths), h.shape[1])
        for block in self.blocks:
            h = block(h, valid)
        return h  # (N, L, C)


class Wav2Vec(nn.Module):
    """Waveforms (N, L), strided convolutions with a norm after the first, and positions from a convolution."""

    strides = ((10, 5), (3, 2), (2, 2))  # kernel size and stride

    def __init__(self, norms: Any = nn, norm: str = "group", width: int = 8) -> None:
        super().__init__()
        sizes = [1, *[width] * len(self.strides)]
        self.encoder = nn.ModuleList(nn.Conv1d(sizes[i], width, *s, bias=False) for i, s in enumerate(self.strides))
        kinds = {"group": lambda: norms.GroupNorm(width, width), "batch": lambda: norms.BatchNorm1d(width)}
        kinds["instance"] = lambda: norms.InstanceNorm1d(width, affine=True)
        self.norm = kinds[norm]()
        self.project = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        self.positions = nn.Conv1d(width, width, 4, padding=2, groups=2)  # one position too many
        self.attention, self.feed_forward = Attention(width), feed_forward(width)

    @classmethod
    def lengths_after(cls, lengths: Tensor) -> Tensor:
        for size, stride in cls.strides:
            lengths = (lengths - size) // stride + 1
        return lengths

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = x.unsqueeze(1)
        for i, convolution in enumerate(self.encoder):
            h = convolution(h)
            h = F.gelu(h if i else self.norm(h))
        h = self.project(h.transpose(1, 2))
        h = h + F.gelu(self.positions(h.transpose(1, 2))[:, :, :-1]).transpose(1, 2)
        h = self.attention(h, valid_positions(self.lengths_after(lengths), h.shape[1]))
        return h + self.feed_forward(h)  # (N, L, C)
