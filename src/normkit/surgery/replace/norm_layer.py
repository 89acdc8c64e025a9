"""Norms by name, as the factories that other libraries take for their `norm_layer=`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from normkit.errors import ArgumentError
from normkit.surgery.replace.builders import FEW, fitting_groups, largest_divisor
from normkit.surgery.replace.targets import (
    ANY,
    TARGETS,
    Target,
    TargetName,
    check_names,
    check_values,
    target_named,
)


class NormLayerFactory(functools.partial[nn.Module]):
    """Makes norm layers: called with a number of channels, and with options if there are any.

    A partial, because timm takes these apart and binds them anew, by keyword alone.
    """

    def __repr__(self) -> str:
        options = {name: value for name, value in self.keywords.items() if name != "kind"}
        if options.get("dims") == 2:
            del options["dims"]
        shown = [repr(self.keywords["kind"]), *(f"{name}={value!r}" for name, value in options.items())]
        return f"nk.norm_layer({', '.join(shown)})"


class NormOfKind:
    """Called, it is a norm layer of that kind.

    A class and not a function: where timm wants norm and activation in one layer, it takes any function for one that
    makes such layers, and the activation would be missing. A class that it does not know is an error there.
    """

    def __new__(cls, num_channels: Any, *, kind: str, dims: int, **options: Any) -> nn.Module:  # type: ignore[misc]
        """Make the layer."""
        made = _class_of(kind, dims)
        return made(**_arguments(made, kind, dims, num_channels, options))


def norm_layer(kind: TargetName, *, dims: int = 2, **options: Any) -> NormLayerFactory:
    """A factory of norm layers, for the `norm_layer=` of torchvision, timm and other libraries.

    Called with a number of channels it makes a layer of ours; groups are fitted to the channels, as `convert` does it.
    The call may have options of its own, which take precedence: device, dtype, eps, momentum, affine. A momentum and
    an eps are ignored by kinds that have none: the code that passes them does not know the kind. Factories can be
    copied and pickled.

    Args:
        kind: a name that `convert` takes.
        dims: of the positions: 2 for maps (N, C, H, W), 3 for volumes, 1 for (N, C) and (N, C, L) and, with "layer",
            "rms", "scale", "dyt" and "derf", for inputs with the channels last.
        options: for the layers: eps, momentum, affine, activation, groups and so on; for "position" height and width.
    """
    target_named(kind, "kind")
    made, target, who = _class_of(kind, dims), _row(kind, dims), f'norm_layer("{kind}")'
    check_names(options, _taken(made, target, kind), who)
    missing = [name for name in ("height", "width") if kind == "position" and name not in options]
    if missing:
        raise ArgumentError(f"{who} needs {' and '.join(f'{name}=' for name in missing)}, the size of its maps.")
    check_values(made, target, _renamed(made, options), who)
    return NormLayerFactory(NormOfKind, kind=kind, dims=dims, **options)


def _row(kind: str, dims: int) -> Target:
    """The row of the table; a layer norm of maps is a group norm of one group."""
    return TARGETS["group" if kind == "layer" and dims > 1 else kind]


def _class_of(kind: str, dims: int) -> type[nn.Module]:
    if type(dims) is not int or not 1 <= dims <= 3:
        raise ArgumentError(f"dims must be 1, 2 or 3, the number of dimensions of the positions; got {dims!r}.")
    if kind in ("rms", "scale") and dims > 1:
        raise ArgumentError(
            f'"{kind}" norms take the last dimension for the channels; got dims={dims}. Pass dims=1 for inputs with '
            'the channels last; for maps take "layer" or "group", or nk.RMSNorm2d.'
        )
    classes = _row(kind, dims).ours
    if ANY not in classes and dims not in classes:
        raise ArgumentError(f'there is no "{kind}" norm for dims={dims}, only for {", ".join(map(str, classes))}.')
    return classes[ANY] if ANY in classes else classes[dims]


def _taken(made: type[nn.Module], target: Target, kind: str) -> tuple[str, ...]:
    """The options of a class, as this module calls them."""
    hidden = {target.size, "num_groups"}
    own = [name for name in inspect.signature(made).parameters if name not in hidden]
    called = ["affine" if name == "elementwise_affine" else name for name in own]
    at_most = [target.at_most[0]] if target.at_most is not None and kind != "layer" else []
    return tuple(dict.fromkeys([*called, *at_most]))


def _renamed(made: type[nn.Module], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the class calls them, without those that it has no use for."""
    own, parameters = dict(options), inspect.signature(made).parameters
    for name in ("momentum", "eps"):
        if name not in parameters:
            own.pop(name, None)
    if "affine" in own and "affine" not in parameters:
        affine = own.pop("affine")
        if "elementwise_affine" in parameters:
            own["elementwise_affine"] = affine
        elif affine is not True:
            raise ArgumentError(f"a {made.__name__} always has its parameters; got affine={affine!r}.")
    return own


def _arguments(
    made: type[nn.Module], kind: str, dims: int, channels: int | Sequence[int], options: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments of the constructor."""
    target, own = _row(kind, dims), _renamed(made, options)
    if kind in ("dyt", "derf"):
        own.setdefault("channels_last", dims == 1)
    if target.size == "normalized_shape":
        return {target.size: channels, **own}
    if type(channels) is not int or channels < 1:
        raise ArgumentError(f"{made.__name__} needs a number of channels, 1 or more; got {channels!r}.")
    if target.at_most is not None:
        most = 1 if kind == "layer" else own.pop(target.at_most[0], None)
        own |= _fitted(target, channels, dims, most)
    return {target.size: channels, **own}


def _fitted(target: Target, channels: int, dims: int, most: int | None) -> dict[str, int]:
    """The groups of a layer with these channels."""
    (name,) = target.sizes
    if name == "group_size":
        return {name: largest_divisor(channels, most or channels)}
    return {name: fitting_groups(channels, FEW if dims > 1 else 1, most, alone=False)}
