"""Watching a model run: the operators it calls, who makes and reads what, and that the model does not notice."""

from itertools import groupby

import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from normkit.surgery.fold.dataflow import memory_of, record
from normkit.surgery.fold.hosts import hosts, overlap
from normkit.surgery.fold.routes import NOTHING, Route


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 4, 3), nk.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        y = self.bn(self.conv(x))
        self.seen = y.detach()
        return self.head(y.relu_().mean((2, 3)))


def recorded(model, x):
    return record(model, {"bn": model.bn} if hasattr(model, "bn") else {}, x)


def test_events_in_their_order_and_place():
    flow = recorded(Net().eval(), torch.randn(2, 3, 5, 5))
    assert [name for name, _ in groupby(map(str, flow.events))] == [  # torch 2.9 detaches twice
        "convolution in conv",
        "bn",
        "detach",
        "relu_",
        "mean",
        "t in head",
        "addmm in head",
    ]
    assert [event.index for event in flow.calls("bn")] == [1]


def test_who_makes_and_who_reads():
    flow = recorded(Net().eval(), torch.randn(2, 3, 5, 5))
    conv, bn, *detached, relu, mean, _, _ = flow.events
    assert flow.maker(bn.inputs[0]) is conv
    assert flow.maker(conv.inputs[0]) is None
    assert flow.readers(conv.outputs[0]) == [bn]
    assert flow.readers(bn.outputs[0]) == [*detached, relu, mean]
    assert {str(event) for event in detached} == {"detach"}
    assert [memory_of(tensor) for tensor in relu.written] == [memory_of(bn.outputs[0])]
    assert flow.kept[memory_of(bn.outputs[0])] == ""
    assert flow.given_by[memory_of(conv.outputs[0])] == {"conv"}
    assert flow.given_out == {memory_of(flow.events[-1].outputs[0])}


def test_results_are_copies_from_before_they_are_overwritten():
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 3, 5, 5)
    flow = recorded(model, x)
    with torch.no_grad():
        expected = model.bn(model.conv(x))
    ((normalized,),) = flow.results["bn"]
    assert (normalized < 0).any()
    torch.testing.assert_close(normalized, expected)
    torch.testing.assert_close(flow.outputs[0], model(x).detach())


def test_the_model_does_not_notice():
    model = Net().train()
    model.conv.register_forward_hook(lambda *_: None)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    recorded(model, torch.ones(2, 3, 5, 5))
    assert not hasattr(model, "seen")
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    assert all(layer.training for layer in model.modules())
    assert len(model.conv._forward_hooks) == 1
    assert not model.bn._forward_hooks
    assert not model.bn._forward_pre_hooks
    assert torch.equal(random, torch.get_rng_state())


def test_hosts_are_found_by_what_their_operator_multiplies():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv1d(3, 4, 1), nn.Linear(4, 5)
            self.matrix = nn.Parameter(torch.randn(5, 6))
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 2))

        def forward(self, x):
            x = self.linear(self.conv(x).transpose(1, 2))  # with gaps in memory: the bias is added afterwards
            return self.normed(x @ self.matrix) * (x @ x.mT).mean()

    model = Several().eval()
    found = hosts(model, recorded(model, torch.randn(2, 3, 7)))
    assert [(host.name, host.bias is not None, host.obstacle) for host in found] == [
        ("conv", True, None),
        ("linear", True, None),
        ("the model itself", False, None),
    ]
    assert found[1].bias is model.linear.bias


def test_labels_follow_values():
    class Moves(nn.Module):
        def forward(self, x):
            y = F.pixel_shuffle(x * 1, 2)
            y = F.pad(y, (1, 0)).flip(1)
            return torch.cat([y, torch.ones_like(y)], 1)

    x = torch.randn(2, 8, 3, 3)
    flow = recorded(Moves(), x)
    first, *rest = flow.events
    (labels,) = Route(rest, [(first.outputs[0], 1)], [flow.events[-1].outputs[0]]).channels()
    assert labels.shape == (2, 4, 6, 7)
    assert (labels[:, :, :, 0] == NOTHING).all()
    assert (labels[:, 2:] == NOTHING).all()
    expected = F.pixel_shuffle(torch.arange(8.0).reshape(1, 8, 1, 1).expand(2, 8, 3, 3), 2).flip(1)
    assert torch.equal(labels[:, :2, :, 1:], expected.long())


def test_memory_in_common():
    flat = torch.zeros(20)
    assert overlap(flat[:10], flat[5:])
    assert not overlap(flat[:10], flat[10:])
    assert not overlap(flat[:10], torch.zeros(10))
    assert overlap(flat.reshape(4, 5).t(), flat[19:])
