"""Norms that torch does not have, as their authors, timm, torchvision or TabNet publish them: plain torch operators.

Written from the papers' formulas, operator by operator as such code is, and with our layers' names of parameters and
buffers. They are what a user has without us, and so what we are measured against.
"""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_MAPS = (2, 3)
_BATCH = (0, 2, 3)


def _per_channel(t: Tensor, x: Tensor) -> Tensor:
    return t.reshape(1, -1, *[1] * (x.dim() - 2))


class _Affine(nn.Module):
    """Gamma and beta per channel."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def _restored(self, x: Tensor) -> Tensor:
        return x * _per_channel(self.weight, x) + _per_channel(self.bias, x)


class _Tracked(_Affine):
    """And running statistics."""

    running_mean: Tensor
    running_var: Tensor
    _has_mean: ClassVar[bool] = True

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(channels, eps)
        self.momentum = momentum
        if self._has_mean:
            self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    @torch.no_grad()
    def _move_(self, **batch: Tensor) -> None:
        for name, value in batch.items():
            self.get_buffer(name).lerp_(value.flatten().to(self.running_var.dtype), self.momentum)

    def _evaluated(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class MaskedBatchNorm(_Tracked):
    """BatchNorm over the positions of a mask, (N, ...), as one writes it by hand."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Normalize by the positions where the mask is true."""
        if not self.training:
            return self._evaluated(x)
        over = [0, *range(2, x.dim())]
        n, kept = mask.sum(), mask.unsqueeze(1).to(x.dtype)
        mean = (x * kept).sum(over, keepdim=True) / n
        var = ((x - mean).square() * kept).sum(over, keepdim=True) / n
        self._move_(running_mean=mean, running_var=var * n / (n - 1))
        return self._restored((x - mean) * torch.rsqrt(var + self.eps)).to(x.dtype)


class FrozenBatchNorm(nn.Module):
    """Stored statistics and fixed gamma and beta, folded into a scale and a shift at each call, as in torchvision."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, first in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), first))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the stored affine map."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * _per_channel(scale, x) + _per_channel(shift, x)


class BatchRenorm(_Tracked):
    """Batch renormalization (Ioffe 2017)."""

    def __init__(self, channels: int, r_max: float = 3.0, d_max: float = 5.0) -> None:
        super().__init__(channels)
        self.r_max, self.d_max = r_max, d_max

    def forward(self, x: Tensor) -> Tensor:
        """Normalize by the batch, corrected towards the running statistics."""
        if not self.training:
            return self._evaluated(x)
        mean, var = x.mean(_BATCH, keepdim=True), x.var(_BATCH, unbiased=False, keepdim=True)
        std = (var + self.eps).sqrt()
        running_mean, running_std = (
            _per_channel(t, x) for t in (self.running_mean, (self.running_var + self.eps).sqrt())
        )
        r = (std.detach() / running_std).clamp(1 / self.r_max, self.r_max)
        d = ((mean.detach() - running_mean) / running_std).clamp(-self.d_max, self.d_max)
        y = self._restored((x - mean) / std * r + d)
        with torch.no_grad():
            new_std = running_std.lerp(std, self.momentum)
            self.running_var.copy_((new_std.square() - self.eps).flatten())
        self._move_(running_mean=mean)
        return y


class AccumulatedBatchNorm(_Tracked):
    """BatchNorm with the statistics of the last micro-batches, all of one size."""

    def __init__(self, channels: int, micro_batches: int) -> None:
        super().__init__(channels)
        self.micro_batches, self.micro_step = micro_batches, 0
        self.window: deque[tuple[Tensor, Tensor]] = deque(maxlen=micro_batches - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize by this micro-batch and those before it."""
        if not self.training:
            return self._evaluated(x)
        own_mean, own_square = x.mean(_BATCH, keepdim=True), x.square().mean(_BATCH, keepdim=True)
        means, squares = zip((own_mean, own_square), *self.window, strict=True)
        mean = torch.stack(means).mean(0)
        var = torch.stack(squares).mean(0) - mean.square()
        self.window.append((own_mean.detach(), own_square.detach()))
        self.micro_step += 1
        if self.micro_step % self.micro_batches == 0:
            n = x.numel() // x.shape[1] * len(means)
            self._move_(running_mean=mean, running_var=var * n / (n - 1))
        return self._restored((x - mean) * torch.rsqrt(var + self.eps))


class MovingBatchNorm(_Tracked):
    """Moving average batch normalization (Yan et al. 2020), without the correction of late training."""

    _has_mean = False

    def __init__(self, channels: int, buffer_size: int = 16) -> None:
        super().__init__(channels, momentum=0.02)
        self.buffer_size, self.seen = buffer_size, 0
        self.squares: deque[Tensor] = deque(maxlen=buffer_size)
        self.products: deque[Tensor] = deque(maxlen=buffer_size)

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the root mean square of the last batches."""
        if not self.training:
            return self._restored(x * torch.rsqrt(_per_channel(self.running_var, x) + self.eps))
        self.squares.append(x.detach().square().mean(_BATCH, keepdim=True))
        is_warm = self.seen >= self.buffer_size  # until then each batch is normalized by itself
        var = torch.stack(list(self.squares)).mean(0) if is_warm else self.squares[-1]
        if self.seen == 0:
            self.running_var.copy_(var.flatten())
        else:
            self._move_(running_var=var)
        self.seen += 1
        return self._restored(_Moving.apply(x, var, self.products, is_warm, self.eps))


class _Moving(torch.autograd.Function):
    """x / sqrt(var + eps), with a backward that averages its statistic over the last batches as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, var: Tensor, products: deque[Tensor], is_warm: bool, eps: float) -> Tensor:
        std = (var + eps).sqrt()
        y = x / std
        ctx.products, ctx.is_warm = products, is_warm
        ctx.save_for_backward(y, std)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, std = ctx.saved_tensors
        ctx.products.append((dy * y).mean(_BATCH, keepdim=True))
        product = torch.stack(list(ctx.products)).mean(0) if ctx.is_warm else ctx.products[-1]
        return (dy - y * product) / std, None, None, None, None


