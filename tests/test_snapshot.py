"""What a snapshot puts back: values, classes, modes, hooks, gradients and random states, as the same objects."""

import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import fx, nn

from normkit.snapshot import Snapshot, same_random_state, untouched


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
        self.listed = [nn.BatchNorm2d(3)]
        self.seen = []
        self.plain = torch.randn(3)

    def forward(self, x):
        self.seen.append(x.shape)
        return self.listed[0](self.body(x))


def trained():
    model = Net()
    model.body[0].weight.requires_grad_(False)
    model(torch.randn(4, 2, 6, 6)).square().mean().backward()
    return model


def state(model):
    hidden = model.listed[0].state_dict()
    tensors = {**model.state_dict(), **{f"listed.{key}": value for key, value in hidden.items()}, "plain": model.plain}
    return {key: value.detach().clone() for key, value in tensors.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def wreck(model):
    """Change everything that can be."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers(), *model.listed[0].parameters(), model.plain):
            tensor.add_(1)
    model.listed[0].running_mean.add_(1)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(not parameter.requires_grad)
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    model.body[1].__class__ = nn.Identity
    model.body[1].eps = 7
    model.body[2] = nn.Tanh()
    model.body.append(nn.Identity())
    model.new = nn.Linear(1, 1)
    model.seen.clear()
    model.body[0].register_forward_hook(lambda *_: None)
    model.listed.append(nn.Identity())


def test_everything_comes_back_bit_for_bit():
    model = trained()
    before, repr_before = state(model), repr(model)
    modes = [(module, module.training) for module in model.modules()]
    wants = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
    attributes = set(vars(model))
    snapshot = Snapshot(model)
    wreck(model)
    assert not equal(before, state(model))
    snapshot.restore()
    assert equal(before, state(model))
    assert repr(model) == repr_before
    assert [(module, module.training) for module in model.modules()] == modes
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wants
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name]
        assert values[name] is None or torch.equal(parameter.grad, values[name])
    assert set(vars(model)) == attributes
    assert model.seen == [torch.Size([4, 2, 6, 6])]
    assert len(model.listed) == 1
    assert not model.body[0]._forward_hooks


def test_parameters_and_handles_are_the_same_objects_afterwards():
    model, calls = trained(), []
    handle = model.body[1].register_forward_hook(lambda *_: calls.append(1))
    parameters = list(model.parameters())
    snapshot = Snapshot(model)
    handle.remove()
    model.double()
    snapshot.restore()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert parameters[0].dtype == torch.float32
    model(torch.randn(4, 2, 6, 6))
    assert calls == [1]
    handle.remove()
    model(torch.randn(4, 2, 6, 6))
    assert calls == [1]


def test_what_was_not_written_is_not_written_back():
    model = trained()
    model.body[1].running_mean[0] = float("nan")  # is the same as itself
    output = model.eval()(torch.randn(2, 2, 6, 6))
    versions = [buffer._version for buffer in model.buffers()]
    Snapshot(model).restore()
    assert [buffer._version for buffer in model.buffers()] == versions
    output.sum().backward()


def test_values_come_back_where_others_look_at_them():
    model = trained()
    view = model.body[0].weight.detach()[0]
    before, snapshot = view.clone(), Snapshot(model)
    with torch.no_grad():
        model.body[0].weight.zero_()
    snapshot.restore()
    assert torch.equal(view, before)


def test_lazy_layers_and_those_without_values_can_be_kept():
    model = nn.Sequential(nn.LazyConv2d(3, 1), nn.LazyBatchNorm2d(), nn.BatchNorm2d(3, device="meta"))
    with untouched(model):
        model.eval()
    assert isinstance(model[0], nn.LazyConv2d)
    assert model[2].training


def test_untouched_also_when_something_fails():
    model = trained()
    before, states = state(model), (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())

    def fail():
        with untouched(model):
            wreck(model)
            torch.rand(3), np.random.rand(3), random.random()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert equal(before, state(model))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]


def test_what_containers_hold_is_put_back_at_any_depth():
    model = nn.BatchNorm1d(3)
    model.nested = {"sizes": [[1], (deque([2], maxlen=3), torch.ones(2))]}
    sizes, queue, tensor = model.nested["sizes"], model.nested["sizes"][1][0], model.nested["sizes"][1][1]
    with untouched(model):
        sizes[0].append(5)
        queue.extend([7, 8, 9])
        tensor.zero_()
        sizes.append(3)
    assert model.nested["sizes"] is sizes
    assert sizes[0] == [1]
    assert (len(sizes), list(queue), queue.maxlen) == (2, [2], 3)
    assert torch.equal(tensor, torch.ones(2))


def test_a_container_that_refuses_changes_is_left_alone():
    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    graph.arguments = fx.immutable_collections.immutable_list([1, 2])
    with untouched(graph):
        graph.eval()
    assert graph.training
    assert graph.arguments == [1, 2]


def test_the_random_state_is_put_back():
    with same_random_state():
        first = torch.rand(3), np.random.rand(), random.random()
    assert torch.equal(torch.rand(3), first[0])
    assert (np.random.rand(), random.random()) == first[1:]
