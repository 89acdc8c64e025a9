"""Watched runs in several processes, and of compiled models."""

import copy

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import normkit as nk
from support.loops import CLASSES, NORMS, batches, codes, net, sgd, train
from support.ranks import run_ranks


def ddp_worker(rank, world):
    for is_stray, outside in ((False, True), (True, True), (True, False)):
        watched_ddp(rank, is_stray, outside)


def watched_ddp(rank, is_stray, outside):
    torch.manual_seed(0)
    inner = net()
    model = DistributedDataParallel(inner)
    optimizer = sgd(model)
    torch.manual_seed(1 + rank)
    with nk.watch(model if outside else inner, optimizer=optimizer) as ledger:
        for x, y in batches(8):
            if is_stray:
                with torch.no_grad():
                    inner(x + 1)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        model(batches(1)[0][0])
    prefix = "module." if outside else ""
    assert ledger.stopped is None
    assert codes(ledger) == ({("NK204", f"{prefix}{name}") for name in NORMS} if is_stray else set())
    assert {entry.site.root for entry in ledger.writes if entry.use == "step"} == {"DistributedDataParallel"}
    assert {entry.count for entry in ledger.writes if entry.use == "step"} == {8}


@pytest.mark.deep
def test_under_ddp(tmp_path):
    run_ranks(ddp_worker, 2, tmp_path)
    assert not distributed.is_initialized()


class Small(nn.Module):
    """A class of its own: torch compiles those it knows in another way."""

    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x):
        return self.body(x)


@pytest.fixture
def _forget_compiled_code():
    yield
    torch.compiler.reset()


def compiled(model, how):
    if how == "in place":
        model.compile(backend="aot_eager")
        return model
    return torch.compile(model, backend="aot_eager")


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # the compiler's own
@pytest.mark.usefixtures("_forget_compiled_code")
@pytest.mark.parametrize(("make", "how", "is_warm"), [
    (Small, "wrapped", True),
    (Small, "wrapped, watched inside", False),
    (Small, "in place", True),
    (net, "wrapped", False),
])  # fmt: skip
def test_a_compiled_run_is_watched_and_is_the_one_without(make, how, is_warm):
    first, data, stray = make(), batches(4), batches(1)[0][0]
    found = []
    for is_watched in (False, True):
        torch.compiler.reset()
        inner = copy.deepcopy(first)
        model = compiled(inner, how)
        optimizer = sgd(inner)
        if is_warm:
            train(model, optimizer, data)
        ledger = nk.watch(inner if "inside" in how else model, optimizer=optimizer) if is_watched else None
        train(model, optimizer, data)
        with torch.no_grad():
            model(stray)
        found.append(inner.state_dict())
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
    if how == "in place":
        with pytest.warns(nk.NormkitWarning, match="saw no forward of 2 layers whose statistics have moved"):
            ledger.close()
        assert (len(ledger.unseen), ledger.findings) == (2, [])
    else:
        ledger.close()
        assert {(entry.use, entry.count) for entry in ledger.writes} == {("step", 4), ("no grad", 1)}
        assert codes(ledger) == {("NK204", name) for name in ledger.accounts}
    assert ledger.stopped is None


def test_functions_that_transform_a_model_are_none_of_its_business():
    model = net(nk.BatchNorm2d)
    x, y = batches(1)[0]
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def loss(parameters):
        return F.cross_entropy(torch.func.functional_call(model, (parameters, copy.deepcopy(buffers)), (x,)), y)

    with nk.watch(model) as ledger:
        model.eval()
        torch.func.grad(loss)(parameters)
    assert (ledger.stopped, ledger.writes) == (None, [])


def test_exporting_a_watched_model_records_nothing_of_the_watch():
    model = net().eval()
    x = batches(1)[0][0]
    alone = torch.jit.trace(copy.deepcopy(model), x)
    with nk.watch(model) as ledger:
        traced = torch.jit.trace(model, x)
    kinds = [[node.kind() for node in one.inlined_graph.nodes()] for one in (traced, alone)]
    assert kinds[0] == kinds[1]
    assert (ledger.stopped, ledger.writes) == (None, [])
    assert traced(x).shape[1] == CLASSES
