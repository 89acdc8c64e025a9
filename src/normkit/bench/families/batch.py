"""BatchNorm: on the inputs that its loops are judged by, with every activation, mask, type and layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import get_args

import torch

from normkit.activations import ActivationName
from normkit.bench.case import Case
from normkit.bench.contestants import Shape, batch_norm, masked_batch_norm
from normkit.bench.layer_case import Input, LayerCase, Mode

MODES: tuple[Mode, Mode] = ("training", "evaluation")
EVERYDAY = {"everyday": True}  # a call of which none may be slower than what torch has

_MAPS: list[Shape] = [(32, 64, 56, 56), (64, 256, 14, 14), (128, 64, 32, 32), (8, 2048, 7, 7)]
_USUAL: Shape = (32, 64, 28, 28)

KERNEL_INPUTS: Sequence[Input] = (  # those of the first prototype, by which the loops are judged since
    *(Input(shape) for shape in [*_MAPS, (256, 512)]),
    *(Input(shape, "channels_last") for shape in _MAPS),
    Input(_MAPS[0], dtype=torch.bfloat16),
    Input(_MAPS[0], "channels_last", torch.bfloat16),
    Input((256, 512), dtype=torch.bfloat16),
)
MORE_INPUTS: Sequence[Input] = (  # chosen before they were measured, from networks that people train
    Input((16, 128, 28, 28)),
    Input((8, 32, 112, 112)),
    Input((32, 512, 7, 7)),
    Input((16, 256, 28, 28), "channels_last"),
    Input((16, 96, 56, 56), "channels_last"),
    Input((32, 1280, 4, 4), "channels_last"),
    Input((16, 256, 28, 28), dtype=torch.bfloat16),
    Input((16, 128, 28, 28), "channels_last", torch.bfloat16),
    Input((1024, 256)),
    Input((512, 1024)),
)

# (N, C, H, W) before the ReLUs of networks that people train, at a batch that a laptop can carry.
_NETWORKS: dict[str, list[Shape]] = {
    "ResNet-50": [(16, 64, 112, 112), (16, 256, 56, 56), (16, 512, 28, 28), (16, 1024, 14, 14), (16, 2048, 7, 7)],
    "BN-Inception": [(16, 192, 56, 56), (16, 320, 28, 28), (16, 576, 14, 14), (16, 1024, 7, 7)],
    "MobileNetV2": [(16, 32, 112, 112), (16, 96, 56, 56), (16, 144, 56, 56), (16, 960, 7, 7)],
    "U-Net": [(2, 64, 256, 256), (2, 128, 128, 128), (2, 1024, 16, 16)],
}

# No loop was made for these: odd channels and maps, volumes, one large image, one channel, 7x7 and 1x1 maps, sequences.
_UNTUNED: list[Shape] = [
    (16, 17, 31, 31),
    (64, 33, 5, 5),
    (4, 24, 8, 20, 20),
    (1, 16, 512, 512),
    (64, 1, 64, 64),
    (32, 192, 7, 7),
    (64, 512, 1, 1),
    (32, 48, 200),
    (63, 129),
]
_UNTUNED_CHANNELS_LAST: list[Shape] = [(16, 3, 64, 64), (16, 17, 31, 31), (32, 192, 7, 7), (4, 24, 8, 20, 20)]


def batch() -> Iterator[Case]:
    """BN + ReLU in training and evaluation, with a residual, and without the activation."""
    for mode in MODES:
        for x in KERNEL_INPUTS:
            contestants = batch_norm(x.shape, compiled=True)
            yield LayerCase("batch", x, contestants, "BN + ReLU", mode, quick=True, tags={"kernel": True})
        for x in MORE_INPUTS:
            yield LayerCase("batch", x, batch_norm(x.shape), "BN + ReLU", mode)
    for x in (*KERNEL_INPUTS, *MORE_INPUTS):
        yield LayerCase("batch", x, batch_norm(x.shape), "BN + add + ReLU", extras=("residual",))
        yield LayerCase("batch", x, batch_norm(x.shape, None), "BN")


def activations() -> Iterator[Case]:
    """BN and each activation but ReLU."""
    inputs = (
        Input(_USUAL),
        Input(_USUAL, "channels_last"),
        Input(_USUAL, dtype=torch.bfloat16),
        Input((256, 512)),
    )
    for activation in get_args(ActivationName):
        for mode in MODES if activation != "relu" else ():
            for x in inputs:
                usual = x == inputs[0]
                yield LayerCase(
                    "activations",
                    x,
                    batch_norm(x.shape, activation),
                    f"BN + {activation}",
                    mode,
                    quick=usual,
                    tags={"everyday": usual, "activation": activation},
                )


def masks() -> Iterator[Case]:
    """BN with a mask of the positions, of maps and of sequences."""
    inputs = (
        Input(_USUAL),
        Input(_USUAL, "channels_last"),
        Input((32, 256, 200)),
        Input((32, 256, 200), "transposed"),
        Input(_USUAL, dtype=torch.bfloat16),
    )
    for mode in MODES:
        for x in inputs:
            case = partial(LayerCase, "masks", x, masked_batch_norm(x.shape), "BN with a mask", mode, ("mask",))
            yield case(quick=x == inputs[0], tags=EVERYDAY)


def types() -> Iterator[Case]:
    """BN in float64 and half precision, with parameters of the input's type or of another."""
    double, half, brain = torch.float64, torch.float16, torch.bfloat16
    for mode in MODES:
        case = partial(LayerCase, "types", mode=mode)
        for x in (Input(_USUAL, dtype=double), Input(_USUAL, "channels_last", double), Input((256, 512), dtype=double)):
            quick = x.shape == _USUAL and x.layout == "contiguous"
            yield case(x, batch_norm(x.shape, None), "BN", parameters=double, quick=quick, tags=EVERYDAY)
        for dtype in (half, brain):
            yield case(Input(_USUAL, dtype=dtype), batch_norm(_USUAL, None), "BN")
            title = "BN, all parameters of its type,"
            yield case(Input(_USUAL, dtype=dtype), batch_norm(_USUAL, None), title, parameters=dtype)


def strides() -> Iterator[Case]:
    """BN on inputs that do not lie in one piece, or not in the usual order."""
    inputs = (Input(_USUAL, "slice"), Input((32, 64, 784), "transposed"), Input(_USUAL, "every other"))
    for mode in MODES:
        for x in inputs:
            yield LayerCase("strides", x, batch_norm(x.shape, None), "BN", mode, quick=True, tags=EVERYDAY)


def shapes() -> Iterator[Case]:
    """BN + ReLU on the shapes of networks, and on shapes that no loop was made for."""
    for network, of_network in _NETWORKS.items():
        for shape in of_network:
            tags, quick = {"origin": "networks"}, shape == of_network[-1]
            yield LayerCase("shapes", Input(shape), batch_norm(shape), network, quick=quick, tags=tags)
    untuned = [*map(Input, _UNTUNED), *(Input(shape, "channels_last") for shape in _UNTUNED_CHANNELS_LAST)]
    for x in untuned:
        quick = x in (Input((16, 17, 31, 31)), Input((64, 512, 1, 1)))
        yield LayerCase("shapes", x, batch_norm(x.shape), "BN + ReLU", quick=quick, tags={"origin": "untuned"})
