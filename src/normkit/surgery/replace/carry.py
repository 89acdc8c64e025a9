"""The layer that takes a norm's place, with as much of the norm's state as it can hold."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from normkit.activations import activation_of, as_module
from normkit.errors import ArgumentError
from normkit.layers.frozen import FrozenBatchNorm
from normkit.spec import describe
from normkit.surgery.norms import AFFINE, STATISTICS, stored_moments
from normkit.surgery.operation import Skip
from normkit.surgery.replace.builders import build, frozen_twin, place_and_type
from normkit.surgery.replace.foreign import must_be_understood
from normkit.surgery.replace.history import parameter_of, remember
from normkit.surgery.replace.sites import Site
from normkit.surgery.replace.targets import TARGETS, Choice, Wanted


class Replacement(NamedTuple):
    """The new layer, whether it computes the same in evaluation, remarks about it, and a module to run after it."""

    site: Site
    layer: nn.Module
    keeps: bool
    notes: list[str]
    after: nn.Module | None = None

    @property
    def what(self) -> str:
        """Old and new class."""
        old, new = label(self.site.layer), label(self.layer)
        if old == new:
            old, new = (f"{type(layer).__module__.split('.')[0]} {old}" for layer in (self.site.layer, self.layer))
        return f"{old} -> {new}"

    @property
    def whole(self) -> nn.Module:
        """The new layer, with what runs after it."""
        if self.after is None:
            return self.layer
        return nn.Sequential(self.layer, self.after).train(self.site.layer.training)

    @property
    def needs_statistics(self) -> bool:
        """Whether it normalizes with stored statistics, and the old layer stored none."""
        is_new = stored_moments(self.layer) is not None and stored_moments(self.site.layer) is None
        return is_new and getattr(self.layer, "num_batches_tracked", None) is not None


def label(layer: nn.Module) -> str:
    """A layer's class, with its groups where it has any."""
    name = type(layer).__name__
    return f"{name}({layer.num_groups}, {layer.num_channels})" if isinstance(layer, nn.GroupNorm) else name


def replacement(site: Site, asked: Wanted) -> Replacement:
    """Make the requested layer for this place, or skip."""
    if _is_one(site, asked):
        raise Skip("is one already")
    must_be_movable(site)
    must_be_understood(site, frozen_twin)
    new, note = build(site, asked)
    if asked.to == "frozen":
        _carry_frozen_(new, site.layer, asked.trainable)
    else:
        carry_(new, site.layer)
    if asked.to in ("sync", "frozen"):
        remember(new, site.layer, with_tensors=asked.to == "frozen")
    notes = [*([note] if note else []), *_remarks(site, asked)]
    after = module_after(site) if asked.classes == "torch" else None
    return Replacement(site, new, _keeps_function(site, new), notes, after)


def module_after(site: Site) -> nn.Module | None:
    """The activation inside a norm as a module, for a class that has no place for one; None if there is none."""
    activation = activation_of(site.layer)
    return None if activation is None else as_module(activation)


def chosen(site: Site, choice: Choice) -> Replacement:
    """Take the layer that a function of the spec returns, and give it what it can hold of the old layer's state."""
    must_be_movable(site)
    new = choice(site.spec)
    if new is None:
        raise Skip("the function returned None")
    if not isinstance(new, nn.Module):
        raise ArgumentError(f"to(spec) must return a torch.nn.Module or None; got a {type(new).__name__}.")
    new.to(**place_and_type(site.layer)).train(site.layer.training)
    spec = describe(new)
    if spec is not None:
        must_be_understood(site, frozen_twin)
        if spec.activation != site.spec.activation:
            raise Skip(f"its activation {site.spec.activation} would become {spec.activation}")
        carry_(new, site.layer)
    return Replacement(site, new, spec is not None and _keeps_function(site, new), ["as the function chose"])


def must_be_movable(site: Site) -> None:
    """Skip a layer whose place no other norm can take, whatever is asked for."""
    layer, spec = site.layer, site.spec
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        raise Skip("it has no size yet; run the model once")
    if spec.over == ("N",):
        raise Skip("it has statistics of its own for every position")
    if not spec.is_replaceable:
        raise Skip(f'no other norm can stand in for a "{spec.kind}" one')
    if spec.activation == "threshold":
        raise Skip("no other norm has a place for its learned threshold")


