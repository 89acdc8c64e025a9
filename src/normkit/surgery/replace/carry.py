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
from normkit.surgery.operation import NothingToDo, Skip
from normkit.surgery.replace.builders import build, frozen_twin, place_and_type
from normkit.surgery.replace.domains import of_one_domain
from normkit.surgery.replace.foreign import must_be_understood
from normkit.surgery.replace.history import parameter_of, remember
from normkit.surgery.replace.sites import Site
from normkit.surgery.replace.stored_forms import (
    affine_in_form_of,
    copy_to_parts_,
    in_form_of,
    keeps_statistics,
    write_statistics_,
)
from normkit.surgery.replace.targets import TARGETS, Choice, Wanted


class Replacement(NamedTuple):
    """The new layer, whether it computes the same in evaluation, and remarks about it.

    `source` is the layer that the new one continues: the old one, or the part of it that was chosen; `after` is a
    module to run after it.
    """

    site: Site
    layer: nn.Module
    keeps: bool
    notes: list[str]
    source: nn.Module
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
        """Whether it normalizes with stored statistics, and the old layer stored none that it could take."""
        return keeps_statistics(self.layer) and stored_moments(self.source) is None


def label(layer: nn.Module) -> str:
    """A layer's class, with its groups where it has any."""
    name = type(layer).__name__
    return f"{name}({layer.num_groups}, {layer.num_channels})" if isinstance(layer, nn.GroupNorm) else name


# Kinds with state that no other has a place for, and what becomes of it.
_DROPPED = {
    "split": "its auxiliary norms dropped",
    "moving": "its mean squares dropped",
    "whitened": "its whitening dropped",
    "switchable": "its learned mix dropped",
    "dyt": "its alpha dropped",
    "derf": "its alpha and its shift dropped",
}
# Why nothing can take the place of some kinds.
_IN_THE_WAY = {
    "evo-b0": "it is its own activation, which no other norm is",
    "evo-s0": "it is its own activation, which no other norm is",
}


CHOSEN = "as the function chose"


def replacement(site: Site, asked: Wanted) -> Replacement:
    """Make the requested layer for this place, or skip."""
    if _is_one(site, asked):
        raise NothingToDo("is one already")
    must_be_movable(site)
    source = of_one_domain(site)
    if site.spec.kind not in _DROPPED or not site.spec.exact or "forward" in vars(site.layer):
        must_be_understood(source, frozen_twin)
    new, note = build(source, asked)
    if asked.to == "frozen":
        _carry_frozen_(new, source.layer, asked.trainable)
    else:
        carry_(new, source.layer)
    if asked.to in ("sync", "frozen"):
        remember(new, source.layer, with_tensors=asked.to == "frozen")
    notes = [*([note] if note else []), *_remarks(site, asked)]
    after = module_after(source) if asked.classes == "torch" else None
    return Replacement(site, new, _keeps_function(source, new), notes, source.layer, after)


def module_after(site: Site) -> nn.Module | None:
    """The activation inside a norm as a module, for a class that has no place for one; None if there is none."""
    activation = activation_of(site.layer)
    return None if activation is None else as_module(activation)


def chosen(site: Site, choice: Choice) -> Replacement:
    """Take the layer that a function of the spec returns, and give it what it can hold of the old layer's state."""
    must_be_movable(site)
    new = choice(site.spec)
    if new is None:
        raise NothingToDo("the function returned None")
    if not isinstance(new, nn.Module):
        raise ArgumentError(f"to(spec) must return a torch.nn.Module or None; got a {type(new).__name__}.")
    new.to(**place_and_type(site.layer)).train(site.layer.training)
    spec = describe(new)
    if spec is not None:
        source = of_one_domain(site)
        must_be_understood(source, frozen_twin)
        if spec.activation not in (site.spec.activation, "evo"):  # an EvoNorm takes the place of both
            raise Skip(f"its activation {site.spec.activation} would become {spec.activation}")
        carry_(new, source.layer)
        return Replacement(site, new, _keeps_function(source, new), [CHOSEN], source.layer)
    return Replacement(site, new, False, [CHOSEN], site.layer)


def must_be_movable(site: Site) -> None:
    """Skip a layer whose place no other norm can take, whatever is asked for."""
    layer, spec = site.layer, site.spec
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        raise Skip("it has no size yet; run the model once")
    if any(base.__name__ == "FSDPModule" for base in type(layer).__mro__):  # not imported: few models have it
        raise Skip("it is sharded by itself (fully_shard): convert the model first, and shard it then")
    if spec.channel_dim != 1:
        raise Skip(f"its channels are in dimension {spec.channel_dim}, where no other norm has them")
    if spec.over == ("N",):
        raise Skip("it has statistics of its own for every position")
    if not spec.is_replaceable:
        raise Skip(_IN_THE_WAY.get(spec.kind, f'no other norm can stand in for a "{spec.kind}" one'))
    if spec.activation == "threshold":
        raise Skip("no other norm has a place for its learned threshold")


def carry_(new: nn.Module, old: nn.Module) -> None:
    """Give a layer the old one's gamma, beta and statistics: the very tensors, or what they are in its own form."""
    _carry_affine_(new, old)
    _carry_statistics_(new, old)
    if stored_moments(old) is not None and keeps_statistics(new):
        # It may have been switched off after the layer was made.
        vars(new)["track_running_stats"] = getattr(old, "track_running_stats", True)
    copy_to_parts_(new)
    _keep_attributes_(new, old)


