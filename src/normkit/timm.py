"""normkit's layers in timm's models: after `import normkit.timm`, what is given as norm_layer= is what is built.

timm's norm-act models (EfficientNet, RegNet, DenseNet and others) look a norm layer up by the name of its class, and
take their own class for `nk.BatchNorm2d`. A layer of ours gets the activation instead, as its own `activation=`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from normkit import layers
from normkit.activations import activation_options
from normkit.errors import ArgumentError, UnsupportedError
from normkit.layers.frozen import FrozenBatchNorm
from normkit.layers.norm_layer import NormLayer
from normkit.named_layers import display_name
from normkit.optional import required
from normkit.spec import describe

__all__ = ["norm_act"]


def _timm(module: str) -> Any:
    return required(f"timm.{module}", "normkit.timm", "timm", "timm")


_activations = _timm("layers.create_act")
_converters = _timm("layers.norm_act")
_pruning = _timm("models._prune")
_registry = _timm("layers.create_norm_act")

Factory = Callable[..., nn.Module]


def norm_act(norm: str | Factory, **options: Any) -> Factory:
    """A norm layer of ours with an activation after it, for norm_layer= of timm's models.

    Models that take norm-act layers do this by themselves with a class of ours, or with what `nk.norm_layer` returns.

    Args:
        norm: a kind of norm ("batch", "group" and so on, as `nk.norm_layer` takes it), what that returns, a class of
            ours, or a partial of one.
        options: of that layer, by keyword.

    Returns:
        A function of num_features with timm's options: apply_act, act_layer, act_kwargs, inplace, drop_layer, device
        and dtype, and those of the layer.
    """
    if isinstance(norm, str):
        norm, options = _of_kind(norm, **options), {}
    made, args, bound = _taken_apart(norm)
    if args:
        given = ", ".join([getattr(made, "__name__", repr(made)), *map(repr, args)])
        raise ArgumentError(f"timm drops the positional arguments of partial({given}). Pass them by keyword.")
    options = bound | options
    _check(made, options)
    return functools.partial(_build, norm=made, **options)


def _of_kind(kind: str, **options: Any) -> Factory:
    """What `nk.norm_layer` returns; surgery, where it is, is loaded when it is first asked for."""
    factory: Factory = importlib.import_module("normkit.surgery").norm_layer(kind, **options)
    return factory


def _taken_apart(norm: Factory) -> tuple[Factory, tuple[Any, ...], dict[str, Any]]:
    return (norm.func, norm.args, norm.keywords) if isinstance(norm, functools.partial) else (norm, (), {})


def _is_ours(made: Any) -> bool:
    """Whether it makes layers of ours: a class of one, or what is inside of a factory of `nk.norm_layer`."""
    is_own = str(getattr(made, "__module__", "")).startswith("normkit.") and made is not _build
    return is_own or _is_layer(made)


def _is_layer(made: Any) -> bool:
    return inspect.isclass(made) and issubclass(made, NormLayer)


def _check(made: Factory, options: dict[str, Any]) -> None:
    """Refuse what makes no layer of ours, or one without a place for an activation."""
    if _is_ours(made) and "kind" in options:
        _of_kind(**options | {"activation": None})
    elif not _is_layer(made):
        what = f"{getattr(made, '__name__', repr(made))} of {made.__module__}"
        raise ArgumentError(f"norm_act makes layers of normkit; got {what}.")
    elif not any(
        p.name == "activation" or p.kind is p.VAR_KEYWORD for p in inspect.signature(made).parameters.values()
    ):
        raise ArgumentError(f"{made.__name__} brings its own nonlinearity, and has no place for timm's activation.")


def _build(
    num_features: int,
    *,
    norm: Factory,
    apply_act: bool = True,
    act_layer: Any = nn.ReLU,
    act_kwargs: dict[str, Any] | None = None,
    inplace: bool = True,
    drop_layer: Callable[[], nn.Module] | None = None,
    **options: Any,
) -> nn.Module:
    """Make a layer as timm's norm-act classes are made: it normalizes, drops if asked to, and activates."""
    of_act = {"inplace": inplace} | (act_kwargs or {})
    act = _activations.create_act_layer(act_layer, **of_act) if apply_act else None
    drop = None if drop_layer is None else drop_layer()
    parts = OrderedDict((name, part) for name, part in (("drop", drop), ("act", act)) if part is not None)
    options |= _options_of(act if drop is None else nn.Sequential(parts))
    is_group = inspect.isclass(norm) and issubclass(norm, nn.GroupNorm)
    if is_group:  # timm's order: channels first, and 32 groups
        norm = functools.partial(norm, options.pop("num_groups", 32))
    layer = norm(num_features, **options)
    if act is not None and next(act.parameters(), None) is not None:
        _name_as_timm(layer, "activation." if drop is None else "activation.act.")
    return layer


