"""What a state_dict forgets is in the manifest, for every norm there is."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.errors import ArgumentError
from normkit.surgery.checkpoint.manifest import FORMAT, differences, manifest
from support.cases import CASES
from support.look_alikes import Gemma, Llama


class Net(nn.Module):
    def __init__(self, eps=0.02, momentum=0.3, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = norm(8, eps=eps, momentum=momentum)
        self.blocks = [nn.BatchNorm1d(4, momentum=None, affine=False)]  # where torch does not look
        self.group = nn.GroupNorm(2, 8, eps=0.5)
        self.again = self.group


def test_what_is_in_it():
    model = Net()
    model.bn.eval()
    model.bn.num_batches_tracked.fill_(17)
    found = manifest(model)
    assert found["format"] == FORMAT
    assert found["normkit"] == nk.__version__
    assert found["torch"] == torch.__version__
    assert found["model"].endswith(".Net")
    by_hand = 8 * 3 * 9 + 8 + 2 * 8 + 2 * 8
    assert found["counts"] == {"layers": 5, "parameters": by_hand, "norms": 3}
    assert list(found["norms"]) == ["bn", "group", "blocks[0]"]
    bn = found["norms"]["bn"]
    assert bn["class"] == "torch.nn.modules.batchnorm.BatchNorm2d"
    expected = {
        "kind": "batch",
        "eps": 0.02,
        "momentum": 0.3,
        "mode": "eval",
        "uses": "stored",
        "scope": "local",
        "updates": "ema",
        "affine": True,
        "num_features": 8,
        "num_groups": None,
        "activation": None,
        "num_batches_tracked": 17,
    }
    assert {name: bn[name] for name in expected} == expected
    assert found["norms"]["group"]["num_groups"] == 2
    hidden = found["norms"]["blocks[0]"]
    assert (hidden["updates"], hidden["momentum"], hidden["affine"], hidden["mode"]) == (
        "cumulative",
        None,
        False,
        "train",
    )


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layer_survives_json_and_is_itself(case, training):
    model = nn.Sequential(case.layer(training=training))
    found = manifest(model)
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again == found
    assert differences(again, manifest(model)) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda net: setattr(net.bn, "eps", 1e-5), ("bn", "eps", 0.02, 1e-5)),
        (lambda net: setattr(net.bn, "eps", math.nextafter(0.02, 1)), ("bn", "eps", 0.02, math.nextafter(0.02, 1))),
        (lambda net: setattr(net.bn, "momentum", 0.1), ("bn", "momentum", 0.3, 0.1)),
        (lambda net: net.bn.eval(), ("bn", "mode", "train", "eval")),
        (lambda net: setattr(net, "bn", nn.Identity()), ("bn", "norm", "BatchNorm2d", None)),
        (lambda net: setattr(net.blocks[0], "eps", 0.1), ("blocks[0]", "eps", 1e-5, 0.1)),
        (lambda net: setattr(net.group, "num_groups", 4), ("group", "num_groups", 2, 4)),
        (
            lambda net: setattr(net, "bn", nk.BatchNorm2d(8, eps=0.02, momentum=0.3, activation="relu")),
            ("bn", "activation", None, "relu"),
        ),
        (
            lambda net: setattr(net, "bn", nk.BatchNorm2d(8, eps=0.02, momentum=0.3, affine="scale")),
            ("bn", "affine", True, "scale"),
        ),
        (
            lambda net: setattr(net, "bn", nk.SyncBatchNorm(8, eps=0.02, momentum=0.3)),
            ("bn", "scope", "local", "synced"),
        ),
        (
            lambda net: setattr(net, "bn", nk.BatchRenorm2d(8, eps=0.02, momentum=0.3)),
            ("bn", "kind", "batch", "renorm"),
        ),
    ],
)
def test_each_difference_is_told(change, what):
    saved, net = manifest(Net()), Net()
    change(net)
    assert differences(saved, manifest(net)) == [what]


def test_modes_that_make_no_difference_are_none():
    within = nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nk.FrozenBatchNorm1d(4))
    saved = manifest(within.train())
    assert differences(saved, manifest(within.eval())) == []
    assert saved["norms"]["0"]["mode"] == "train"


@pytest.mark.parametrize("mine", [nk.BatchNorm2d, nn.BatchNorm2d])
@pytest.mark.parametrize("theirs", [nk.BatchNorm2d, nn.BatchNorm2d])
def test_torchs_layer_and_ours_are_the_same(mine, theirs):
    assert differences(manifest(Net(norm=mine)), manifest(Net(norm=theirs))) == []


def test_options_that_no_spec_has():
    def found(mine, theirs):
        return [tuple(difference) for difference in differences(manifest(mine), manifest(theirs))]

    ghosts = nk.GhostBatchNorm2d(4, chunk_size=8), nk.GhostBatchNorm2d(4, chunk_size=16)
    assert found(*ghosts) == [("", "chunk_size", 8, 16)]
    responses = nn.LocalResponseNorm(5, alpha=1e-3), nn.LocalResponseNorm(5, alpha=1e-4)
    assert found(*responses) == [("", "alpha", 1e-3, 1e-4)]
    shapes = nn.LayerNorm(4, elementwise_affine=False), nn.LayerNorm((3, 4), elementwise_affine=False)
    assert found(*shapes) == [("", "normalized_shape", [4], [3, 4])]
    unbounded = nk.BatchRenorm2d(4, r_max=math.inf), nk.BatchRenorm2d(4)
    assert found(*unbounded) == [("", "r_max", "inf", 3.0)]
    json.dumps(manifest(unbounded[0]), allow_nan=False)
    careful = nk.BatchNorm2d(4), nk.BatchNorm2d(4, nonfinite="raise")
    assert found(*careful) == []


class Louder(nn.BatchNorm2d):
    def forward(self, input):
        return 2 * super().forward(input)


def test_a_class_that_may_do_more_is_compared_by_name():
    (difference,) = differences(manifest(nn.BatchNorm2d(4)), manifest(Louder(4)))
    assert difference == ("", "class", "BatchNorm2d", "Louder")
    assert str(difference) == "the model itself: class is BatchNorm2d in the file, Louder in the model"
    assert differences(manifest(Louder(4)), manifest(Louder(4))) == []


class ForeignRMSNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.variance_epsilon = eps


def test_norms_that_describe_does_not_know():
    mine, theirs = (nn.Sequential(nn.Linear(3, 3), ForeignRMSNorm(3, eps)) for eps in (1e-6, 1e-5))
    found = json.loads(json.dumps(manifest(mine)))
    assert found["norms"] == {}
    assert found["unknown"]["1"]["options"] == {"variance_epsilon": 1e-6}
    assert differences(found, manifest(theirs)) == [("1", "variance_epsilon", 1e-6, 1e-5)]
    assert differences(found, manifest(mine)) == []
    del found["unknown"]
    assert differences(found, manifest(theirs)) == []


def test_norms_that_others_wrote():
    mine, theirs = (nn.Sequential(nn.Linear(3, 3), Llama(3, eps)) for eps in (1e-6, 1e-5))
    found = json.loads(json.dumps(manifest(mine)))
    entry = found["norms"]["1"]
    assert (entry["kind"], entry["eps"], entry["normalized_shape"], entry["exact"]) == ("rms", 1e-6, [3], False)
    assert found["unknown"] == {}
    assert differences(found, manifest(mine)) == []
    assert differences(found, manifest(theirs)) == [("1", "eps", 1e-6, 1e-5), ("1", "variance_epsilon", 1e-6, 1e-5)]
    plus = nn.Sequential(nn.Linear(3, 3), Gemma(3))
    assert ("1", "weight_offset", 0.0, 1.0) in differences(found, manifest(plus))


class RMSNorm(Llama):
    """A norm by its name too."""


def test_a_norm_that_is_known_on_one_side_only():
    """A file of a version that did not know it, or a model on the meta device, where it cannot be tried."""
    mine, theirs = (nn.Sequential(RMSNorm(3, eps)) for eps in (1e-6, 1e-5))
    for other in (mine, theirs):
        meta = manifest(copy.deepcopy(other).to("meta"))
        assert list(meta["unknown"]) == ["0"]
        expected = [] if other is mine else [("0", "variance_epsilon", 1e-6, 1e-5)]
        assert differences(manifest(mine), meta) == expected
        assert [d._replace(saved=d.here, here=d.saved) for d in differences(meta, manifest(mine))] == expected


def test_a_file_without_the_sizes_of_layer_norms():
    found = manifest(nn.LayerNorm(4))
    for name in ("normalized_shape", "channels_first", "weight_offset", "names"):
        del found["norms"][""][name]
    assert differences(found, manifest(nn.LayerNorm(4))) == []


def test_lazy_and_meta_layers_are_described():
    found = manifest(nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(eps=0.1), nn.BatchNorm2d(4, device="meta")))
    assert found["norms"]["1"]["eps"] == 0.1
    assert found["norms"]["2"]["num_batches_tracked"] is None
    assert found["counts"]["parameters"] == 8


def test_what_is_no_model_is_refused():
    with pytest.raises(ArgumentError, match=r"model must be a torch\.nn\.Module; got a dict"):
        manifest({})
