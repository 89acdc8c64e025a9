"""One call: what it says, what it leaves as it was, and what it refuses."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import normkit as nk
from support.depth import thinned
from support.foreign_norms import MeanMagnitudeNorm
from support.patients import cnn, healthy, images, mlp, rows, settled
from support.refusal import refused


class Remembering(nn.Module):
    """Has everything that an examination could change, and changes some of it in every forward."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.body, self.fails_at, self.calls = cnn(), fails_at, 0
        self.seen, self.nested = [], {"sizes": [[]]}
        self.register_buffer("count", torch.zeros(()))
        self.body[2].extra_repr = lambda: "patched"

    def forward(self, x):
        self.calls += 1
        if self.fails_at is not None and self.calls > self.fails_at:
            raise ZeroDivisionError("one forward too many")
        self.seen.append(x.shape)
        self.nested["sizes"][0].append(len(x))
        self.count += 1
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        return self.body(x) + 0 * random.random() + 0 * np.random.rand()


def everything(model, optimizer, loader):
    """All that must be the same afterwards."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "values": {name: t.detach().clone() for name, t in tensors.items()},
        "versions": {name: t._version for name, t in model.body.named_buffers()},
        "objects": {name: id(t) for name, t in tensors.items()},
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "modes": [m.training for m in model.modules()],
        "hooks": [list(m._forward_hooks.items()) + list(m._forward_pre_hooks.items()) for m in model.modules()],
        "attributes": (model.calls, copy.deepcopy(model.seen), copy.deepcopy(model.nested), sorted(vars(model))),
        "patched": model.body[2].extra_repr,
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "switches": (
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
        ),
        "random": (torch.get_rng_state(), random.getstate(), str(np.random.get_state())),
        "loader": loader.generator.get_state(),
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("fails_at", thinned([None, 2, 7], lambda fails_at: fails_at != 2))
def test_everything_is_left_as_it_was_also_when_a_forward_raises(fails_at):
    model = Remembering()
    settled(model.body, images())
    data = TensorDataset(torch.randn(40, 3, 8, 8), torch.randint(4, (40,)))
    loader = DataLoader(data, batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    F.cross_entropy(model(data[:8][0]), data[:8][1]).backward()
    optimizer.step()
    model.body[3].weight.requires_grad_(False)
    model.body[4].eval()
    with torch.no_grad():
        model.body[1].running_mean.add_(3)  # so that there is a gap to share out
        model.body[1].weight[0] = 0
    model.body[0].register_forward_hook(lambda *_: None)
    model.fails_at = None if fails_at is None else model.calls + fails_at
    before = everything(model, optimizer, loader)
    if fails_at is None:
        nk.examine(model, loader, F.cross_entropy, optimizer)
    else:
        with pytest.raises(ZeroDivisionError, match="one forward too many"):
            nk.examine(model, loader, F.cross_entropy, optimizer)
    after = everything(model, optimizer, loader)
    for key in before:
        assert same(before[key], after[key]), key


def test_a_loader_in_use_goes_on_where_it_was():
    loader = DataLoader(TensorDataset(torch.randn(40, 6)), batch_size=8, shuffle=True)
    model = settled(mlp(), rows())

    def order(examined):
        torch.manual_seed(5)
        seen = []
        for i, (x,) in enumerate(loader):
            seen.append(x)
            if examined and i == 1:
                nk.examine(model, loader)
        return torch.cat(seen), torch.rand(3)

    torch.manual_seed(1)
    alone, watched = order(False), order(True)
    assert torch.equal(alone[0], watched[0])
    assert torch.equal(alone[1], watched[1])


def test_a_graph_that_waits_for_its_backward_can_still_have_it():
    model, (x, y) = settled(cnn(), images()).train(), images()[0]
    loss = F.cross_entropy(model(x), y)
    nk.examine(model, images(), F.cross_entropy)
    loss.backward()


def test_a_healthy_model_is_healthy():
    case = healthy()
    for mode in (True, False):
        case.model.train(mode)
        diagnosis = case.examine()
        assert diagnosis.findings == []
        assert diagnosis.ok
    gap = diagnosis.evidence["gap"]
    assert gap["measure"] == "loss"
    assert gap["evaluation"] == pytest.approx(gap["recalibrated"], rel=1e-4)


def test_the_evidence_is_plain_and_says_what_was_measured():
    case = healthy()
    evidence = case.examine().evidence
    assert evidence["batches"] == 4
    assert evidence["seconds"] > 0
    names = [layer["name"] for layer in evidence["layers"]]
    assert names == ["1", "4"]
    first = evidence["layers"][0]
    assert first["class"] == "BatchNorm2d"
    assert first["kind"] == "batch"
    torch.testing.assert_close(torch.tensor(first["stored_mean"]), case.model[1].running_mean)
    torch.testing.assert_close(torch.tensor(first["data_mean"]), case.model[1].running_mean, rtol=1e-4, atol=1e-5)


def test_outputs_are_compared_where_there_is_no_loss():
    case = healthy()
    del case.options["loss"]
    with torch.no_grad():
        case.model[1].running_mean.add_(2)
    diagnosis = case.examine()
    gap = diagnosis.evidence["gap"]
    assert (gap["measure"], gap["training"]) == ("distance", 0.0)
    assert gap["evaluation"] > 10 * gap["recalibrated"]
    assert diagnosis.findings[0].code == "NK102"
    assert diagnosis.findings[0].evidence["share"] > 0.9


class Named(nn.Module):
    """Takes two inputs by name, and returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, *, left, right):
        return {"out": self.body(left + right), "more": [right]}