def _carry_affine_(new: nn.Module, old: nn.Module) -> None:
    """Give `new` the gamma and beta of `old`: the tensors themselves, unless they are something else in its form."""
    before, after = describe(old), describe(new)
    if before is None or after is None:
        return
    added = before.weight_offset - after.weight_offset
    for theirs, ours, more in zip(before.names, after.names, (added, 0.0), strict=True):
        place, value = new._parameters.get(ours), getattr(old, theirs, None)
        if place is None or value is None:
            continue
        reshaped = affine_in_form_of(new, old, value + more if more else value, place)
        if reshaped is not None:
            new._parameters[ours] = nn.Parameter(reshaped.detach(), requires_grad=_learns(old, theirs))
        elif place.shape == value.shape:
            new._parameters[ours] = _plus(value, more) if more else parameter_of(old, theirs)


def _plus(value: Tensor, more: float) -> nn.Parameter:
    return nn.Parameter(value.detach() + more, requires_grad=value.requires_grad)


def _learns(old: nn.Module, name: str) -> bool:
    parameter = parameter_of(old, name)
    return parameter is not None and parameter.requires_grad


def _carry_statistics_(new: nn.Module, old: nn.Module, cloned: bool = False) -> None:
    """Give `new` the running statistics of `old` in the places it has for them: the tensors themselves, or clones."""
    moments = stored_moments(old)
    if moments is None:
        return
    count = getattr(old, "num_batches_tracked", None)
    if in_form_of(new, moments.mean, moments.var, 0) is not None:
        # A frozen norm of another library does not count, and its statistics are not initial values.
        write_statistics_(new, moments.mean, moments.var, 1 if count is None else count)
        return
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
    if asked.classes == "normkit":
        kinds += asked.target.of_channels.values()
    if asked.to == "layer" and site.spec.num_groups == 1:  # a layer norm of maps becomes a GroupNorm of one group
        kinds += TARGETS["group"].classes(asked.classes).values()
    if type(layer) not in kinds or "forward" in vars(layer):
        return False
    if isinstance(layer, FrozenBatchNorm) and site.spec.affine is not False:
        learns = next(layer.parameters(recurse=False), None) is not None
        if learns != asked.trainable:
            return False
    options = dict(asked.options)
    if asked.target.at_most is not None and options.pop(asked.target.at_most[0], None) is not None:
        fitted = describe(build(site, asked)[0])
        if fitted is None or fitted.num_groups != site.spec.num_groups:
            return False
    return all(vars(layer).get(name) == value for name, value in options.items())


# Kinds that are one scale and shift for each channel in evaluation, with the statistics that a BatchNorm stores.
AS_BATCH_NORM = {"batch", "renorm", "accumulated", "split", "domain", "whitened", "instance"}


def _keeps_function(site: Site, new: nn.Module) -> bool:
    """Whether evaluation stays what it was, up to rounding."""
    spec = describe(new)
    assert spec is not None
    stored, stores = stored_moments(site.layer) is not None, keeps_statistics(new)
    if (spec.eps != site.spec.eps and site.spec.eps is not None) or stored != stores:
        return False
    if stored:
        return {site.spec.kind, spec.kind} <= AS_BATCH_NORM
    if site.spec.evaluates_as_batch_norm:  # both normalize every batch with its own statistics
        return spec.kind in ("batch", "split") and spec.scope != "ghost" and spec.over == site.spec.over
    if spec.channels_first != site.spec.channels_first:
        return False
    if spec.kind == "rms":
        return site.spec.kind in ("rms", "scale")
    if spec.kind == "layer" and spec.channels_first:
        return site.spec.kind == "layer"
    sets = spec.statistics_per_example
    return sets is not None and sets == site.spec.statistics_per_example


def _remarks(site: Site, asked: Wanted) -> list[str]:
    """What the new layer keeps and drops, and warnings."""
    layer, remarks = site.layer, []
    if site.spec.activation is not None and asked.to not in ("filter-response", "evo-b0", "evo-s0"):
        where = ", as a module after it" if asked.classes == "torch" else ""
        remarks.append(f"{site.spec.activation} kept{where}")
    nonfinite = getattr(layer, "nonfinite", "propagate")
    if nonfinite != "propagate" and asked.to != "frozen" and "nonfinite" not in asked.target.taken(asked.classes):
        remarks.append(f'nonfinite="{nonfinite}" dropped: it has no such option')
    if site.spec.weight_offset:
        remarks.append(f"its weight plus {site.spec.weight_offset:g} is the new one")
    if isinstance(getattr(layer, "eps", None), Tensor):
        remarks.append("its learned eps dropped")
    if site.spec.kind in _DROPPED:
        remarks.append(_DROPPED[site.spec.kind])
    if site.is_frozen and asked.to != "frozen":
        remarks.append("was frozen, and trains from now on")
    count = getattr(layer, "num_batches_tracked", None)
    if asked.to in ("frozen", "domain") and _is_zero(count):
        remarks.append("warning: no batch has ever updated its statistics")
    return remarks


def _is_zero(count: Tensor | None) -> bool:
    return count is not None and not count.is_meta and not count.any()
