"""Folding: the same function with fewer layers, for every kind of layer, norm and way between them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from normkit.surgery.fold import fold
from normkit.surgery.fold.affine_map import FoldedNorm
from support.fold_checks import Block, agree, check, double, ready, reason

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


# ---- every layer, before and after -------------------------------------------------------------------------------


@pytest.mark.parametrize(("bias", "affine"), [(True, True), (True, "scale"), (False, "shift"), (False, False)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", [CONVS, TRANSPOSED], ids=["conv", "transposed"])
def test_norm_after_convolution(kind, dims, groups, bias, affine):
    norm = {1: nk.BatchNorm1d, 2: nk.BatchNorm2d, 3: nk.BatchNorm3d}[dims](8, affine=affine)
    conv = kind[dims](4, 8, 3, stride=2, padding=1, groups=groups, bias=bias)
    model = ready(nn.Sequential(conv, norm))
    result = check(model, double(2, 4, *[5] * dims), double(3, 4, *[7] * dims))
    assert result.changed[0] == ("1", "folded into 0", result.changed[0].why)


@pytest.mark.parametrize(("bias", "affine"), [(True, False), (False, True)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_norm_before_convolution(dims, groups, bias, affine):
    conv = CONVS[dims](4, 8, 3, stride=2, dilation=2, groups=groups, bias=bias)
    model = ready(nn.Sequential(NORMS[dims](4, affine=affine), conv))
    check(model, double(2, 4, *[7] * dims), double(1, 4, *[9] * dims))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_norm_before_transposed_convolution(dims, groups):
    model = ready(nn.Sequential(NORMS[dims](4), TRANSPOSED[dims](4, 8, 1, groups=groups, bias=False)))
    check(model, double(2, 4, *[5] * dims), double(2, 4, *[3] * dims))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_linear(bias, after):
    layers = (
        [nn.Linear(6, 5, bias=bias), nn.BatchNorm1d(5)] if after else [nn.BatchNorm1d(6), nn.Linear(6, 5, bias=bias)]
    )
    check(ready(nn.Sequential(*layers)), double(3, 6), double(1, 6))


class Sequences(nn.Module):
    """A linear layer on (N, L, C), and a norm of (N, C, L), in both orders."""

    def __init__(self, bias):
        super().__init__()
        self.first, self.bn1 = nn.Linear(6, 5, bias=bias), nn.BatchNorm1d(5)
        self.bn2, self.second = nn.BatchNorm1d(5), nn.Linear(5, 4, bias=bias)

    def forward(self, x):
        x = self.bn1(self.first(x).transpose(1, 2)).relu()
        return self.second(self.bn2(x).permute(0, 2, 1))


@pytest.mark.parametrize("bias", [True, False])
def test_linear_on_sequences(bias):
    check(ready(Sequences(bias)), double(3, 7, 6), double(2, 4, 6), folded=2)


NORMS_OF_ALL_KINDS = {
    "torch": lambda: nn.BatchNorm2d(4),
    "torch sync": lambda: nn.SyncBatchNorm(4),
    "torch instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "batch": lambda: nk.BatchNorm2d(4),
    "sync": lambda: nk.SyncBatchNorm(4),
    "renorm": lambda: nk.BatchRenorm2d(4),
    "ghost": lambda: nk.GhostBatchNorm2d(4),
    "shuffled": lambda: nk.ShuffledBatchNorm2d(4),
    "accumulated": lambda: nk.AccumulatedBatchNorm2d(4, micro_batches=2),
    "split": lambda: nk.SplitBatchNorm2d(4),
    "frozen": lambda: nk.FrozenBatchNorm2d(4),
    "moving": lambda: nk.MovingBatchNorm2d(4),
    "instance": lambda: nk.InstanceNorm2d(4, track_running_stats=True),
}


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("name", NORMS_OF_ALL_KINDS)
def test_every_norm_that_stores_statistics(name, after):
    norm, conv = NORMS_OF_ALL_KINDS[name](), nn.Conv2d(4, 4, 3)
    check(ready(nn.Sequential(conv, norm) if after else nn.Sequential(norm, conv)), double(2, 4, 6, 6))


class TheirFrozen(nn.Module):
    """A frozen BatchNorm as detection libraries write it."""

    def __init__(self, count):
        super().__init__()
        self.eps = 1e-5
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(count) + 0.5)

    def forward(self, x):
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale.reshape(1, -1, 1, 1) + (self.bias - self.running_mean * scale).reshape(1, -1, 1, 1)


def test_a_frozen_norm_of_another_library():
    model = ready(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), TheirFrozen(4)))
    check(model, double(2, 3, 6, 6))
    check(model.train(), double(2, 3, 6, 6))  # it has no mode


def test_norms_on_both_sides_and_in_rows():
    norms = [nn.BatchNorm2d(4) for _ in range(5)]
    model = ready(nn.Sequential(norms[0], norms[1], nn.Conv2d(4, 4, 3, bias=False), norms[2], norms[3], nn.ReLU()))
    result = check(model, double(2, 4, 6, 6), folded=4)
    assert {change.what for change in result.changed} == {"folded into 2"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types(dtype):
    model = ready(
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)), dtype
    )
    x = double(2, 8, 6, 6).to(dtype)
    result = fold(model, x)
    assert len(result.changed) == 2
    assert all(p.dtype == dtype for p in result.model.parameters())
    agree(model, result.model, x, tolerance=16 * torch.finfo(dtype).eps)


def test_norm_in_float32_beside_convolution_in_bfloat16():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.bn(self.conv(x).float())

    model = ready(Mixed(), torch.float32)
    model.conv.bfloat16()
    x = double(2, 3, 6, 6).bfloat16()
    result = fold(model, x)
    assert len(result.changed) == 1
    assert result.model.conv.bias.dtype == torch.bfloat16
    agree(model, result.model, x, tolerance=0.05)


def test_gamma_of_zero():
    model = ready(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    )
    with torch.no_grad():
        model[1].weight[:2] = 0
        model[3].weight.zero_()
    check(model, double(2, 3, 8, 8), folded=2)


def test_a_shift_of_zero_needs_no_bias_and_may_meet_padding():
    model = ready(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=1, bias=False)))
    with torch.no_grad():
        model[0].running_mean.zero_()
        model[0].bias.zero_()
    assert check(model, double(2, 3, 6, 6)).model[1].bias is None


def test_the_new_bias_wants_a_gradient_if_the_weight_does():
    model = ready(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)))
    assert fold(model, double(1, 3, 5, 5)).model[0].bias.requires_grad
    model[0].weight.requires_grad_(False)
    assert not fold(model, double(1, 3, 5, 5)).model[0].bias.requires_grad


# ---- what may be between -------------------------------------------------------------------------------------------

BETWEEN_AFTER = {
    "dropout": (nn.Dropout2d(), 4),
    "identity": (nn.Identity(), 4),
    "upsampling": (nn.Upsample(scale_factor=2, mode="bilinear"), 4),
    "average pooling": (nn.AvgPool2d(2), 4),
    "global average": (nn.AdaptiveAvgPool2d(1), 4),
    "reflection": (nn.ReflectionPad2d(1), 4),
    "pixel shuffle": (nn.PixelShuffle(2), 1),
    "channel shuffle": (nn.ChannelShuffle(2), 4),
}


@pytest.mark.parametrize("name", BETWEEN_AFTER)
def test_between_layer_and_norm(name):
    layer, count = BETWEEN_AFTER[name]
    check(
        ready(nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.BatchNorm2d(count))), double(2, 3, 6, 6), double(1, 3, 8, 8)
    )


BETWEEN_BEFORE = {
    "dropout": (nn.Dropout2d(), 4),
    "reflection": (nn.ReflectionPad2d(2), 4),
    "replication": (nn.ReplicationPad2d(1), 4),
    "circular": (nn.CircularPad2d(1), 4),
    "average pooling": (nn.AvgPool2d(2), 4),
    "uncounted padding": (nn.AvgPool2d(3, padding=1, count_include_pad=False), 4),
    "nearest": (nn.Upsample(scale_factor=2), 4),
    "bilinear": (nn.Upsample(scale_factor=2, mode="bilinear"), 4),
    "pixel unshuffle": (nn.PixelUnshuffle(2), 16),
}


@pytest.mark.parametrize("name", BETWEEN_BEFORE)
def test_between_norm_and_layer(name):
    layer, count = BETWEEN_BEFORE[name]
    model = ready(nn.Sequential(nn.BatchNorm2d(4), layer, nn.Conv2d(count, 5, 3, bias=False)))
    check(model, double(2, 4, 8, 8), double(1, 4, 10, 10))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_that_a_convolution_does_itself(mode):
    model = ready(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3, padding=2, padding_mode=mode, groups=1)))
    check(model, double(2, 4, 6, 6), double(1, 4, 9, 9))


def test_flattened_into_a_linear_layer():
    model = ready(nn.Sequential(nn.BatchNorm2d(4), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 5)))
    check(model, double(2, 4, 6, 6), double(3, 4, 6, 6))


def test_a_linear_layer_that_makes_a_map():
    model = ready(nn.Sequential(nn.Linear(6, 36), nn.Unflatten(1, (4, 3, 3)), nn.BatchNorm2d(4)))
    check(model, double(2, 6), double(1, 6))


class Joined(nn.Module):
    """One norm of what two layers made."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.bn = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 2, 3, bias=False), nn.BatchNorm2d(6)

    def forward(self, x):
        return self.bn(torch.cat([self.b(x), self.a(x)], 1))


