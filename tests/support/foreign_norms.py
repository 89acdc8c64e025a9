"""Norms as other libraries write them, and models that keep theirs in unusual places."""

import torch
from torch import nn
from torch.nn import functional as F

from support.case import randomize_


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm writes it: dropout and activation are children, forward is its own."""

    def __init__(self, num_features, act, drop=None, **options):
        super().__init__(num_features, **options)
        self.drop = drop or nn.Identity()
        self.act = act

    def forward(self, x):
        x = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
        )
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        return self.act(self.drop(x))


class HiddenActivation(nn.BatchNorm2d):
    """Its activation is nowhere to be seen but in what it computes."""

    def forward(self, x):
        return F.relu(super().forward(x))


class AbsoluteGamma(nn.BatchNorm2d):
    """As inplace_abn did once: another function, but only of a gamma below zero."""

    def forward(self, x):
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight.abs(), self.bias, self.training, self.momentum, self.eps
        )


class OnlyARename(nn.BatchNorm2d):
    """A subclass that adds nothing."""


class NeedsMore(nn.BatchNorm2d):
    def forward(self, x, condition):
        return super().forward(x) * condition


class FrozenBatchNorm2d(nn.Module):
    """As torchvision writes it; as DETR does, which keeps no eps, for eps=None."""

    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        if eps is not None:
            self.eps = eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(num_features) + 0.5)

    def forward(self, x):
        w, b, m, v = (t.reshape(1, -1, 1, 1) for t in (self.weight, self.bias, self.running_mean, self.running_var))
        scale = w * (v + getattr(self, "eps", 1e-5)).rsqrt()
        return x * scale + (b - m * scale)


class AnotherEps(nn.BatchNorm2d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, 1e-6)


class InFloat32(nn.LayerNorm):
    """As timm writes it: the same, but in single precision."""

    def forward(self, x):
        weight, bias = (None if t is None else t.float() for t in (self.weight, self.bias))
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class MeanMagnitudeNorm(nn.Module):
    """A norm by its name, and none that is known."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x / x.abs().mean(-1, keepdim=True).add(1e-6) * self.weight


class Scattered(nn.Module):
    """Norms under odd names, shared, and in plain lists and dictionaries."""

    def __init__(self):
        super().__init__()
        self.add_module("odd name-1/2", nn.BatchNorm2d(4, momentum=0.3))
        self.shared = nn.BatchNorm2d(4, eps=0.01)
        self.again = self.shared
        self.blocks = [nn.BatchNorm2d(4), [nn.BatchNorm2d(4)]]
        self.heads = {"a": nn.BatchNorm2d(4, momentum=None)}

    def forward(self, x):
        for layer in (getattr(self, "odd name-1/2"), self.shared, self.blocks[0], self.blocks[1][0], self.heads["a"]):
            x = layer(x).tanh()
        return self.again(x)

    def every_norm(self):
        return [getattr(self, "odd name-1/2"), self.shared, self.blocks[0], self.blocks[1][0], self.heads["a"]]


def randomized(model):
    """The model with all state drawn anew, also of layers that torch does not know of, and half its gradients off."""
    for layer in [model, *(model.every_norm() if isinstance(model, Scattered) else [])]:
        randomize_(layer)
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 != 1)
    return model


def picture(model):
    """All that a model is: what undo must give back, bit for bit, and the very objects."""
    seen = []
    for name, module in model.named_modules():
        hooks = [id(hook) for hook in module._forward_hooks.values()]
        options = {k: v for k, v in vars(module).items() if not k.startswith("_")}
        seen.append((name, type(module), module.training, hooks, options))
        for kind in (module._parameters, module._buffers):
            seen += [
                (k, id(t), t.requires_grad, t.dtype, t.clone()) if t is not None else (k, None) for k, t in kind.items()
            ]
    return seen


def same_picture(a, b):
    return len(a) == len(b) and all(
        len(left) == len(right)
        and all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(left, right, strict=True))
        for left, right in zip(a, b, strict=True)
    )
