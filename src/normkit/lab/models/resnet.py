"""Residual nets (He et al. 2015 and 2016), and the same layers without shortcuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from normkit.errors import ArgumentError
from normkit.lab.models.initial import InitName, initialized
from normkit.lab.models.units import Finish, Join, Norm, conv_unit, norm_unit

BlockName = Literal["v1", "preact", "plain"]
MakeBlock = Callable[[int, int, Finish, int], nn.Module]  # inputs, outputs, finish, stride


class PaddedShortcut(nn.Module):
    """The identity; where a block changes the shape, every other pixel, and zeros for the new channels (option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.added, self.stride = outputs - inputs, stride

    def forward(self, x: Tensor) -> Tensor:
        """Bring x to the shape of the branch."""
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.added)) if self.added else x


def projected_shortcut(inputs: int, outputs: int, finish: Finish, stride: int) -> nn.Module:
    """Return the identity; where a block changes the shape, a 1x1 convolution and its norm (option B)."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return conv_unit(inputs, outputs, 1, finish.bare(), stride=stride)


class Block(nn.Module):
    """Two 3x3 convolutions, whose norm and activation follow: activation(norm(branch(x)) + shortcut(x))."""

    def __init__(self, inputs: int, outputs: int, finish: Finish, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=finish.bias)
        self.branch = nn.Sequential(conv_unit(inputs, outputs, 3, finish, stride=stride), second)
        self.join = Join(outputs, finish)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Add the shortcut before the last activation."""
        return self.join(self.branch(x), self.shortcut(x))  # type: ignore[no-any-return]


class PreactBlock(nn.Module):
    """Two 3x3 convolutions, whose norm and activation come first: x + branch(x)."""

    def __init__(self, inputs: int, outputs: int, finish: Finish, stride: int) -> None:
        super().__init__()
        # No norm follows the second at once, but whatever reads the sum is one: its bias would be redundant too.
        self.branch = nn.Sequential(
            norm_unit(inputs, finish),
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=finish.bias),
            norm_unit(outputs, finish),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=finish.bias),
        )
        self.shortcut = PaddedShortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the branch finds; nothing stands in the way of x itself."""
        return self.shortcut(x) + self.branch(x)  # type: ignore[no-any-return]


def _v1(inputs: int, outputs: int, finish: Finish, stride: int) -> nn.Module:
    return Block(inputs, outputs, finish, stride, PaddedShortcut(inputs, outputs, stride))


def _projected(inputs: int, outputs: int, finish: Finish, stride: int) -> nn.Module:
    return Block(inputs, outputs, finish, stride, projected_shortcut(inputs, outputs, finish, stride))


def _plain(inputs: int, outputs: int, finish: Finish, stride: int) -> nn.Module:
    return nn.Sequential(conv_unit(inputs, outputs, 3, finish, stride=stride), conv_unit(outputs, outputs, 3, finish))


_BLOCKS: dict[str, MakeBlock] = {"v1": _v1, "preact": PreactBlock, "plain": _plain}


class ResNet(nn.Module):
    """A `stem`, `stages` of blocks, an `end` and a linear `classifier`. Residual blocks have a `branch`."""

    def __init__(self, stem: nn.Module, stages: nn.Sequential, end: nn.Module, features: int, classes: int) -> None:
        super().__init__()
        self.stem, self.stages, self.end = stem, stages, end
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(features, classes)

    def branches(self) -> list[nn.Sequential]:
        """The residual branches, in order: what Fixup and SkipInit work on."""
        return [module.branch for module in self.modules() if isinstance(module, Block | PreactBlock)]

    def features(self, x: Tensor) -> Tensor:
        """Return what the classifier reads, (N, features)."""
        return self.pool(self.end(self.stages(self.stem(x))))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.classifier(self.features(x))  # type: ignore[no-any-return]


def blocks_per_stage(depth: int) -> int:
    """The blocks in each of three stages of a net of so many layers: n of 6n + 2."""
    if depth < 8 or depth % 6 != 2:
        raise ArgumentError(f"depth must be 6n + 2, as 20, 32, 44, 56 or 110; got {depth}.")
    return depth // 6


def resnet(
    depth: int,
    norm: Norm | None,
    *,
    in_channels: int = 3,
    classes: int = 10,
    block: BlockName = "v1",
    width: int = 16,
    stem_stride: int = 1,
    init: InitName | None = "he",
    scale: float = 1.0,
) -> ResNet:
    """Return a net of 20, 32, 44, 56, 110 or any 6n + 2 layers for 32x32 and 28x28, in stages of 1, 2 and 4 widths.

    "plain" blocks have no shortcuts. Shortcuts have no parameters: new channels begin as zeros. With a
    `stem_stride` of 2 in the first convolution the net is four times as fast.
    """
    blocks = blocks_per_stage(depth)
    if block not in _BLOCKS:
        raise ArgumentError(f"block must be one of {', '.join(_BLOCKS)}; got {block!r}.")
    finish = Finish(norm)
    is_preact = block == "preact"
    stem: nn.Module = conv_unit(in_channels, width, 3, finish, stride=stem_stride)
    if is_preact:  # the first block brings the norm and the activation
        stem = nn.Conv2d(in_channels, width, 3, stem_stride, padding=1, bias=finish.bias)
    stages = _stages(_BLOCKS[block], width, (width, 2 * width, 4 * width), blocks, finish)
    end = norm_unit(4 * width, finish) if is_preact else nn.Identity()
    model = ResNet(stem, stages, end, 4 * width, classes)
    return initialized(model, init, scale)


def resnet18(
    norm: Norm | None,
    *,
    in_channels: int = 3,
    classes: int = 1000,
    width: int = 64,
    init: InitName | None = "he",
    scale: float = 1.0,
) -> ResNet:
    """Return ResNet-18 for 224x224, with projections where a block changes the shape."""
    finish = Finish(norm)
    stem = conv_unit(in_channels, width, 7, finish, stride=2)
    stem.add_module("pool", nn.MaxPool2d(3, stride=2, padding=1))
    stages = _stages(_projected, width, (width, 2 * width, 4 * width, 8 * width), 2, finish)
    model = ResNet(stem, stages, nn.Identity(), 8 * width, classes)
    return initialized(model, init, scale)


def _stages(make: MakeBlock, inputs: int, widths: Sequence[int], blocks: int, finish: Finish) -> nn.Sequential:
    """Stages of `blocks` blocks each; all but the first begin with a stride."""
    stages = nn.Sequential()
    for index, outputs in enumerate(widths):
        first = make(inputs, outputs, finish, 2 if index else 1)
        stages.append(nn.Sequential(first, *(make(outputs, outputs, finish, 1) for _ in range(blocks - 1))))
        inputs = outputs
    return stages