class Parted(nn.Module):
    """One norm, and several layers that read it, in parts and as a whole, or beside something else."""

    def __init__(self):
        super().__init__()
        self.bn, self.a, self.b = nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1), nn.Conv2d(1, 3, 3)
        self.c = nn.Conv2d(7, 2, 1, bias=False)

    def forward(self, x):
        y = self.bn(x)
        _, part = y.split([3, 1], 1)
        return self.a(y).mean() + self.b(part).mean() + self.c(torch.cat([y, x[:, :3] ** 2], 1))


class Halves(nn.Module):
    """A layer whose first channels go to a norm, and the others elsewhere, more and more of them."""

    def __init__(self, mine):
        super().__init__()
        self.conv, self.bn, self.mine = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(4), mine

    def forward(self, x):
        y = self.conv(x)
        mine = y[:, self.mine :]
        first, _ = y.split([4, 2], 1)
        return torch.cat([self.bn(first), F.instance_norm(mine.clone()).relu_()], 1)


def test_channels_that_go_elsewhere_keep_their_scale():
    check(ready(Halves(4)), double(2, 3, 6, 6), double(1, 3, 8, 8))
    assert "also used by" in reason(ready(Halves(3)), double(2, 3, 6, 6))


@pytest.mark.parametrize("model", [Joined, Parted])
def test_several_layers_at_once(model):
    model = ready(model())
    channels = 3 if isinstance(model, Joined) else 4
    check(model, double(2, channels, 6, 6), double(1, channels, 8, 8))


