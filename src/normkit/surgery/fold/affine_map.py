"""A norm as the affine map that it is in evaluation, and what remains of it when another layer takes that over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normkit.activations import ActivationLike, activation_of, label, parted
from normkit.affine import scale_shift
from normkit.batches import in_evaluation
from normkit.layers.norm_layer import NormLayer
from normkit.moments import Moments
from normkit.spec import NormSpec
from normkit.surgery.norms import Norm, stored_moments
from normkit.surgery.operation import Skip
from normkit.surgery.parity import ROUNDING, difference


class FoldedNorm(nn.Identity):
    """What remains of a norm whose scale and shift another layer took over: activation(x + residual).

    Args:
        activation: as our layers take it.
        layers: the children of the norm that follow its affine map, by name.
        dense: whether to return a contiguous tensor, as the norm did.
    """

    def __init__(
        self,
        activation: ActivationLike | None = None,
        layers: Mapping[str, nn.Module] | None = None,
        *,
        dense: bool = False,
    ) -> None:
        super().__init__()
        self.dense = dense
        if "activation" not in (layers or {}):
            self.activation = activation
        for name, layer in (layers or {}).items():
            self.add_module(name, layer)

    def forward(self, input: Tensor, *, residual: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the input, with what followed the norm; a mask has no effect in evaluation."""
        y = input.contiguous() if self.dense else input
        y = y if residual is None else y + residual
        y = parted(self.activation).apply(y)
        for name, layer in self.named_children():
            y = y if name == "activation" else layer(y)
        return y

    def extra_repr(self) -> str:
        """The activation, if there is one."""
        is_child = self.activation is None or isinstance(self.activation, nn.Module)
        return "" if is_child else f"activation={label(self.activation)}"


class AffineMap(NamedTuple):
    """y = x * scale + shift for each channel, in float64, and what follows inside the same module."""

    scale: Tensor
    shift: Tensor
    activation: ActivationLike | None
    layers: dict[str, nn.Module]

    @property
    def is_bare(self) -> bool:
        """Whether nothing follows."""
        return self.activation is None and not self.layers

    def remains(self, layer: nn.Module, dense: bool) -> nn.Module:
        """The module that the norm becomes."""
        if self.is_bare and not dense and not isinstance(layer, NormLayer):
            return nn.Identity()
        return FoldedNorm(self.activation, self.layers, dense=dense)


def affine_map(norm: Norm, example: Tensor) -> AffineMap:
    """The affine map of a norm layer in evaluation; skip if a trial on random values shows that it does more."""
    layer, spec = norm.layer, norm.spec
    moments, eps = _moments(layer, spec), spec.eps
    if moments is None or eps is None:
        raise Skip("it does not have one mean and variance for each channel, or does not say its eps")
    wide = Moments(moments.mean.double(), moments.var.double(), 0)
    weight, bias = (_wide(getattr(layer, name, None)) for name in ("weight", "bias"))
    scale, shift = scale_shift(wide, weight, bias, eps)
    if not (scale.isfinite().all() and shift.isfinite().all()):
        raise Skip("its statistics or its affine parameters are not finite")
    for activation, layers in _followers(layer, spec):
        found = AffineMap(scale, shift, activation, layers)
        if _computes(norm, found, wide, eps, example):
            return found
    raise Skip(f"{type(layer).__name__} does more than its stored affine map")


def channel_dim(norm: Norm, input: Tensor) -> int:
    """The channel dimension of a norm's input."""
    alone = norm.spec.kind == "instance" and input.dim() == norm.layer._get_no_batch_dim()  # type: ignore[operator]
    return 0 if alone else norm.spec.channels_in(input.dim())


def must_be_affine(norm: Norm) -> None:
    """Skip a norm that in evaluation is not an affine map with stored statistics."""
    if not norm.spec.can_fold or norm.spec.uses == "batch":
        raise Skip(f"in evaluation {type(norm.layer).__name__} is not one scale and shift for each channel")


def _moments(layer: nn.Module, spec: NormSpec) -> Moments | None:
    if not spec.subtracts_mean:
        var = layer.running_var
        return Moments(torch.zeros_like(var), var, 0) if isinstance(var, Tensor) else None
    return stored_moments(layer)


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().double()


def _followers(layer: nn.Module, spec: NormSpec) -> list[tuple[ActivationLike | None, dict[str, nn.Module]]]:
    """What may follow inside the module, the likeliest first: its `activation`, its children, nothing."""
    is_own = isinstance(layer, NormLayer) or isinstance(vars(layer).get("activation"), str)
    own = activation_of(layer) if is_own else None
    # A list of modules, such as the auxiliary norms of a split one, computes nothing.
    children = {name: child for name, child in layer._modules.items() if not isinstance(child, nn.ModuleList | None)}
    children.pop("parametrizations", None)
    found: list[tuple[ActivationLike | None, dict[str, nn.Module]]] = [] if own is None else [(own, {})]
    return [*found, *([(None, children)] if children else []), (None, {})]


def _computes(norm: Norm, found: AffineMap, moments: Moments, eps: float, example: Tensor) -> bool:
    """Whether the layer computes what the map does, on values well to both sides of their mean."""
    x, shape = _probe(norm, moments, eps, example)
    scaled = x.double() * found.scale.reshape(shape)
    linear = (scaled + found.shift.reshape(shape)).to(x.dtype)
    with in_evaluation(norm.layer):
        expected = FoldedNorm(found.activation, found.layers)(linear)
        try:
            actual = norm.layer.forward(x)
        except Exception:  # a foreign layer with another signature
            return False
    if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype != x.dtype:
        return False
    gap, _ = difference(expected, actual)
    size = max(scaled.abs().max().item(), expected.abs().max().item())
    return bool(gap <= ROUNDING * torch.finfo(x.dtype).eps * size)


def _probe(norm: Norm, moments: Moments, eps: float, example: Tensor) -> tuple[Tensor, list[int]]:
    """Random values with the norm's own mean and variance in each channel, and the shape of one value per channel."""
    dim = channel_dim(norm, example)
    shape = [1 if d != dim else -1 for d in range(example.dim())]
    sizes = [n if d == dim else 32 if d < dim else min(n, 2) for d, n in enumerate(example.shape)]
    noise = torch.randn(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(example.device)
    std = (moments.var + eps).sqrt().reshape(shape)
    return (2 * noise * std + moments.mean.reshape(shape)).to(example.dtype), shape
