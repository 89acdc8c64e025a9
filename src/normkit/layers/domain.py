"""Batch normalization with statistics per domain: source and target, real and fake, clean and adversarial."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from normkit import checks
from normkit.activations import LEAKY_SLOPE, ActivationLike
from normkit.checks import NonFinite
from normkit.errors import ArgumentError
from normkit.kernels import layer_calls
from normkit.layers.affine_parts import Affine
from normkit.layers.batch import BatchNorm
from normkit.moments import Moments
from normkit.tracing import is_plain


class DomainBatchNorm(BatchNorm):
    """What the domain norms share: one set of running statistics per domain, gamma and beta in common or one set each.

    Say which with `layer(x, domain=k)`, with `nk.domain(model, k)` around a whole model, or by setting `layer.domain`.

    Args, beyond BatchNorm's:
        num_domains: how many; `running_mean` and `running_var` have shape (num_domains, C).
        affine_per_domain: a gamma and a beta for every domain too; `weight` and `bias` then have shape
            (num_domains, C).
    """

    _beyond = "statistics for every domain"
    affine_per_domain = False  # also in layers that were pickled before this option existed

    def __init__(
        self,
        num_features: int,
        num_domains: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: Affine = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        affine_per_domain: bool = False,
        bias: bool = True,
        activation: ActivationLike | None = None,
        negative_slope: float = LEAKY_SLOPE,
        nonfinite: NonFinite = "propagate",
        inplace: bool = False,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            bias=bias,
            activation=activation,
            negative_slope=negative_slope,
            nonfinite=nonfinite,
            inplace=inplace,
        )
        if num_domains < 1:
            raise ArgumentError(f"num_domains must be at least 1; got {num_domains}.")
        if affine_per_domain and not affine:
            raise ArgumentError("affine_per_domain=True needs a gamma or a beta to have per domain; got affine=False.")
        checks.tracked(self.track_running_stats, type(self).__name__)
        self.num_domains, self.affine_per_domain = num_domains, affine_per_domain
        self.domain: int | None = None
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, self._for_all(self.get_buffer(name)))
        for name, one in list(self.named_parameters(recurse=False)) if affine_per_domain else []:
            self.register_parameter(name, nn.Parameter(self._for_all(one.detach())))

    def _for_all(self, one: Tensor) -> Tensor:
        return one.expand(self.num_domains, *one.shape).clone()

    def forward(
        self,
        input: Tensor,
        *,
        domain: int | None = None,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Normalize as BatchNorm, with the statistics of one domain."""
        return self._run(input, residual, mask, weight, bias, domain=domain)

    def _compute(  # type: ignore[override]
        self, input: Tensor, *, residual: Tensor | None, mask: Tensor | None, domain: int | None, **given: Tensor | None
    ) -> Tensor:
        before, own = self.domain, self.__dict__  # a module's own way to set an attribute takes longer
        own["domain"] = before if domain is None else domain
        try:
            if not self.training and residual is None and mask is None and not given and is_plain(input):
                weight, bias, (mean, var, _) = self._tensors()
                tensors = weight, bias, mean, var
                y = layer_calls.batch_norm_evaluated(input, *tensors, self._ranks, self.eps, self._fused)
                if y is not None:
                    return y
            return super()._compute(input, residual=residual, mask=mask, **given)
        finally:
            own["domain"] = before

    def _tensors(self) -> tuple[Tensor | None, Tensor | None, Moments]:
        stored = self._of_domain()
        if not self.affine_per_domain:
            return self.weight, self.bias, stored
        k = self.domain
        weight, bias = (None if t is None else t[k] for t in (self.weight, self.bias))
        return weight, bias, stored

    def _of_domain(self) -> Moments:
        k = self.domain
        if k is None:
            raise ArgumentError(
                f"{self._who()} needs to know the domain; got none. Call layer(x, domain=k), or wrap the model's call: "
                "with nk.domain(model, k)."
            )
        if not 0 <= k < self.num_domains:
            raise ArgumentError(f"{self._who()} has domains 0 to {self.num_domains - 1}; got {k}.")
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        assert mean is not None and var is not None and count is not None  # noqa: PT018
        seen = count[k]
        if not self.training:
            checks.require(
                seen > 0,
                lambda: ArgumentError(
                    f"{self._who()} has never seen domain {k} in training; its statistics are initial values. "
                    f"Train on it, or copy another's: running_mean[{k}] = running_mean[j], and so on."
                ),
            )
        return Moments(mean[k], var[k], seen)

    def _is_torchs(self, **extras: Any) -> bool:
        return False  # torch's operator has one set of statistics

    def extra_repr(self) -> str:
        """BatchNorm's line, and the domains."""
        apart = ", affine_per_domain=True" if self.affine_per_domain else ""
        return super().extra_repr() + f", num_domains={self.num_domains}{apart}"


class DomainBatchNorm1d(DomainBatchNorm, nn.BatchNorm1d, one_step=True):
    """Batch normalization per domain, of (N, C) or (N, C, L)."""

    _ranks = (2, 3)


class DomainBatchNorm2d(DomainBatchNorm, nn.BatchNorm2d, one_step=True):
    """Batch normalization per domain, of (N, C, H, W)."""

    _ranks = (4,)


class DomainBatchNorm3d(DomainBatchNorm, nn.BatchNorm3d, one_step=True):
    """Batch normalization per domain, of (N, C, D, H, W)."""

    _ranks = (5,)


@contextmanager
def domain(model: nn.Module, k: int) -> Iterator[None]:
    """Let every DomainBatchNorm in `model` use domain `k` inside the block; afterwards each is as it was."""
    layers = [m for m in model.modules() if isinstance(m, DomainBatchNorm)]
    if not layers:
        raise ArgumentError(f"nk.domain needs a model with a DomainBatchNorm; {type(model).__name__} has none.")
    before = [layer.domain for layer in layers]
    for layer in layers:
        layer.domain = k
    try:
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.domain = old