# ---- structure ----------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(self.block(x) + x)


def test_a_block_that_runs_twice():
    check(ready(Recurrent()), double(2, 3, 6, 6))


class Shared(nn.Module):
    """Two layers and one norm, under two names."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.bn = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)
        self.again = self.bn

    def forward(self, x):
        return self.again(self.b(self.bn(self.a(x)).relu()))


def test_a_norm_with_two_names_after_two_layers():
    assert check(ready(Shared()), double(2, 3, 6, 6)).changed[0].what == "folded into a and b"


class Hidden(nn.Module):
    """Layers in a plain list, used in another order than they are kept in."""

    def __init__(self):
        super().__init__()
        self.parts = [nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(3, 4, 3)]

    def forward(self, x):
        bn, relu, conv = self.parts
        return relu(bn(conv(x)))


def test_layers_in_a_plain_list():
    model = Hidden()
    for part in model.parts:
        ready(part)
    result = fold(model.eval(), double(2, 3, 5, 5))
    assert result.changed[0][:2] == ("parts[0]", "folded into parts[2]")
    agree(model, result.model, double(2, 3, 7, 7))


class Dynamic(nn.Module):
    """What no tracer follows: branches on values, keyword arguments, a dictionary for output."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"bn": nn.BatchNorm2d(4), "conv": nn.Conv2d(3, 4, 3)})

    def forward(self, **given):
        y = self.layers["conv"](given["x"])
        if given["x"].sum().item() > 1e9:
            y = y * 2
        return {"y": self.layers["bn"](y), "n": len(given)}


