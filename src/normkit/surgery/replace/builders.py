"""New norms in the place of old ones: the right class and size, with the options of the old one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from normkit.activations import activation_options
from normkit.errors import NormkitError
from normkit.layers.frozen import FrozenBatchNorm
from normkit.layers.norm_layer import NormLayer
from normkit.surgery.norms import stored_moments
from normkit.surgery.operation import Skip
from normkit.surgery.replace.history import formers
from normkit.surgery.replace.sites import Site
from normkit.surgery.replace.targets import ANY, Wanted

Built = tuple[nn.Module, str]  # the layer, and a remark about its size or options

FEW = 8  # values in a group, at least: normalizing leaves of two values only their order, of one nothing


def build(site: Site, asked: Wanted) -> Built:
    """Make a layer of the requested class, in its initial state; skip where none fits this place."""
    try:
        return _BUILDERS.get(asked.to, _across)(site, asked)
    except NormkitError as error:  # an option of the old layer, such as an eps of zero, that ours do not accept
        raise Skip(str(error)) from error


def _across(site: Site, asked: Wanted) -> Built:
    if asked.to == "frozen" and stored_moments(site.layer) is None:
        raise Skip("it stores no statistics to freeze")
    if asked.to == "frozen" and site.spec.kind == "switchable":
        raise Skip("it normalizes with more than the statistics that it stores")
    if site.spec.is_over_last:
        site.dimensions()  # skips inputs other than (N, C), also for a class that takes any rank
    new = _class_for(site, asked)(
        num_features=site.channels,
        track_running_stats=_tracks(site),
        **_affine(site, asked),
        **_common(site, asked),
    )
    return with_parts(new, site), _START.get(asked.to, "")


def _tracks(site: Site) -> bool:
    """As the old layer; norms within an example store no statistics, and get fresh ones."""
    return stored_moments(site.layer) is not None or not site.spec.evaluates_as_batch_norm


# How the statistics of a BatchNorm are kept in other forms.
_START = {
    "domain": "every domain starts with the same statistics",
    "split": "every part of a batch starts with the same gamma, beta and statistics",
    "moving": "centers no more: its mean square is made of the old mean and variance",
    "switchable": "starts as an equal mix of instance, layer and batch statistics",
}


def _whitened(site: Site, asked: Wanted) -> Built:
    kind, channels, options = _class_for(site, asked), site.channels, _common(site, asked)
    size = largest_divisor(channels, options.pop("group_size", None) or channels)
    arguments = {"num_features": channels, "group_size": size, "track_running_stats": _tracks(site)}
    new = kind(**arguments, **_affine(site, asked), **options)
    return with_parts(new, site), f"{size} channels whitened together; they count as uncorrelated until it is trained"


def _position(site: Site, asked: Wanted) -> Built:
    kind, sizes = _class_for(site, asked), sorted({shape[2:] for shape in site.shapes})
    if len(sizes) != 1:
        seen = " and ".join(f"{height}x{width}" for height, width in sizes) or "none"
        raise Skip(f"it needs maps of one size, to have parameters for each position; the example shows {seen}")
    height, width = sizes[0]
    arguments = {"num_features": site.channels, "height": height, "width": width, "track_running_stats": _tracks(site)}
    new = kind(**arguments, **_affine(site, asked), **_common(site, asked))
    return with_parts(new, site), f"for maps of {height}x{width}, every position alike at first"


def _evo(site: Site, asked: Wanted) -> Built:
    """EvoNorms are norm and activation in one, so that an activation inside the old layer goes with it."""
    options = _options(site, asked) | place_and_type(site.layer)
    if asked.to == "evo-s0":
        options["groups"] = _number_of_groups(site, asked.options.get("groups"))
    new = _class_for(site, asked)(num_features=site.channels, **_affine(site, asked), **options)
    inside = site.spec.activation
    note = f"in place of {inside} too" if inside else "an activation by itself: take out the one that follows"
    return with_parts(new, site), note


def _instance(site: Site, asked: Wanted) -> Built:
    kind = _class_for(site, asked)
    if site.positions == 1:
        raise Skip("its inputs have one position, and a single value less its own mean is always zero")
    if not site.shapes and site.dimensions() == 1:
        raise Skip(f"a {site.class_name} may see (N, C), which an instance norm sets to zero; pass example=")
    return with_parts(kind(num_features=site.channels, **_affine(site, asked), **_common(site, asked)), site), ""


def _group(site: Site, asked: Wanted) -> Built:
    channels, groups = site.channels, _number_of_groups(site, asked.options.get("groups"))
    if site.spec.is_over_last or site.spec.kind == "instance":
        site.dimensions()  # skips inputs without a batch dimension, or with channels last
    new = _class_for(site, asked)(
        num_groups=groups, num_channels=channels, **_affine(site, asked), **_common(site, asked)
    )
    return with_parts(new, site), f"{channels} channels in groups of {channels // groups}"


def _number_of_groups(site: Site, most: int | None) -> int:
    """As many groups as fit; a layer with groups of its own keeps their number."""
    if most is None and site.spec.num_groups is not None and site.spec.kind in ("group", "evo-s0"):
        return site.spec.num_groups
    positions = _fewest_positions(site)
    if site.channels * positions < 2:
        raise Skip("one channel at one position is a single value, which is always zero")
    return fitting_groups(site.channels, positions, most, alone=bool(site.shapes))


def fitting_groups(channels: int, positions: int, most: int | None, alone: bool) -> int:
    """The largest number up to `most`, or 32, that divides the channels and leaves each group enough values.

    A group of one channel only on request and if its positions were seen: `alone`.
    """
    least = FEW if most is None else 2
    fitting = [
        groups
        for groups in range(1, min(most or 32, channels) + 1)
        if channels % groups == 0
        and channels // groups * positions >= least
        and (groups < channels or (alone and most is not None))
    ]
    return max(fitting, default=1)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is not above `most`."""
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)


