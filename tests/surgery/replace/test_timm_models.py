"""timm's own models: no norm is left behind because of the activation it ends in."""

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from support import aside  # noqa: F401  # where timm is

pytestmark = pytest.mark.deep

# With ReLU6, Hardswish, and ReLU6 in another family; the number of norms of each.
NETWORKS = {"mobilenetv2_050": 52, "mobilenetv3_small_050": 34, "tf_efficientnet_lite0": 49}


def network(name):
    from timm import create_model

    torch.manual_seed(0)
    model = create_model(name, num_classes=3)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.running_mean.normal_(0, 0.1)
                layer.running_var.uniform_(0.5, 2.0)
                layer.weight.uniform_(0.5, 1.5)
                layer.bias.normal_(0, 0.1)
    return model


@pytest.fixture(params=NETWORKS)
def model(request):
    return request.param, network(request.param)


def test_every_norm_is_taken(model):
    name, model = model
    x = torch.randn(2, 3, 64, 64)
    synced = nk.convert(model.eval(), "sync", x)
    assert (len(synced.changed), synced.skipped) == (NETWORKS[name], [])
    assert synced.parity.max_rel < 1e-4
    frozen = nk.freeze(model, example=x)
    assert (len(frozen.changed), frozen.skipped) == (NETWORKS[name], [])
    assert frozen.parity.max_rel < 1e-4
    assert not [m for m in frozen.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    torchs = nk.convert(model, classes="torch", example=x)
    assert torchs.skipped == [] or {skip.why for skip in torchs.skipped} == {"is torch's own already"}
    assert torchs.parity.max_rel < 1e-5


def test_our_layers_in_timms_converter(model):
    """They keep their function, or are refused: timm's own converter knows timm's activations only."""
    from timm.layers import convert_sync_batchnorm

    _, model = model
    ours = nk.convert(model.eval(), "batch").model
    with pytest.raises(
        nk.UnsupportedError, match=r"nk\.convert\(model, \"sync\"\)"
    ):  # by the layer, or by normkit.timm
        convert_sync_batchnorm(copy.deepcopy(ours))


def test_statistics_verbs_do_not_care(model):
    _, model = model
    batches = [torch.randn(4, 3, 64, 64) for _ in range(2)]
    assert nk.recalibrate(model.eval(), batches).skipped == []
    before = copy.deepcopy(model.train().state_dict())
    with nk.no_updates(model):
        model(batches[0])
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
