"""A small DCGAN (Radford, Metz & Chintala 2015)."""

from __future__ import annotations

from functools import partial

from torch import nn

from normkit.errors import ArgumentError
from normkit.lab.models.initial import InitName, initialize_
from normkit.lab.models.units import Finish, Norm, unit

_leaky = partial(nn.LeakyReLU, 0.2)  # the paper's slope, which is not the one that our layers carry


def dcgan(
    norm: Norm | None,
    *,
    channels: int = 1,
    size: int = 28,
    latent: int = 64,
    width: int = 32,
    init: InitName = "gaussian",
    scale: float = 0.02,
) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a generator, (N, latent) -> images in [-1, 1], and a discriminator, images -> logits (N).

    All layers are normalized but the generator's output and the discriminator's input (and its one logit). `width`
    channels are next to the images and double with every halving: 28, 14, 7 pixels a side, or 32, 16, 8, 4. N(0, 0.02)
    is the paper's initialization.
    """
    halvings = _halvings(size)
    smallest = size >> halvings
    widths = [width << i for i in range(halvings)]  # from the image inwards
    models = _generator(norm, channels, smallest, latent, widths), _discriminator(norm, channels, smallest, widths)
    for model in models:
        initialize_(model, init, scale)
    return models


def _halvings(size: int) -> int:
    """How often a size can be halved down to 4 pixels or an odd number of them."""
    count = 0
    while size > 4 and size % 2 == 0:
        size, count = size // 2, count + 1
    if not count or size > 7:
        raise ArgumentError(f"size must be 4 to 7 doubled once or more, as 28 or 32; got {size << count}.")
    return count


def _generator(norm: Norm | None, channels: int, smallest: int, latent: int, widths: list[int]) -> nn.Sequential:
    finish = Finish(norm)
    inputs = widths[-1]
    first = nn.ConvTranspose2d(latent, inputs, smallest, bias=finish.bias)
    model = nn.Sequential(nn.Unflatten(1, (latent, 1, 1)), unit(first, inputs, finish))
    for outputs in reversed(widths[:-1]):
        doubling = nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1, bias=finish.bias)
        model.append(unit(doubling, outputs, finish))
        inputs = outputs
    last = nn.ConvTranspose2d(inputs, channels, 4, stride=2, padding=1)
    return model.append(unit(last, channels, Finish(None, nn.Tanh)))


def _discriminator(norm: Norm | None, channels: int, smallest: int, widths: list[int]) -> nn.Sequential:
    model = nn.Sequential()
    inputs = channels
    for outputs in widths:
        finish = Finish(norm if len(model) else None, _leaky)
        halving = nn.Conv2d(inputs, outputs, 4, stride=2, padding=1, bias=finish.bias)
        model.append(unit(halving, outputs, finish))
        inputs = outputs
    return model.extend([nn.Conv2d(inputs, 1, smallest), nn.Flatten(0)])