def carry_(new: nn.Module, old: nn.Module) -> None:
    """Give a layer the old one's gamma, beta and statistics, the very tensors, where it has places of their shape."""
    for name in AFFINE:
        place, value = new._parameters.get(name), getattr(old, name, None)
        if place is not None and value is not None and place.shape == value.shape:
            new._parameters[name] = parameter_of(old, name)
    _carry_statistics_(new, old)
    if stored_moments(old) is not None and stored_moments(new) is not None:
        # It may have been switched off after the layer was made.
        vars(new)["track_running_stats"] = getattr(old, "track_running_stats", True)
    _keep_attributes_(new, old)


def _carry_statistics_(new: nn.Module, old: nn.Module, cloned: bool = False) -> None:
    """Give `new` the running statistics of `old` in the places it has for them: the tensors themselves, or clones."""
    for name in STATISTICS:
        stored, place = getattr(old, name, None), new._buffers.get(name)
        if isinstance(stored, Tensor) and place is not None and place.shape == stored.shape:
            new._buffers[name] = stored.detach().clone() if cloned else stored


def _carry_frozen_(new: nn.Module, old: nn.Module, trainable: bool) -> None:
    """As `carry_`, but with clones, which an optimizer that holds the old parameters cannot reach."""
    for name in AFFINE:
        value = getattr(old, name, None)
        if value is not None and trainable:
            del new._buffers[name]
            new.register_parameter(name, parameter_of(old, name))
        elif value is not None:
            new._buffers[name] = value.detach().clone()
    _carry_statistics_(new, old, cloned=True)
    _keep_attributes_(new, old)


def _keep_attributes_(new: nn.Module, old: nn.Module) -> None:
    """Keep attributes that other code has set on the layer: those that none of its constructors takes."""
    kinds = [kind for kind in type(old).__mro__ if issubclass(kind, nn.Module)]
    own = {name for kind in kinds for name in inspect.signature(kind).parameters}
    for name, value in vars(old).items():
        if not (name in own or name.startswith("_") or name == "forward" or hasattr(new, name)):
            vars(new)[name] = value


def _is_one(site: Site, asked: Wanted) -> bool:
    """Whether the layer already is of the requested class and has the requested options."""
    layer, kinds = site.layer, [*asked.target.classes(asked.classes).values()]
    if asked.to == "layer" and site.spec.num_groups == 1:  # a layer norm of maps becomes a GroupNorm of one group
        kinds += TARGETS["group"].classes(asked.classes).values()
    if type(layer) not in kinds or "forward" in vars(layer):
        return False
    if isinstance(layer, FrozenBatchNorm) and site.spec.affine is not False:
        learns = next(layer.parameters(recurse=False), None) is not None
        if learns != asked.trainable:
            return False
    if "groups" in asked.options:
        return build(site, asked)[0].num_groups == site.spec.num_groups
    return all(vars(layer).get(name) == value for name, value in asked.options.items())


def _keeps_function(site: Site, new: nn.Module) -> bool:
    """Whether evaluation stays what it was, up to rounding."""
    spec = describe(new)
    assert spec is not None
    stored, stores = stored_moments(site.layer) is not None, stored_moments(new) is not None
    if (spec.eps != site.spec.eps and site.spec.eps is not None) or stored != stores:
        return False
    if stored:
        return True
    if site.spec.evaluates_as_batch_norm:  # both normalize every batch with its own statistics
        return spec.kind == "batch" and spec.scope != "ghost"
    sets = spec.statistics_per_example
    return spec.kind == site.spec.kind == "rms" or (sets is not None and sets == site.spec.statistics_per_example)


def _remarks(site: Site, asked: Wanted) -> list[str]:
    """What the new layer keeps and drops, and warnings."""
    layer, remarks = site.layer, []
    if site.spec.activation is not None and asked.to != "filter-response":
        where = ", as a module after it" if asked.classes == "torch" else ""
        remarks.append(f"{site.spec.activation} kept{where}")
    nonfinite = getattr(layer, "nonfinite", "propagate")
    if nonfinite != "propagate" and asked.to != "frozen" and "nonfinite" not in asked.target.taken(asked.classes):
        remarks.append(f'nonfinite="{nonfinite}" dropped: it has no such option')
    if isinstance(getattr(layer, "eps", None), Tensor):
        remarks.append("its learned eps dropped")
    count = getattr(layer, "num_batches_tracked", None)
    if asked.to == "frozen" and count is not None and not count.is_meta and int(count) == 0:
        remarks.append("warning: no batch has ever updated its statistics")
    return remarks