def test_any_signature_and_any_output():
    batches = [{"left": torch.randn(16, 6), "right": torch.randn(16, 6)} for _ in range(3)]
    assert nk.examine(settled(Named(), batches), batches).ok
    with_forward = settled(mlp(), rows())
    boxed = [[x] for x, _ in rows()]
    assert nk.examine(with_forward, boxed, forward=lambda model, batch: model(batch[0]) * 2).ok


def test_an_iterator_is_used_once_and_a_spent_one_refused():
    model = settled(mlp(), rows())
    batches = iter(rows())
    assert nk.examine(model, batches).ok
    refused(lambda: nk.examine(model, batches), "no batches", "generator")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(6, 4)), "no norm layers"),
        (nn.Sequential(nn.Linear(6, 4), MeanMagnitudeNorm(4)), "1 (MeanMagnitudeNorm)"),
        (mlp().to("meta"), "meta device"),
        (nn.Sequential(nn.LazyLinear(4), nn.BatchNorm1d(4)), "has not been initialized"),
    ],
)
def test_what_cannot_be_examined_is_refused(model, words):
    refused(lambda: nk.examine(model, rows()), words)


def test_bad_arguments_are_refused():
    model = mlp()
    refused(lambda: nk.examine(lambda x: x, rows()), "torch.nn.Module")
    refused(lambda: nk.examine(model, rows(), loss=3), "loss must be a function")
    refused(lambda: nk.examine(model, rows(), optimizer=3), "optimizer")
    refused(lambda: nk.examine(model, rows(), forward=3), "forward must be a function")
    refused(lambda: nk.examine(model, rows()[0][0]), "Pass [batch]")
    refused(lambda: nk.examine(model, rows(), loss=lambda out, y: out), "one number")
    refused(lambda: nk.examine(model, rows(), select="NK9"), "NK9")


def test_a_forward_that_fails_says_on_which_batch():
    batches = [*rows(), (torch.randn(8, 5), torch.zeros(8))]
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        nk.examine(settled(mlp(), rows()), batches)
    assert any("batch 4" in note for note in caught.value.__notes__)


def test_findings_are_sorted_by_what_they_cost():
    case = healthy(bias=True)
    del case.options["loss"]
    with torch.no_grad():
        case.model[1].running_mean.add_(0.6)
        case.model[4].running_mean.add_(3)
    found = case.examine().findings
    order = {"error": 0, "warning": 1, "info": 2}
    assert [order[one.severity] for one in found] == sorted(order[one.severity] for one in found)
    shares = [one.evidence["share"] for one in found if one.code == "NK102"]
    assert len(shares) == 2
    assert shares == sorted(shares, reverse=True)
    assert {one.code for one in found} >= {"NK102", "NK301"}


@pytest.mark.parametrize("how", ["wrapped", "no affine", "own affine", "new"])
def test_the_cause_of_untrained_statistics_is_named_where_something_shows_it(how):
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8, affine=how != "no affine"), nn.Linear(8, 8), nn.BatchNorm1d(8)
    )
    if how in ("no affine", "own affine"):  # the weights of a training, without its buffers
        with torch.no_grad():
            model[3].weight.add_(0.1)
            if how == "own affine":
                model[1].bias.add_(0.1)
    name, examined_model = ("module.1", AveragedModel(model)) if how == "wrapped" else ("1", model)
    found = nk.examine(examined_model.eval(), [torch.randn(16, 6) for _ in range(3)], select="NK101").findings
    (one,) = (each for each in found if each.layer == name)
    causes = {"wrapped": "averaged-weights", "new": None}
    assert one.evidence["cause"] == causes.get(how, "buffers-left-out")
    assert ("EMA or SWA" in one.message) is (how != "new")