def _fewest_positions(site: Site) -> int:
    """By the example; without one, a class for maps is assumed to have positions, one for (N, C) is not."""
    if site.positions is not None:
        return site.positions
    try:
        return FEW if site.dimensions() > 1 else 1
    except Skip:
        return 1


def _layer(site: Site, asked: Wanted) -> Built:
    if site.spec.channels_first:
        return _over_channels(site, asked)
    if not site.spec.is_over_last and site.ranks != [2]:
        one_group = Wanted("group", asked.classes, {**asked.options, "groups": 1})
        return _group(site, one_group)[0], "over channels and positions together"
    return _over_last(site, asked)


def _over_channels(site: Site, asked: Wanted) -> Built:
    """A norm over the channels of each position, (N, C, H, W), in the place of another that has them second."""
    classes = asked.target.of_channels if asked.classes == "normkit" else {}
    if not classes:
        raise Skip("its channels are the second dimension, and there is no class of torch's that normalizes these")
    dimensions = site.dimensions()
    if dimensions not in classes:
        raise Skip(f'there is no "{asked.to}" norm over the channels of {dimensions}d inputs')
    options = _common(site, asked)
    if site.spec.kind == "rms" and site.spec.eps is None:
        options.setdefault("eps", None)
    affine = site.spec.affine if asked.to == "layer" else site.spec.affine in (True, "scale")
    return with_parts(classes[dimensions](num_channels=site.channels, affine=affine, **options), site), ""


def _rms(site: Site, asked: Wanted) -> Built:
    if site.spec.channels_first:
        new, note = _over_channels(site, asked)
    else:
        _need_channels_last(site, "RMSNorm")
        new, note = _over_last(site, asked)
    if site.spec.affine in (True, "shift"):
        note = "beta dropped: RMSNorm has none"
    return new, note


def _squashed(site: Site, asked: Wanted) -> Built:
    """A function of single values; its gamma and beta are where the old layer's are, or would be."""
    if site.spec.kind == "instance":
        site.dimensions()  # skips inputs without a batch dimension
    is_last = site.spec.is_over_last
    shape = site.normalized_shape if is_last else (site.channels,)
    new = _class_for(site, asked)(normalized_shape=shape, channels_last=is_last, **_common(site, asked))
    first = f"{new.alpha_init_value:g}"
    return new, f"a function of single values, of which alpha, {first} at first, is to be learned"


def _scale(site: Site, asked: Wanted) -> Built:
    if site.spec.channels_first:
        raise Skip("its channels are the second dimension, and ScaleNorm takes the last")
    _need_channels_last(site, "ScaleNorm")
    if site.spec.is_over_last and len(site.normalized_shape) > 1:
        raise Skip("ScaleNorm is over the last dimension alone, and this one is over several")
    dropped = ", beta dropped" if site.spec.affine in (True, "shift") else ""
    new = _class_for(site, asked)(dim=site.channels, **_common(site, asked))
    return new, f"one length for all channels, that of its gamma{dropped}"


def _need_channels_last(site: Site, who: str) -> None:
    if site.spec.is_over_last or site.ranks == [2]:
        return
    if not site.shapes and site.dimensions() == 1:
        raise Skip(f"a {site.class_name} may see (N, C), which {who} takes, or (N, C, L); pass example=")
    raise Skip(f"{who} takes the last dimension for the channels, and here they are the second")


