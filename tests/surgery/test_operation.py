"""An operation works on a copy unless it is asked for in place, and an error leaves the model unchanged."""

import copy
import threading

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.named_layers import named_layers
from normkit.surgery.operation import CopyError, Skip, become, operation

X = torch.randn(3, 4, 5, 5)


def net():
    shared = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(4, 4, 1), shared, nn.ReLU(), shared)


def operate(model, inplace):
    with operation(model, inplace) as op:
        before = op.trace(X)
        for name, layer in named_layers(op.model):
            if isinstance(layer, nn.BatchNorm2d):
                become(layer, nn.Tanh())
                op.change(name, "BatchNorm2d -> Tanh", "for the test")
            elif isinstance(layer, nn.ReLU):
                op.skip(name, "ReLU", "is none")
        return op.result(before, X)


def test_a_copy_is_changed_and_the_model_is_not():
    model = net()
    done = operate(model, inplace=False)
    assert done.model is not model
    assert isinstance(model[1], nn.BatchNorm2d)
    assert isinstance(done.model[1], nn.Tanh)
    assert done.model[3] is done.model[1]  # still shared
    assert done.undo() is model


def test_in_place_the_model_is_changed_and_put_back():
    model = net()
    state = copy.deepcopy(model.state_dict())
    done = operate(model, inplace=True)
    assert done.model is model
    assert isinstance(model[3], nn.Tanh)
    assert done.undo() is model
    assert isinstance(model[3], nn.BatchNorm2d)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_skip_ends_its_block_alone_and_is_recorded_with_its_reason():
    with operation(net(), inplace=False) as op:
        with op.attempt("1", "BatchNorm2d"):
            raise Skip("has no size yet")
        with op.attempt("3", "BatchNorm2d"):
            op.change("3", "BatchNorm2d", "can be done")
        done = op.result()
    assert done.skipped == [("1", "BatchNorm2d", "has no size yet")]
    assert done.changed == [("3", "BatchNorm2d", "can be done")]


def test_changes_and_parity_are_reported():
    done = operate(net(), inplace=False)
    assert done.changed == [("1", "BatchNorm2d -> Tanh", "for the test")]
    assert done.skipped == [("2", "ReLU", "is none")]
    assert done.parity.first_layer == "1"
    assert str(done).splitlines()[0] == "changed 1, skipped 1"
    assert "first at 1)" in str(done)


@pytest.mark.parametrize("inplace", [True, False])
def test_an_error_leaves_everything_as_it_was(inplace):
    model = net()
    before, random_state = repr(model), torch.get_rng_state()

    def fail():
        with operation(model, inplace) as op:
            become(op.model[1], nn.Tanh())
            torch.rand(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert repr(model) == before
    assert torch.equal(random_state, torch.get_rng_state())


def test_the_model_itself_can_become_another():
    model = nn.BatchNorm2d(4)
    done = operate(model, inplace=True)
    assert type(model) is nn.Tanh
    assert done.undo() is model
    assert type(model) is nn.BatchNorm2d


def test_hooks_and_mode_survive_becoming_another():
    layer, calls = nn.BatchNorm2d(4).eval(), []
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    become(layer, nn.ReLU())
    layer(X)
    handle.remove()
    layer(X)
    assert calls == [1]
    assert not layer.training


def test_what_cannot_be_copied_says_what_to_do():
    model = net()
    model.lock = threading.Lock()
    with pytest.raises(CopyError, match=r"cannot be copied: TypeError: .* Pass inplace=True"):
        operate(model, inplace=False)
    assert operate(model, inplace=True).changed


def test_only_modules_are_operated_on():
    with pytest.raises(nk.ArgumentError, match=r"must be a torch\.nn\.Module; got a function"):
        operate(lambda x: x, inplace=False)
