"""Whether a norm of another library does what the norm it derives from does, and nothing more."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from normkit.activations import activation_of, parted
from normkit.layers.norm_layer import NormLayer
from normkit.snapshot import untouched
from normkit.spec import computed, describe, is_tried
from normkit.surgery.norms import AFFINE, STATISTICS, parts_of
from normkit.surgery.operation import Skip
from normkit.surgery.replace.sites import Site

TOLERANCE = 1e-5  # relative to the largest value: some layers compute in float32 whatever their input
SMALL = 0.03  # a scale of inputs at which a variance is small enough for eps to show


def must_be_understood(site: Site, foreign_twin: Callable[[Site], nn.Module | None]) -> None:
    """Skip a layer that has more state than a norm and its activation, or computes something else than these.

    `foreign_twin` makes our layer of the same function, for a norm that derives from none we know.
    """
    _must_have_a_norms_state(site)
    if site.spec.exact and "forward" not in vars(site.layer):
        return
    if is_tried(site.layer):  # a trial has shown what it computes
        _must_get_its_input_alone(site)
        return
    twin = foreign_twin(site)
    with untouched(site.layer):
        try:
            same = all(_behaves(site, twin, randomized) for randomized in (False, True))
        except Skip:
            raise
        except Exception as error:
            raise Skip(f"{site.class_name} cannot be tried on its own: {type(error).__name__}: {error}") from error
    if not same:
        raise Skip(f"{site.class_name} adds behaviour that is not understood: {_meant(site)} gives other values")


def _must_get_its_input_alone(site: Site) -> None:
    """Skip a layer that other code may call with more than its input: of what it then does a trial shows nothing."""
    others = list(inspect.signature(site.layer.forward).parameters)[1:]
    if others and not site.shapes:
        raise Skip(f"{site.class_name} may be called with {' and '.join(others)} too; pass example=")
    if site.gets_more:
        raise Skip(f"{site.class_name} is called with more than its input")


def _must_have_a_norms_state(site: Site) -> None:
    known = {*site.spec.names, *STATISTICS} | ({"tau", "eps"} if site.spec.kind == "filter-response" else set())
    more = sorted(set(site.layer.state_dict()) - known - _state_of_activation(site.layer) - _state_of_parts(site.layer))
    if more:
        raise Skip(f"{site.class_name} has state that no other norm has a place for: {', '.join(more)}")
    outside = [name for name in AFFINE if isinstance(vars(site.layer).get(name), Tensor)]
    if outside:
        raise Skip(f"the {outside[0]} of this {site.class_name} is not a parameter: other code computes it")


def _state_of_activation(layer: nn.Module) -> set[str]:
    """The keys of what an activation has learned, which goes with the activation."""
    activation = activation_of(layer)
    found = {name for name, child in layer._modules.items() if child is not None and child is activation}
    return {f"{name}.{key}" for name in found for key in layer._modules[name].state_dict()}  # type: ignore[union-attr]


def _state_of_parts(layer: nn.Module) -> set[str]:
    """The keys of auxiliary norms, which have no part in evaluation."""
    return {f"aux_bn.{k}.{key}" for k, part in enumerate(parts_of(layer)) for key in part.state_dict()}


def _meant(site: Site) -> str:
    base = known_base(site.layer)
    name = "a frozen BatchNorm" if base is nn.Module else base.__name__
    return name + (f" and {site.spec.activation}" if site.spec.activation else "")


def known_base(layer: nn.Module) -> type[nn.Module]:
    """The class of torch or normkit that it is, or derives from."""
    return next(kind for kind in type(layer).__mro__ if kind.__module__.startswith(("torch.nn.", "normkit.")))


def _behaves(site: Site, foreign_twin: nn.Module | None, randomized: bool) -> bool:
    """Whether the layer and its plain twin agree in evaluation and in training, and in their statistics afterwards."""
    subject = copy.deepcopy(site.layer).double()
    if randomized:  # defaults hide what a layer does to gamma, beta and statistics
        _randomize_(subject)
    twin = plain(subject, foreign_twin)
    activation = parted(activation_of(subject))
    for training in (False, True):
        x = _input(site) * (SMALL if randomized else 3.0)
        subject.train(training)
        twin.train(training)
        torch.manual_seed(0)  # for an activation that draws
        mine = subject.forward(x.clone())  # not called: the hooks of the layer are not part of its function
        torch.manual_seed(0)
        theirs = activation.apply(twin.forward(x.clone()))
        if not _agree(mine, theirs):
            return False
    left, right = subject.state_dict(), twin.state_dict()
    return all(_agree(left[name], right[name]) for name in left.keys() & right.keys())


class _AsDescribed(nn.Module):
    """What `describe` says of a layer or RMS norm, without what follows it; gamma is its weight, with what is added."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        spec = describe(layer)
        assert spec is not None
        self._spec = replace(spec, names=AFFINE, weight_offset=0.0)
        for name, own, more in zip(AFFINE, spec.names, (spec.weight_offset, 0.0), strict=True):
            value = getattr(layer, own, None)
            self.register_parameter(name, None if value is None else nn.Parameter(value.detach() + more))

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of the input, in its type."""
        return computed(self._spec, self, x).to(x.dtype)


def plain(layer: nn.Module, foreign_twin: nn.Module | None = None) -> nn.Module:
    """A copy that only normalizes: of the base class in torch or normkit, without children or activation."""
    if is_tried(layer):
        return _AsDescribed(layer)
    if foreign_twin is not None:
        bare = copy.deepcopy(foreign_twin).to(next(layer.buffers()).dtype)
    else:
        bare = copy.deepcopy(layer)
        bare.__class__ = known_base(layer)
        bare._modules.clear()
        vars(bare).pop("forward", None)
    if isinstance(bare, NormLayer):
        bare.activation = None
    if foreign_twin is not None:
        theirs = layer.state_dict()
        bare.load_state_dict({name: theirs[name] for name in bare.state_dict() if name in theirs})
    return bare


@torch.no_grad()
def _randomize_(layer: nn.Module) -> None:
    for name, tensor in layer.state_dict().items():
        if not tensor.is_floating_point():
            tensor.random_(1, 7)
        elif name.endswith("var"):
            tensor.uniform_(0.5, 2.0).mul_(SMALL**2)
        else:
            tensor.normal_(0.3, 2.0).mul_(SMALL if name.endswith("mean") else 1.0)


def _input(site: Site) -> Tensor:
    tensors = site.layer.state_dict().values()
    device = next((tensor.device for tensor in tensors), None)
    if site.spec.is_over_last:
        shape = (3, 4, *site.normalized_shape)
    elif site.spec.kind == "group":
        shape = (4, site.channels, *(site.shapes[0][2:] if site.shapes else (5, 6)))
    else:
        shape = (4, site.channels, *(6, 5, 4)[: site.dimensions()])
    return torch.randn(shape, dtype=torch.float64, device=device) + 0.2


def _agree(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return False
    a, b = a.detach().double(), b.detach().double()
    return bool(((a - b).abs() <= TOLERANCE * b.abs().max()).all())