def _options_of(after: nn.Module | None) -> dict[str, Any]:
    """The activation as options of a layer: by its name where ours have one, so that it is computed with the norm."""
    return {} if after is None else activation_options(nn.Sequential(after))


def _name_as_timm(layer: nn.Module, ours: str) -> None:
    """Give the parameters of an activation timm's names in state_dicts: "act.weight"."""
    layer.register_state_dict_post_hook(functools.partial(_rename, ours, "act."))
    layer.register_load_state_dict_pre_hook(functools.partial(_rename, "act.", ours))


def _rename(old: str, new: str, layer: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix + old)]:
        state_dict[prefix + new + key.removeprefix(prefix + old)] = state_dict.pop(key)


# ---- functions of timm, replaced wherever they have been imported to


def _put_in_place(original: Callable[..., Any], new: Callable[..., Any]) -> None:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(original.__name__) is original:
            setattr(module, original.__name__, new)


def _looking_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function by which timm finds norm-act layers, to which ours are known."""

    @functools.wraps(original)
    def get_norm_act_layer(norm_layer: Any, act_layer: Any = None) -> Any:
        return original(norm_act(norm_layer) if _is_ours(_taken_apart(norm_layer)[0]) else norm_layer, act_layer)

    return get_norm_act_layer


def _refusing(original: Callable[..., Any], is_lost: Callable[[nn.Module], bool], instead: str) -> Callable[..., Any]:
    """A function of timm that raises, before it changes anything, where it would lose what a layer of ours does."""

    @functools.wraps(original)
    def refusing(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        lost = [name for name, layer in module.named_modules() if is_lost(layer)]
        if lost:
            raise UnsupportedError(
                f"timm's {original.__name__} would not keep what {len(lost)} of normkit's layers do, of which "
                f"{display_name(lost[0])} is the first. Use {instead}."
            )
        return original(module, *args, **kwargs)

    return refusing


def _is_more_than_torchs(layer: nn.Module) -> bool:
    """Whether a layer normalizes over a batch, and does anything that torch's BatchNorm does not."""
    spec = describe(layer) if isinstance(layer, NormLayer) and not _is_frozen(layer) else None
    if spec is None or "N" not in spec.over:
        return False
    is_plain = type(layer) in (layers.BatchNorm1d, layers.BatchNorm2d, layers.BatchNorm3d)
    propagates = getattr(layer, "nonfinite", "propagate") == "propagate"
    is_usual = propagates and spec.channel_dim == 1
    return not (is_plain and is_usual and isinstance(spec.affine, bool) and spec.activation is None)


def _is_frozen(layer: nn.Module) -> bool:
    return isinstance(layer, FrozenBatchNorm)


def _is_batch_norm(layer: nn.Module) -> bool:
    return isinstance(layer, NormLayer) and isinstance(layer, nn.BatchNorm2d)


def _register() -> None:
    _registry._NORM_ACT_TYPES.add(_build)
    _registry._NORM_ACT_REQUIRES_ARG.add(_build)
    _put_in_place(_registry.get_norm_act_layer, _looking_up(_registry.get_norm_act_layer))
    for function, is_lost, instead in (
        (_converters.convert_sync_batchnorm, _is_more_than_torchs, 'nk.convert(model, "sync").model'),
        (_converters.freeze_batch_norm_2d, _is_more_than_torchs, "nk.freeze(model).model"),
        (_converters.unfreeze_batch_norm_2d, _is_frozen, "nk.unfreeze(model).model"),
        (_pruning.adapt_model_from_string, _is_batch_norm, 'timm\'s own norms, and nk.convert(model, "batch").model'),
    ):
        _put_in_place(function, _refusing(function, is_lost, instead))


_register()
