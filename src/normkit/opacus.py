"""normkit's layers in Opacus, which knows layers by their exact types: importing this module registers ours.

- The validator refuses layers that normalize with the statistics of a batch, as it does torch's.
- The fixer puts GroupNorms in their place, as it does for torch's, with gamma, beta and activation kept.
- The grad samplers compute the gradient of gamma and beta for each example, through the activation inside the layer.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit import functional, layers
from normkit.activations import parted
from normkit.errors import ArgumentError, NormkitWarning
from normkit.layers.batch import BatchNorm
from normkit.layers.instance import InstanceNorm
from normkit.layers.norm_layer import NormLayer
from normkit.layers.whitened import WhitenedBatchNorm
from normkit.optional import required

__all__: list[str] = []  # what this module does, it does when it is imported


def _opacus(module: str) -> Any:
    return required(f"opacus.{module}", "normkit.opacus", "opacus", "opacus")


_validators = _opacus("validators")
_errors = _opacus("validators.errors")
_samplers = _opacus("grad_sample")

_ACROSS_EXAMPLES = (
    BatchNorm,
    WhitenedBatchNorm,
    layers.MovingBatchNorm2d,
    layers.SwitchableNorm2d,
    layers.EvoNormB0,
)
# The normalization alone: of this layer, of x, with this gamma and beta.
Normalize = Callable[[Any, Tensor, Tensor | None, Tensor | None], Tensor]


def _classes(*bases: type) -> list[type]:
    """The public classes of layers that derive from these."""
    public = [getattr(layers, name) for name in layers.__all__]
    return [kind for kind in public if inspect.isclass(kind) and issubclass(kind, bases)]


def _refuse(norm: nn.Module) -> list[Exception]:
    return [
        _errors.ShouldReplaceModuleError(
            f"{type(norm).__name__} normalizes an example with the statistics of the batch it is in, so that no "
            "gradient belongs to one example alone. Put norms within an example in its place, by "
            'nk.convert(model, "group") or ModuleValidator.fix(model); or stop it where it is, by nk.freeze(model).'
        )
    ]


def _replace(
    norm: nn.Module, *, replace_bn_with_in: bool = False, num_groups: int | None = None, **others: Any
) -> nn.Module:
    """A norm within an example, as Opacus' fixer for torch's BatchNorm makes it, but never with groups of one value."""
    from normkit.surgery.replace.convert import convert

    if replace_bn_with_in and num_groups is not None:
        raise ArgumentError(f"replace_bn_with_in=True makes no groups; got num_groups={num_groups} as well.")
    options: dict[str, Any] = {} if num_groups is None else {"groups": num_groups}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NormkitWarning)  # about what is skipped, which is an error here
        done = convert(norm, "instance" if replace_bn_with_in else "group", **options)
    if not done.changed:
        raise _errors.UnsupportableModuleError(f"{type(norm).__name__} cannot be replaced: {done.skipped[0].why}.")
    return done.model


def _refuse_tracked(norm: InstanceNorm) -> list[Exception]:
    if not norm.track_running_stats:
        return []
    return [
        _errors.IllegalModuleConfigurationError(
            f"{type(norm).__name__} with track_running_stats=True stores statistics of examples, which are not private."
        )
    ]


def _untracked(norm: InstanceNorm, **others: Any) -> InstanceNorm:
    """The same layer without running statistics."""
    new = copy.deepcopy(norm)
    new.track_running_stats = False
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        new.register_buffer(name, None)
    return new


def _sampler(
    normalize: Normalize, over_last: bool, layer: Any, activations: Sequence[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Gradients of gamma and beta, one per example, from what the layer was given and the gradient of its output."""
    x = activations[0]
    normalized = normalize(layer, x, None, None)
    slopes = backprops if layer.activation is None else _before_activation(normalize, layer, x, backprops)
    kept = layer.weight.dim() if over_last else 1
    sums: dict[nn.Parameter, Tensor] = {}
    for parameter, values in ((layer.weight, normalized * slopes), (getattr(layer, "bias", None), slopes)):
        if parameter is not None and parameter.requires_grad:
            first, last = (1, values.dim() - kept) if over_last else (2, values.dim())
            sums[parameter] = values.sum(tuple(range(first, last))) if first < last else values
    return sums


def _before_activation(normalize: Normalize, layer: Any, x: Tensor, backprops: Tensor) -> Tensor:
    """The gradient of what goes into the activation, from that of its output."""
    with torch.enable_grad():
        before = normalize(layer, x, layer.weight, getattr(layer, "bias", None)).detach().requires_grad_()
        after = _activation(layer)(before.clone())  # a clone: some work in place
        (slopes,) = torch.autograd.grad(after, before, backprops)
    return slopes


def _activation(layer: Any) -> Callable[[Tensor], Tensor]:
    kept = layer.activation
    # The forward of a module, not the module: one with parameters has hooks of Opacus, which would count a second call.
    return kept.forward if isinstance(kept, nn.Module) else parted(kept, layer.negative_slope).apply


def _group(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return functional.group_norm(x, layer.num_groups, weight, bias, layer.eps)


def _instance(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return functional.group_norm(x, layer.num_features, weight, bias, layer.eps)


def _layer(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return functional.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)


def _rms(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return functional.rms_norm(x, layer.normalized_shape, weight, layer.eps)


def _refuse_options(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Opacus keeps the positional inputs of a call, from which alone the gradients would come out wrong."""
    given = [name for name, value in kwargs.items() if value is not None]
    if given:
        raise ArgumentError(
            f"Opacus does not see {given[0]}= in a call of {type(layer).__name__}, and would take the gradients of "
            f"examples without it. Call the layer with its input alone, and do the rest outside of it."
        )


def _guarded(add_hooks: Callable[..., None]) -> Callable[..., None]:
    """Opacus' `add_hooks`, which besides watches the calls of our layers."""

    @functools.wraps(add_hooks)
    def adding(self: Any, **options: Any) -> None:
        add_hooks(self, **options)
        for layer in _trained(self._module):  # in Opacus' own list, and so removed with its own hooks
            self._module.autograd_grad_sample_hooks.append(
                layer.register_forward_pre_hook(_refuse_options, with_kwargs=True)
            )

    return adding


def _trained(model: nn.Module) -> list[nn.Module]:
    """Our layers with parameters that are trained."""
    ours = [layer for layer in model.modules() if isinstance(layer, NormLayer)]
    return [layer for layer in ours if any(p.requires_grad for p in layer.parameters(recurse=False))]


def _register() -> None:
    across, instance = _classes(*_ACROSS_EXAMPLES), _classes(InstanceNorm)
    _validators.register_module_validator(across)(_refuse)
    _validators.register_module_fixer(across)(_replace)
    _validators.register_module_validator(instance)(_refuse_tracked)
    _validators.register_module_fixer(instance)(_untracked)
    for kinds, normalize, over_last in (
        ([layers.GroupNorm], _group, False),
        (instance, _instance, False),
        ([layers.LayerNorm], _layer, True),
        ([layers.RMSNorm], _rms, True),
    ):
        _samplers.register_grad_sampler(kinds)(functools.partial(_sampler, normalize, over_last))
    _samplers.GradSampleHooks.add_hooks = _guarded(_samplers.GradSampleHooks.add_hooks)


_register()
