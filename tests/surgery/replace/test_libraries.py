"""Networks of timm whose norms are its own: each norm becomes ours and comes back, or is named with the reason."""

import pytest
import torch

import normkit as nk
from support.foreign_norms import picture, randomized, same_picture

pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("ignore")]  # of timm

# By network, the sizes that make it small, how many norms are taken, and the class that most of them become.
NETWORKS = {
    "vit_tiny_patch16_224": ({"img_size": 32, "depth": 2}, 5, nk.LayerNorm),
    "convnext_atto": ({"depths": (1, 1, 1, 1)}, 9, nk.LayerNorm2d),
}


@pytest.fixture
def timm():
    from support import aside  # noqa: F401  # where timm is

    return pytest.importorskip("timm")


@pytest.mark.parametrize("name", NETWORKS)
def test_layer_norms_become_ours_and_come_back(timm, name):
    options, taken, kind = NETWORKS[name]
    model, x = randomized(timm.create_model(name, **options)).eval(), torch.randn(2, 3, 32, 32)
    before = picture(model)
    done = nk.convert(model, "layer", x, inplace=True)
    assert (len(done.changed), done.skipped) == (taken, []), str(done)
    assert sum(type(layer) is kind for layer in model.modules()) > taken / 2
    assert done.parity.max_rel <= 1e-5
    assert done.undo() is model
    assert same_picture(before, picture(model))


def layouts(model, x):
    """The strides of what every layer that has no parts returns, by name."""
    found = {}
    for name, layer in model.named_modules():
        if not [*layer.children()]:
            layer.register_forward_hook(lambda layer, given, y, name=name: found.update({name: y.stride()}))
    model(x)
    return found


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("name", "kind"), [("convnext_atto", "layer"), ("poolformerv2_s12", "layer")])
def test_converted_norms_hand_on_the_layouts_that_convolutions_read(timm, name, kind, training):
    """With other layouts a training step took half as long again."""
    model, x = timm.create_model(name).train(training), torch.randn(2, 3, 64, 64)
    done = nk.convert(model, kind)
    assert any(type(layer) is nk.LayerNorm2d for layer in done.model.modules())
    with torch.no_grad():
        assert layouts(done.model, x) == layouts(model, x)


def test_group_norms_that_end_in_an_activation(timm):
    model, x = randomized(timm.create_model("test_efficientnet_gn")).eval(), torch.randn(2, 3, 64, 64)
    before = picture(model)
    done = nk.convert(model, "group", x, inplace=True)
    assert (len(done.changed), done.skipped) == (13, [])
    assert done.parity.max_rel <= 1e-5
    done.undo()
    assert same_picture(before, picture(model))


@pytest.mark.parametrize("kind", ["batch", "evo-s0"])
def test_evo_norms_of_others_are_named(timm, kind):
    model = randomized(timm.create_model("test_efficientnet_evos")).eval()
    before = picture(model)
    done = nk.convert(model, kind, inplace=True)
    assert not done.changed
    assert {skipped.why for skipped in done.skipped} == {"is not a norm we know"}
    assert {skipped.what for skipped in done.skipped} == {"EvoNorm2dS0"}
    assert same_picture(before, picture(model))