class GhostBatchNorm(nn.Module):
    """One BatchNorm on each chunk of the batch, as in TabNet."""

    def __init__(self, norm: nn.Module, chunk_size: int) -> None:
        super().__init__()
        self.norm, self.chunk_size = norm, chunk_size

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the chunks, in training and in evaluation."""
        return torch.cat([self.norm(chunk) for chunk in x.split(self.chunk_size)])


class DomainBatchNorm(nn.Module):
    """A BatchNorm for each domain, of which the first is used."""

    def __init__(self, channels: int, num_domains: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(num_domains))
        self.domain = 0

    def forward(self, x: Tensor) -> Tensor:
        """Normalize with the statistics of the present domain."""
        return self.norms[self.domain](x)  # type: ignore[no-any-return]


class SwitchableNorm(_Tracked):
    """A learned mix of instance, layer and batch statistics (Luo et al. 2019)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.mean_weight = nn.Parameter(torch.ones(3))
        self.var_weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize by the mix."""
        mean_in, var_in = x.mean(_MAPS, keepdim=True), x.var(_MAPS, unbiased=False, keepdim=True)
        square = var_in + mean_in.square()
        mean_ln = mean_in.mean(1, keepdim=True)
        var_ln = square.mean(1, keepdim=True) - mean_ln.square()
        if self.training:
            mean_bn = mean_in.mean(0, keepdim=True)
            var_bn = square.mean(0, keepdim=True) - mean_bn.square()
            n = x.numel() // x.shape[1]
            self._move_(running_mean=mean_bn, running_var=var_bn * (n / (n - 1)))
        else:
            mean_bn, var_bn = _per_channel(self.running_mean, x), _per_channel(self.running_var, x)
        a, b = F.softmax(self.mean_weight, 0), F.softmax(self.var_weight, 0)
        mean = a[0] * mean_in + a[1] * mean_ln + a[2] * mean_bn
        var = b[0] * var_in + b[1] * var_ln + b[2] * var_bn
        return self._restored((x - mean) / (var + self.eps).sqrt())


class EvoNormB0(_Tracked):
    """EvoNorm with batch statistics (Liu et al. 2020)."""

    _has_mean = False

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.v = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize and activate."""
        if self.training:
            var = x.var(_BATCH, unbiased=False, keepdim=True)
            n = x.numel() // x.shape[1]
            self._move_(running_var=var * n / (n - 1))
        else:
            var = _per_channel(self.running_var, x)
        instance_std = (x.var(_MAPS, unbiased=False, keepdim=True) + self.eps).sqrt()
        return self._restored(x / torch.maximum((var + self.eps).sqrt(), x * _per_channel(self.v, x) + instance_std))


class EvoNormS0(_Affine):
    """EvoNorm with the statistics of groups of channels (Liu et al. 2020)."""

    def __init__(self, channels: int, groups: int = 32) -> None:
        super().__init__(channels)
        self.groups = groups
        self.v = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize and activate."""
        n, c, h, w = x.shape
        grouped = x.reshape(n, self.groups, c // self.groups, h, w)
        std = (grouped.var((2, 3, 4), unbiased=False, keepdim=True) + self.eps).sqrt()
        std = std.expand(n, self.groups, c // self.groups, 1, 1).reshape(n, c, 1, 1)
        return self._restored(x * (x * _per_channel(self.v, x)).sigmoid() / std)


class FilterResponseNorm(_Affine):
    """Filter response normalization with its threshold (Singh & Krishnan 2020)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)
        self.tau = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the root mean square of each map, and cut off below."""
        y = self._restored(x * torch.rsqrt(x.square().mean(_MAPS, keepdim=True) + self.eps))
        return torch.maximum(y, _per_channel(self.tau, x))


class ScaleNorm(nn.Module):
    """One learned length for every vector (Nguyen & Salazar 2019)."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.tensor([dim**0.5]))

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the length of the last dimension."""
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * (self.weight / length.clamp(min=self.eps))


class LayerNorm2d(_Affine):
    """Layer normalization of the channels of maps, as ConvNeXt, torchvision and timm have it: permuted and back."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the channels of each position."""
        rows = F.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias, self.eps)
        return rows.permute(0, 3, 1, 2)


class RMSNorm2d(nn.Module):
    """Root mean square normalization of the channels of maps, as timm has it: operators over the second dimension."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Divide the channels of each position by their root mean square."""
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + self.eps) * _per_channel(self.weight, x)


class DynamicTanh(nn.Module):
    """A tanh in the place of a layer norm (Zhu et al. 2025)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Squash every value."""
        return torch.tanh(self.alpha * x) * self.weight + self.bias


class Derf(DynamicTanh):
    """An error function in its place (Chen et al. 2025)."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Squash every value."""
        return torch.erf(self.alpha * x + self.shift) * self.weight + self.bias