def test_a_model_that_cannot_be_traced():
    model, x = ready(Dynamic()), double(2, 3, 5, 5)
    result = fold(model, {"x": x})
    assert [change.layer for change in result.changed] == ["layers.bn"]
    agree(lambda x: model(x=x)["y"], lambda x: result.model(x=x)["y"], x)
    again = fold(model, x, forward=lambda model, x: model(x=x))
    assert again.changed == result.changed


def test_inference_mode_inside():
    class Decorated(Block):
        @torch.inference_mode()
        def forward(self, x):
            return super().forward(x)

    class Linear(nn.Sequential):
        @torch.inference_mode()
        def forward(self, x):
            return super().forward(x)

    check(ready(Decorated()), double(2, 3, 5, 5))
    check(ready(Linear(nn.Linear(4, 5), nn.BatchNorm1d(5))), double(2, 4))


def test_weights_that_are_used_as_they_are_by_anything():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel, self.offset = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(4))
            self.bn = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.bn(torch.addmm(self.offset, x, self.kernel))

    check(ready(Functional()), double(3, 6))


def test_parameters_that_lie_in_one_memory():
    model = ready(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2))
    )
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat.detach(), model.parameters())
    twin = copy.deepcopy(model)
    result = fold(model, double(2, 3, 8, 8), inplace=True)
    assert len(result.changed) == 2
    agree(twin, result.model, double(2, 3, 8, 8))


def test_the_order_in_memory_stays():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bn = nn.Linear(6, 5), nn.BatchNorm1d(5)

        def forward(self, x):
            return self.bn(self.linear(x).transpose(1, 2)).view(len(x), -1)

    check(ready(Views()), double(2, 4, 6))
    model = ready(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).to(memory_format=torch.channels_last)
    x = double(2, 3, 6, 6).to(memory_format=torch.channels_last)
    assert check(model, x).model(x).is_contiguous(memory_format=torch.channels_last)


# ---- what norms carry ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu", "gelu", "sigmoid", "tanh"])
def test_activation_inside(activation):
    model = ready(nn.Sequential(nn.Conv2d(3, 4, 3), nk.BatchNorm2d(4, activation=activation)))
    result = check(model, double(2, 3, 5, 5))
    assert isinstance(result.model[1], FoldedNorm)


class Residual(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nk.BatchNorm2d(3, activation=activation)

    def forward(self, x):
        y = self.bn(self.conv(x), residual=x)
        return y if len(x) > 1 else self.bn(self.conv(y))


def test_a_norm_after_one_with_a_residual_is_not_folded_through_it():
    class Twice(Residual):
        def __init__(self):
            super().__init__(None)
            self.other = nn.BatchNorm2d(3)

        def forward(self, x):
            return self.other(self.bn(self.conv(x), residual=x))

    check(ready(Twice()), double(2, 3, 5, 5), skipped=1)


def test_autocast():
    model = ready(
        nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2)), torch.float32
    )

    def run(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    x = double(2, 3, 5, 5).float()
    result = fold(model, x, forward=run)
    assert len(result.changed) == 1
    agree(model, result.model, x, tolerance=1e-5)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_residual_inside(activation):
    check(ready(Residual(activation)), double(2, 3, 5, 5), double(1, 3, 5, 5))


class WithAct(nn.BatchNorm2d):
    """A norm with its activation as a child."""

    def __init__(self, count):
        super().__init__(count)
        self.drop, self.act = nn.Dropout(), nn.PReLU(count)

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class WithPower(nn.BatchNorm2d):
    """A norm that does something that its spec does not show."""

    def forward(self, x):
        return super().forward(x).abs()


def test_subclasses():
    model = ready(nn.Sequential(nn.Conv2d(3, 4, 3), WithAct(4)))
    result = check(model, double(2, 3, 5, 5))
    assert "1.act.weight" in result.model.state_dict()
    assert "WithPower does more" in reason(ready(nn.Sequential(nn.Conv2d(3, 4, 3), WithPower(4))), double(2, 3, 5, 5))


def test_hooks_of_the_user_stay():
    model, seen = ready(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))), []
    model[1].register_forward_hook(lambda layer, args, output: seen.append(output.shape) or output * 2)
    result = check(model, double(2, 3, 5, 5))
    seen.clear()
    result.model(double(2, 3, 5, 5))
    assert len(seen) == 1
