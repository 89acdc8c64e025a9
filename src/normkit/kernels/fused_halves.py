"""The backward of batch statistics in two halves, by the operators of torch's SyncBatchNorm where a device has them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.activations import LEAKY_SLOPE
from normkit.kernels import fused
from normkit.kernels.masked import statistics_dtype
from normkit.kernels.reference import Recipe
from normkit.moments import Moments


class FusedHalves(NamedTuple):
    """What is summed, and how the sums, once shared over processes, spread over x."""

    dz: Tensor  # gradient of what enters the activation
    x: Tensor
    weight: Tensor | None
    mean: Tensor
    inverse_std: Tensor
    total: Tensor  # how many values share the statistics
    over: tuple[int, ...]

    @staticmethod
    def of(
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        m: Moments,
        recipe: Recipe,
    ) -> FusedHalves:
        """Undo the activation; its argument is computed again from x, by one operator."""
        dz, own = dy.to(x.dtype), statistics_dtype(x)
        if recipe.activation is not None:
            z = fused.normalize_stored(x, recipe._replace(activation=None), m, weight, bias, residual)
            dz = behind(dz, z, recipe.activation)
        mean, inverse_std = m.mean.to(own), (m.var + recipe.eps).rsqrt().to(own)
        weight = None if weight is None else weight.detach().to(own)
        return FusedHalves(dz, x, weight, mean, inverse_std, torch.as_tensor(m.count, device=x.device), recipe.over)

    def sums(self) -> Tensor:
        """Sums of dz and of dz * xhat, for each statistic."""
        if has_operators(self.x):
            of_dz, of_dz_x, _, _ = torch.batch_norm_backward_reduce(
                self.dz, self.x, self.mean, self.inverse_std, self.weight, True, False, False
            )
            return torch.stack([of_dz, of_dz_x * self.inverse_std])
        of_dz = self.dz.sum(self.over, dtype=self.mean.dtype)
        of_dz_x = (self._from_mean() * self.dz).sum(self.over)
        return torch.stack([of_dz, of_dz_x * self.inverse_std])

    def spread(self, sums: Tensor) -> Tensor:
        """The gradient of x, from the sums over all values that share the statistics."""
        of_dz, of_dz_xhat = sums.to(self.mean.dtype)
        total = self.total.flatten()[:1]
        if has_operators(self.x):
            of_dz_x = of_dz_xhat / self.inverse_std
            arguments = (self.dz, self.x, self.mean, self.inverse_std, self.weight, of_dz, of_dz_x)
            return torch.batch_norm_backward_elemt(*arguments, total.to(torch.int32))
        scale = self.inverse_std if self.weight is None else self.inverse_std * self.weight
        slope = scale * self.inverse_std * of_dz_xhat / total
        through = torch.addcmul(self._view(-scale * of_dz / total), self._from_mean(), self._view(-slope))
        return torch.addcmul(through, self.dz, self._view(scale)).to(self.x.dtype)

    def _from_mean(self) -> Tensor:
        return self.x - self._view(self.mean)

    def _view(self, t: Tensor) -> Tensor:
        return t.reshape([1 if d in self.over else n for d, n in enumerate(self.x.shape)])


def has_operators(x: Tensor) -> bool:
    """Whether torch has the operators of its SyncBatchNorm on this device."""
    return x.is_cuda


def behind(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    """Return the gradient of z from that of activation(z), by torch's own operator."""
    aten: Any = torch.ops.aten
    match activation:
        case "relu":
            found = aten.threshold_backward(dy, z, 0)
        case "leaky_relu":
            found = aten.leaky_relu_backward(dy, z, LEAKY_SLOPE, False)
        case "silu":
            found = aten.silu_backward(dy, z)
        case "gelu":
            found = aten.gelu_backward(dy, z)
        case "sigmoid":
            found = aten.sigmoid_backward(dy, z.sigmoid())
        case _:
            found = aten.tanh_backward(dy, z.tanh())
    return found  # type: ignore[no-any-return]
