"""A small causal transformer over characters, its norms before or after each branch (Xiong et al. 2020)."""

from __future__ import annotations

from math import sqrt
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import normkit as nk
from normkit.errors import ArgumentError
from normkit.lab.models.initial import initialize_
from normkit.lab.models.units import Norm

Placement = Literal["pre", "post"]


class TokenBatchNorm(nn.Module):
    """Batch Normalization of features that come last, (N, L, C), over all examples and positions."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nk.BatchNorm1d(features)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each feature."""
        return self.norm(x.flatten(0, 1)).view_as(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention of every position to itself and those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)  # queries, keys and values
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (N, L, C)
        """Attend."""
        query, key, value = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (N, heads, L, .)
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A branch beside the identity: x + branch(norm(x)), or norm(x + branch(x))."""

    def __init__(self, branch: nn.Module, norm: nn.Module, placement: Placement) -> None:
        super().__init__()
        self.branch, self.norm, self.placement = branch, norm, placement

    def forward(self, x: Tensor) -> Tensor:
        """Add what the branch says."""
        if self.placement == "pre":
            return x + self.branch(self.norm(x))  # type: ignore[no-any-return]
        return self.norm(x + self.branch(x))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Where the norm stands."""
        return f"placement={self.placement!r}"


class Transformer(nn.Module):
    """Predicts each next character: (N, L) places in an alphabet to logits (N, L, alphabet)."""

    def __init__(
        self, norm: Norm | None, placement: Placement, alphabet: int, length: int, width: int, blocks: int, heads: int
    ) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(alphabet, width), nn.Embedding(length, width)
        self.residuals = nn.Sequential(
            *(
                Residual(branch, nn.Identity() if norm is None else norm(width), placement)
                for _ in range(blocks)
                for branch in (Attention(width, heads), _feedforward(width))
            )
        )
        self.norm = norm(width) if norm is not None and placement == "pre" else nn.Identity()
        self.classifier = nn.Linear(width, alphabet)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of the characters that follow each of these."""
        length, most = characters.shape[1], self.positions.num_embeddings
        if length > most:
            raise ArgumentError(f"The transformer needs at most {most} characters in a row; got {length}.")
        x = self.characters(characters) + self.positions.weight[:length]
        return self.classifier(self.norm(self.residuals(x * sqrt(x.shape[-1]))))  # type: ignore[no-any-return]


def _feedforward(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


def transformer(
    norm: Norm | None,
    placement: Placement = "pre",
    *,
    alphabet: int,
    length: int = 64,
    width: int = 64,
    blocks: int = 4,
    heads: int = 4,
    seed: int | None = None,
) -> Transformer:
    """Return a transformer for up to `length` characters; norms take the `width` and get (N, L, width).

    "pre": a norm before each branch, and one at the end; "post": one after each sum. Weights are Glorot's, those of
    characters and positions have the variance 1 / width and are multiplied by sqrt(width), as Vaswani et al. 2017; with
    `seed` they are the same whatever the norm.
    """
    if placement not in get_args(Placement):
        raise ArgumentError(f'placement must be "pre" or "post"; got {placement!r}.')
    if width % heads:
        raise ArgumentError(f"The width must be a multiple of the {heads} heads; got {width}.")
    model = Transformer(norm, placement, alphabet, length, width, blocks, heads)
    initialize_(model, "glorot", seed=seed)
    for embedding in (model.characters, model.positions):
        nn.init.normal_(embedding.weight, 0.0, 1 / sqrt(width))
    return model
