"""The mask is followed through what changes lengths, and padding is hidden from what reads several positions."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from support.case import randomize_
from support.depth import thinned
from support.unpadded import assert_as_unpadded, run_unpadded

LENGTHS = [23, 12, 17, 9]

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def in_between(*layers, rank=1):
    """A network with layers between two norms, so that what they see is neither zero nor constant in the padding."""
    conv, norm = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d)}[rank]
    model = nn.Sequential(conv(3, 4, 3, padding=1), norm(4), nn.Tanh(), *layers, norm(4), conv(4, 2, 3, padding=1))
    return randomize_(model).double()


class Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


LAYERS = {
    "conv": nn.Conv1d(4, 4, 3),
    "conv-strided": nn.Conv1d(4, 4, 5, stride=3, padding=2),
    "conv-dilated": nn.Conv1d(4, 4, 3, stride=2, padding=3, dilation=2, groups=2),
    "conv-same": nn.Conv1d(4, 4, 4, padding="same"),
    "conv-valid": nn.Conv1d(4, 4, 4, padding="valid"),
    "conv-of-one-strided": nn.Conv1d(4, 4, 1, stride=2),
    "conv-of-one-padded": nn.Conv1d(4, 4, 1, padding=1),
    "transposed": nn.ConvTranspose1d(4, 4, 5, stride=3, padding=1, output_padding=2, dilation=2),
    "max": nn.MaxPool1d(2),
    "max-padded": nn.MaxPool1d(3, stride=2, padding=1),
    "max-ceil": nn.MaxPool1d(4, stride=3, padding=1, ceil_mode=True),
    "max-dilated": nn.MaxPool1d(3, 1, dilation=2),
    "max-indices": Function(lambda x: F.max_pool1d(x, 3, return_indices=True)[0]),
    "max-of-torch": Function(lambda x: torch.max_pool1d(x, 2)),
    "average": nn.AvgPool1d(3, stride=2),
    "average-padded": nn.AvgPool1d(3, stride=2, padding=1),
    "average-not-counting": nn.AvgPool1d(3, stride=2, padding=1, count_include_pad=False),
    "average-ceil": nn.AvgPool1d(4, stride=3, ceil_mode=True),
    "average-ceil-not-counting": nn.AvgPool1d(4, stride=3, padding=2, ceil_mode=True, count_include_pad=False),
    "whole-average": nn.AdaptiveAvgPool1d(1),
    "whole-max": nn.AdaptiveMaxPool1d(1),
    "whole-max-indices": Function(lambda x: F.adaptive_max_pool1d(x, 1, return_indices=True)[0]),
    "upsample": nn.Upsample(scale_factor=3),
    "upsample-by-a-fraction": nn.Upsample(scale_factor=1.5, mode="nearest-exact"),
    "pad": nn.ZeroPad1d((2, 3)),
    "pad-with-a-value": nn.ConstantPad1d((1, 2), 0.7),
    "pad-negative": nn.ConstantPad1d((-1, -2), 0.0),
    "pad-then-conv": nn.Sequential(nn.ConstantPad1d((1, 2), -1.0), nn.Conv1d(4, 4, 4, stride=2)),
    "causal": nn.Sequential(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(4, 4, 3)),
    "trimmed": nn.Sequential(nn.Conv1d(4, 4, 3, padding=2), Function(lambda x: x[:, :, :-2])),
    "channels-last": Function(lambda x: F.layer_norm(x.transpose(1, 2), (4,)).transpose(1, 2)),
    "pad-channels-last": Function(lambda x: F.pad(x.transpose(1, 2), (0, 0, 1, 2)).transpose(1, 2)),
    "residual": Function(lambda x: x + F.avg_pool1d(x, 3, 1, 1)),
    "two-ways": Function(lambda x: torch.cat([F.max_pool1d(x[:, :2], 3, 2, 1), x[:, 2:, ::2]], 1)),
    "by-keyword": Function(lambda x: F.avg_pool1d(input=x, kernel_size=(2,), stride=(1,))),
}


@pytest.mark.parametrize("training", thinned([True, False], bool))
@pytest.mark.parametrize("name", LAYERS)
def test_positions_of_one_dimension(name, training):
    model = in_between(copy.deepcopy(LAYERS[name])).train(training)
    x = torch.randn(4, 3, 23, dtype=torch.float64) * 2 + 1
    assert_masked(model, x, lengths=LENGTHS)


def assert_masked(model, x, dim=None, **given):
    def padded(model, x):
        with nk.masked(model, dim=dim, **given):
            return model(x)

    where = -1 if dim is None else dim
    examples = [one.unsqueeze(0).narrow(where, 0, n) for one, n in zip(x, LENGTHS, strict=True)]
    assert_as_unpadded(model, x, examples, padded)


MAPS = {
    "conv": nn.Conv2d(4, 4, (3, 5), stride=(2, 3), padding=(1, 2)),
    "conv-same": nn.Conv2d(4, 4, (2, 4), padding="same"),
    "transposed": nn.ConvTranspose2d(4, 4, (3, 2), stride=(3, 2), padding=(1, 0)),
    "max": nn.MaxPool2d((2, 3), padding=(1, 1), ceil_mode=True),
    "average": nn.AvgPool2d((3, 2), padding=1, count_include_pad=False),
    "average-divided": nn.AvgPool2d((3, 2), ceil_mode=True, divisor_override=5),
    "whole": nn.AdaptiveAvgPool2d(1),
    "whole-max": nn.AdaptiveMaxPool2d((1, 1)),
    "upsample": nn.Upsample(scale_factor=(2.0, 3.0)),
    "pad": nn.ZeroPad2d((1, 2, 3, 0)),
}


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("name", MAPS)
def test_one_dimension_of_maps(name, dim):
    x = torch.randn(4, 3, 8, 23, dtype=torch.float64) * 2 + 1
    assert_masked(in_between(copy.deepcopy(MAPS[name]), rank=2), x.movedim(-1, dim), dim=dim, lengths=LENGTHS)


@pytest.mark.parametrize("training", thinned([True, False], bool))
@pytest.mark.parametrize("name", [*MAPS, "whole-one-way"])
def test_both_dimensions_of_maps(name, training):
    """Examples of a height and width of their own, each in the corner of a larger map."""
    sizes = [(9, 23), (14, 12), (11, 17), (8, 10)]
    layer = nn.AdaptiveAvgPool2d((None, 1)) if name == "whole-one-way" else copy.deepcopy(MAPS[name])
    x, mask = torch.randn(4, 3, 14, 23, dtype=torch.float64) * 2 + 1, torch.zeros(4, 14, 23, dtype=torch.bool)
    for i, (height, width) in enumerate(sizes):
        mask[i, :height, :width] = True

    def padded(model, x):
        with nk.masked(model, mask):
            return model(x)

    examples = [x[i : i + 1, :, :height, :width] for i, (height, width) in enumerate(sizes)]
    assert_as_unpadded(in_between(layer, rank=2).train(training), x, examples, padded)


def test_a_mask_of_any_form_where_positions_stay():
    """Padding before the example, and between its parts: these are what convolutions see beside them, zeros."""
    model = in_between(nn.Conv1d(4, 4, 3, padding=1, groups=2), nn.AvgPool1d(3, 1, 1))
    x = torch.randn(2, 3, 20, dtype=torch.float64) * 2 + 1
    parts = [(0, slice(4, 15)), (1, slice(1, 8)), (1, slice(12, 18))]
    mask = torch.zeros(2, 20, dtype=torch.bool)
    for i, part in parts:
        mask[i, part] = True
    twin = copy.deepcopy(model)
    with nk.masked(model, mask):
        y = model(x)
    expected = run_unpadded(twin, [x[i : i + 1, :, part] for i, part in parts], lambda model, one: model(one))
    for (i, part), one in zip(parts, expected, strict=True):
        torch.testing.assert_close(y[i : i + 1, :, part], one, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(list(model.buffers()), list(twin.buffers()), rtol=1e-10, atol=1e-10)


def test_an_example_without_real_positions_changes_no_other():
    model, x = in_between(nn.MaxPool1d(3, 2, 1), nn.Conv1d(4, 4, 3, padding=2)), torch.randn(5, 3, 23).double()
    twin = copy.deepcopy(model)
    with nk.masked(model, lengths=[23, 12, 0, 17, 9]):
        y = model(x)
    with nk.masked(twin, lengths=LENGTHS):
        expected = twin(x[[0, 1, 3, 4]])
    assert y.isfinite().all()
    torch.testing.assert_close(y[[0, 1, 3, 4]], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(list(model.buffers()), list(twin.buffers()), rtol=1e-10, atol=1e-10)


REFUSED = {
    "reflected": (nn.Conv1d(4, 4, 3, padding=1, padding_mode="reflect"), r'3 \(Conv1d\): .*pad\(mode="reflect"\)'),
    "interpolated": (nn.Upsample(scale_factor=2, mode="linear"), r"3 \(Upsample\): .*interpolate"),
    "of-a-size": (nn.Upsample(size=11), "3 .*interpolate: what it computes at the end"),
    "adaptive": (nn.AdaptiveAvgPool1d(5), "3 .*adaptive_avg_pool1d"),
    "lp": (nn.LPPool1d(2, 2), "3 .*lp_pool1d"),
    "average": (nn.AvgPool1d(3, 2, 1, ceil_mode=True), "ceil_mode=True that counts its padding"),
}


@pytest.mark.parametrize(("layer", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_followed_is_refused(layer, message):
    model = in_between(copy.deepcopy(layer))
    with pytest.raises(nk.UnsupportedError, match=message), nk.masked(model, lengths=LENGTHS):
        model(torch.randn(4, 3, 23).double())


def test_a_mask_of_any_form_is_not_guessed_where_positions_move():
    model, mask = in_between(nn.Conv1d(4, 4, 3, stride=2)), torch.ones(4, 23, dtype=torch.bool)
    mask[:, 0] = False
    with pytest.raises(nk.UnsupportedError, match=r"3 \(Conv1d\).*not the first of each"), nk.masked(model, mask):
        model(torch.randn(4, 3, 23).double())


def test_a_length_that_was_reached_in_two_ways():
    """Halved, and doubled again: odd lengths have lost a position, and only the tensor says which is meant."""
    halved = nn.Sequential(nn.MaxPool1d(2), nn.Upsample(scale_factor=2))
    x = torch.randn(4, 3, 24).double() * 2 + 1
    assert_masked(in_between(halved), x, lengths=LENGTHS)
    model = in_between(Function(lambda x: x + halved(x)))
    with (
        pytest.raises(nk.ShapeError, match=r"4 \(BatchNorm1d\).*24.* reached in 2 ways"),
        nk.masked(model, lengths=LENGTHS),
    ):
        model(x)
