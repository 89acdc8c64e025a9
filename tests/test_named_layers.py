"""Every layer is found once, also those that torch does not find."""

from torch import nn

from normkit.named_layers import display_name, named_layers


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.known = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.again = self.known
        self.blocks = [nn.BatchNorm1d(2), (nn.Identity(), {"a": nn.Sequential(nn.BatchNorm1d(3))})]
        self.alias = {"same": self.known, "numbers": [1, 2]}
        self.blocks[0].inner = [nn.Dropout()]


def test_registered_layers_have_torchs_names_and_order():
    model = Hidden()
    assert list(named_layers(model))[:4] == list(model.named_modules())


def test_layers_in_plain_containers_come_once_under_their_paths():
    hidden = [name for name, _ in named_layers(Hidden())][4:]
    assert hidden == ["blocks[0]", "blocks[1][0]", "blocks[1][1]['a']", "blocks[1][1]['a'].0", "blocks[0].inner[0]"]


def test_a_model_that_is_one_layer():
    layer = nn.BatchNorm2d(3)
    assert list(named_layers(layer)) == [("", layer)]
    assert display_name("") == "the model itself"
    assert display_name("block.bn") == "block.bn"
