"""Operators that only compiled code needs, for what the compiler would compute again, or would lose.

Code that needs one imports this file only then, which a compiler can follow, so that `import normkit` stays fast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.kernels.moving import OVER, chosen, scaled


@torch.library.custom_op("normkit::hold", mutates_args=())
def hold(t: Tensor) -> Tensor:
    """See `hold.hold`."""
    return t.clone()


@hold.register_fake
def _(t: Tensor) -> Tensor:
    return torch.empty_like(t)


# Moving averages. The compiler loses what an autograd.Function writes in its backward, but keeps what an operator
# declares that it writes. In a backward it may compute values again from buffers that the forward has changed by then:
# what the backward needs is returned by the operator, which it cannot look into.


@torch.library.custom_op("normkit::moving_normalize", mutates_args=())
def moving_normalize(
    x: Tensor, var: Tensor, ratio: Tensor, exact: Tensor, here: Tensor, ring: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `moving.by_operators`, and what its backward needs."""
    return scaled(x, var, ratio, eps), (var + eps).sqrt(), ratio.clone(), exact.clone(), here.clone()


@torch.library.custom_op("normkit::moving_remember", mutates_args=("ring",))
def _remember(product: Tensor, here: Tensor, ring: Tensor) -> Tensor:
    recent = torch.where(here, product, ring.to(product.dtype))
    ring.copy_(recent)
    return recent


@moving_normalize.register_fake
def _(
    x: Tensor, var: Tensor, ratio: Tensor, exact: Tensor, here: Tensor, ring: Tensor, eps: float
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t) for t in (x, var, ratio, exact, here))


@_remember.register_fake
def _(product: Tensor, here: Tensor, ring: Tensor) -> Tensor:
    return torch.empty_like(ring, dtype=product.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *_, ring, _ = inputs
    ctx.save_for_backward(x, *output[1:], ring)


def _moving_backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, std, ratio, exact, here, ring = ctx.saved_tensors
    z, g = x / std, dy * ratio
    product = (g * z).mean(OVER)
    recent = _remember(product, here, ring)
    return (g - z * chosen(exact, product, recent)) / std, None, None, None, None, None, None


moving_normalize.register_autograd(_moving_backward, setup_context=_keep)