def _over_last(site: Site, asked: Wanted) -> Built:
    shape = site.normalized_shape if site.spec.is_over_last else (site.channels,)
    affine: dict[str, Any] = {"elementwise_affine": site.spec.affine is not False}
    if asked.to == "layer":
        affine["bias"] = site.spec.affine in (True, "shift")
    new = _class_for(site, asked)(normalized_shape=shape, **affine, **_common(site, asked))
    return with_parts(new, site), ""


def _filter_response(site: Site, asked: Wanted) -> Built:
    kind, activation = _class_for(site, asked), site.spec.activation
    if activation not in (None, "relu"):
        raise Skip(f"a filter response norm ends in a threshold, which is no {activation}")
    if site.positions == 1 and not asked.options.get("learnable_eps"):
        raise Skip("its inputs have one position, of which only the sign would be left; pass learnable_eps=True")
    options = {"threshold": activation is not None} | _options(site, asked) | place_and_type(site.layer)
    note = "with a learned threshold" if options["threshold"] else "without a threshold"
    return kind(num_features=site.channels, **options), note + (" for the relu inside" if activation else "")


_BUILDERS: dict[str, Callable[[Site, Wanted], Built]] = {
    "whitened": _whitened,
    "position": _position,
    "evo-b0": _evo,
    "evo-s0": _evo,
    "instance": _instance,
    "group": _group,
    "layer": _layer,
    "rms": _rms,
    "scale": _scale,
    "dyt": _squashed,
    "derf": _squashed,
    "filter-response": _filter_response,
}


def _class_for(site: Site, asked: Wanted) -> Callable[..., nn.Module]:
    classes = asked.target.classes(asked.classes)
    if ANY in classes:
        return classes[ANY]
    dimensions = site.dimensions()
    if dimensions not in classes:
        raise Skip(f'there is no "{asked.to}" norm for {dimensions}d inputs')
    return classes[dimensions]


def _affine(site: Site, asked: Wanted) -> dict[str, Any]:
    """Torch's classes have gamma and beta only together; `with_parts` removes what the old layer has not."""
    return {"affine": site.spec.affine if asked.classes == "normkit" else site.spec.affine is not False}


def with_parts(new: nn.Module, site: Site) -> nn.Module:
    """Leave a layer only those of gamma and beta that the old one has."""
    for name, has in (("weight", (True, "scale")), ("bias", (True, "shift"))):
        if site.spec.affine not in has and name in new._parameters:
            new.register_parameter(name, None)
    return new


def _common(site: Site, asked: Wanted) -> dict[str, Any]:
    has_place = asked.classes == "normkit" and site.spec.activation is not None
    activation = activation_options(site.layer) if has_place else {}
    return _options(site, asked) | place_and_type(site.layer) | activation


def place_and_type(layer: nn.Module) -> dict[str, Any]:
    """The device and dtype of a layer's tensors, as keyword arguments; empty for a layer without tensors."""
    tensors = [t for t in (*layer.parameters(), *layer.buffers()) if t.is_floating_point()]
    return {"device": tensors[0].device, "dtype": tensors[0].dtype} if tensors else {}


def _options(site: Site, asked: Wanted) -> dict[str, Any]:
    """The options of the new layer: as requested, else the old layer's, else those of what the old layer was before."""
    found: dict[str, Any] = {}
    for name in asked.target.taken(asked.classes):
        if name in asked.options:
            found[name] = asked.options[name]
        elif name == "eps" and site.spec.eps is not None:  # foreign layers may call it otherwise, or not keep it
            found[name] = site.spec.eps
        elif _passes_on(site, name):
            held = [vars(site.layer), *(former["attributes"] for former in formers(site.layer))]
            found |= next(({name: of[name]} for of in held if name in of), {})
    found.pop("groups", None)
    if not isinstance(found.get("eps", 0.0), float | int):  # None, an RMSNorm's default, or one eps per channel
        del found["eps"]
    return found


def _passes_on(site: Site, name: str) -> bool:
    """Whether an attribute of this name means the same in the old layer as in ours."""
    if name == "track_running_stats":  # decided by the statistics of batch norms, an option of instance norms
        return site.spec.kind == "instance"
    return name in ("eps", "momentum", "process_group") or isinstance(site.layer, NormLayer)


def frozen_twin(site: Site) -> nn.Module | None:
    """Our frozen norm in the place of another library's; None if this is not one."""
    if site.spec.kind != "batch" or isinstance(site.layer, _BatchNorm | FrozenBatchNorm):
        return None
    return build(site, Wanted("frozen"))[0]
