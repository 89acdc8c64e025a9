"""What is a norm's and what is not, whatever it is called."""

import pytest
import torch
from torch import nn

import normkit as nk
from support.networks import built_by_others


def test_the_parts_are_the_whole():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Linear(4, 4), nk.RMSNorm(4)))
    norms, rest = nk.split_state(model)
    assert list(norms) == [
        *("1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked", "2.1.weight")
    ]
    assert not norms.keys() & rest.keys()
    whole = model.state_dict()
    assert (norms | rest).keys() == whole.keys()
    assert all(value.data_ptr() == whole[key].data_ptr() for key, value in (norms | rest).items())


def test_a_round_that_keeps_norms_local():
    torch.manual_seed(0)
    client, server = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)) for _ in range(2))
    client(torch.randn(8, 4))
    mean = client[1].running_mean.clone()
    _, received = nk.split_state(server)
    norms, _ = nk.split_state(client)
    client.load_state_dict(norms | received)
    assert torch.equal(client[0].weight, server[0].weight)
    assert torch.equal(client[1].running_mean, mean)


def test_a_norm_alone_a_shared_one_and_one_that_nobody_knows():
    assert list(nk.split_state(nn.BatchNorm1d(2))[0]) == list(nn.BatchNorm1d(2).state_dict())

    class StrangeNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(3))

    shared = nn.LayerNorm(3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(3, 3)), "c": StrangeNorm()})
    assert set(nk.split_state(model)[1]) == {"b.1.weight", "b.1.bias"}


def must_agree_with_types(model):
    """Compare with the types of torch's norms; those of libraries are called norms by their classes."""
    norms, rest = nk.split_state(model)
    kinds = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
    expected = {
        f"{name}.{key}"
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, kinds) or type(layer).__name__.endswith(("RMSNorm", "LayerNorm"))
        for key in layer.state_dict()
    }
    assert set(norms) == expected
    assert norms.keys() | rest.keys() == model.state_dict().keys()


@built_by_others
def test_networks_of_others(build):
    must_agree_with_types(build())


def test_names_do_not_matter():
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
    model = transformers.ResNetModel(config)
    norms, _ = nk.split_state(model)
    found = {key.rpartition(".")[0] for key in norms}
    assert len(found) == sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()) > 0
    assert not any("bn" in key for key in model.state_dict())  # what the usual filter looks for


@pytest.mark.parametrize("given", [{"weight": torch.ones(1)}, 3])
def test_anything_but_a_model_is_refused(given):
    with pytest.raises(nk.ArgumentError, match=r"split_state needs a torch\.nn\.Module; got a"):
        nk.split_state(given)
