"""Faults of several processes, each with its healthy twin, and what examine and watch say of several ranks."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import normkit as nk
from support.patients import mlp, randomized, rows
from support.ranks import run_ranks

EXAMINE = "examine takes one model, of which every rank has a copy."


def findings(code, model, batches, **options):
    return {one.layer: one for one in nk.examine(model, batches, select=code, **options).findings}


def found(code, model, batches, **options):
    return set(findings(code, model, batches, **options))


def trained():
    torch.manual_seed(0)
    model = randomized(mlp())
    nk.recalibrate(model, [x for x, _ in rows()], inplace=True)
    return model


def find_faults(rank, world):
    model = trained()
    batches = [x for x, _ in rows(seed=rank)]
    assert found("NK401", model, batches) == set()
    diverge(model, batches, rank)

    small = [x[:4] for x in batches]
    of_all = findings("NK402", model, small)["1"]
    assert "a batch of any rank" in of_all.message
    assert len(of_all.evidence["by_rank"]) == world
    mixed = findings("NK402", model, small if rank == 1 else batches)["1"]
    assert "a batch of rank 1 is" in mixed.message
    assert mixed.evidence["by_rank"][1] > 2 * mixed.evidence["by_rank"][0]
    assert found("NK402", model, batches) == set()
    synced = nk.convert(model, to="sync").model
    assert found("NK402", synced, small) == set()

    twice = {"forward": lambda m, x: (m(x), m(x + 1))}
    wrapped = nn.parallel.DistributedDataParallel(model.train())
    assert found("NK403", wrapped, batches, **twice) == {"module.1"}
    on_one = findings("NK403", wrapped, batches, **(twice if rank == 1 else {}))["module.1"]
    assert on_one.message.startswith("2 forwards of one batch on rank 1, ")
    assert on_one.evidence["by_rank"] == [1, 2, 1][:world]
    assert found("NK403", wrapped, batches) == set()
    alone = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    assert found("NK403", alone, batches, **twice) == set()


def diverge(model, batches, rank):
    mean = model[1].running_mean.clone()
    with torch.no_grad():
        model[1].running_mean.add_(0.4 * model[1].running_var.sqrt() * (rank == 2))
    one = findings("NK401", model, batches)["1"]
    assert "rank 2 is 0.4 standard deviations from the others (ranks 0, 1)" in one.message
    assert one.evidence["groups"] == [[0, 1], [2]]
    assert one.evidence["from_others"][2] == pytest.approx(0.4, rel=0.01)
    assert one.evidence["from_others"][0] < 0.3
    with torch.no_grad():
        model[1].running_mean.copy_(mean + 0.5 * rank)
    every = findings("NK401", model, batches)["1"]
    assert "ranks 0, 1, 2 are " in every.message
    assert every.evidence["ranks"] == 3
    with torch.no_grad():
        model[1].running_mean.copy_(mean)


@pytest.mark.deep
def test_faults_of_ranks_are_found_on_every_rank(tmp_path):
    run_ranks(find_faults, 3, tmp_path)


# ---- examine


def examine_together(rank, world):
    model = trained()
    halves = [x + 3.0 * rank for x, _ in rows(8)]  # no rank's data are those of all
    both = [x + 3.0 * r for r in range(world) for x, _ in rows(8)]
    nk.recalibrate(model, both, inplace=True)
    found = nk.examine(model.eval(), halves[: 8 - rank], select="NK1")
    assert [one.code for one in found.findings if one.code in ("NK102", "NK106")] == []
    assert found.evidence["ranks"] == world
    assert found.evidence["batches"] == 7
    layer = found.evidence["layers"][0]
    torch.testing.assert_close(torch.tensor(layer["data_mean"]), torch.tensor(layer["stored_mean"]), rtol=0.2, atol=0.3)
    every = nk.examine(model, halves, loss=lambda y, _: y.square().mean(), select="NK102").evidence["gap"]
    gaps = [None] * world
    torch.distributed.all_gather_object(gaps, every)
    assert gaps == [every] * world

    stale(model, halves, rank)
    on_one_rank(rank)


def stale(model, batches, rank):
    """What is stored is wrong on all: every rank says the same of it, and shares the gap out in the same way."""
    with torch.no_grad():
        model[1].running_mean.add_(4 * model[1].running_var.sqrt())
    found = nk.examine(model, batches, select="NK102")
    assert [one.layer for one in found.findings] == ["1"]
    assert "on_ranks" not in found.findings[0].evidence
    shares = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(shares, dict(found.findings[0].evidence))
    assert shares[0]["share"] == shares[1]["share"]
    assert rank in (0, 1)


def on_one_rank(rank):
    """Every rank has what one of them alone finds, with its number."""
    model = trained().eval()
    batches = [x for x, _ in rows(seed=rank)]
    found = nk.examine(model, [*batches[:2], batches[0][: 1 + 31 * (rank == 0)]], select="NK107").findings
    assert [(one.code, one.evidence["on_ranks"]) for one in found] == [("NK107", [1])]
    assert found[0].message.startswith("on rank 1 of 2: ")


@pytest.mark.deep
def test_all_ranks_have_the_findings_of_all(tmp_path):
    run_ranks(examine_together, 2, tmp_path)


def examine_wrapped(rank, world):
    batches = [x for x, _ in rows(8, seed=rank)]
    synced = nk.convert(trained(), to="sync").model
    sharded = trained()
    for part in (*sharded, sharded):
        if list(part.parameters()):
            fully_shard(part)
    for model in (nn.parallel.DistributedDataParallel(trained()), synced, sharded):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found = nk.examine(model, batches[: 8 - rank])  # unequal numbers of batches are no deadlock
        codes = [None] * world
        torch.distributed.all_gather_object(codes, [(one.code, one.layer) for one in found.findings])
        assert codes == [codes[0]] * world
        for name, tensor in model.state_dict().items():
            assert torch.equal(_whole(tensor), _whole(before[name])), name


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.deep
def test_wrapped_and_sharded_and_synchronized_models_are_examined_in_step(tmp_path):
    run_ranks(examine_wrapped, 2, tmp_path)


# ---- ranks that do not fit together


def models_of(rank):
    """What differs on rank 1, and the words for it."""
    odd = rank == 1
    return {
        "rank 0 has 0.weight of (8, 8), torch.float32, rank 1 has 0.weight of (6, 8)": net(6 if odd else 8),
        "rank 0 has nothing, rank 1 has 3.weight": net(8, norms=2 if odd else 1),
        "rank 0 has 2: ReLU(), rank 1 has 2: Tanh()": net(8, activation=nn.Tanh if odd else nn.ReLU),
        "rank 0 has 1: BatchNorm1d(8, eps=1e-05": net(8, eps=1e-3 if odd else 1e-5),
    }


def net(width, norms=1, activation=nn.ReLU, eps=1e-5):
    more = [nk.BatchNorm1d(width) for _ in range(norms - 1)]
    return nn.Sequential(nn.Linear(8, width), nk.BatchNorm1d(width, eps), activation(), *more)


def refuse(rank, world):
    batches = [torch.randn(16, 8) for _ in range(3)]
    for words, model in models_of(rank).items():
        for call in (
            lambda model=model: nk.examine(model, batches),
            lambda model=model: nk.manifest(model, over_ranks=True),
            lambda model=model: nk.watch(model, over_ranks=True),
        ):
            with pytest.raises(nk.DistributedError, match=r"All ranks need the same .*" + re.escape(words)):
                call()
    with pytest.raises(nk.DistributedError, match=re.escape(EXAMINE)):
        nk.examine(net(8 + rank), batches)
    model = net(8)
    wrong = ("examine failed on rank 1, and with it on all: RuntimeError", "mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match=wrong[rank]):
        nk.examine(model, [torch.randn(16, 8 + rank)])
    with pytest.raises(nk.DistributedError if rank == 0 else ValueError, match="there are no batches"):
        nk.examine(model, batches if rank == 0 else [])
    compare_manifests(rank, model)


def compare_manifests(rank, model):
    same = nk.manifest(model, over_ranks=True)
    assert same == nk.manifest(model) | {"ranks": {"count": 2, "num_batches_tracked": {}}}
    model[1].num_batches_tracked += 3 * rank
    assert nk.manifest(model, over_ranks=True)["ranks"]["num_batches_tracked"] == {"1": [0, 3]}
    model.train(rank == 0)
    with pytest.raises(nk.DistributedError, match="of 1, mode is train on rank 0, and eval on rank 1"):
        nk.manifest(model, over_ranks=True)
    if rank == 0:
        assert "ranks" not in nk.manifest(model)  # one rank alone, as it saves its model


@pytest.mark.deep
def test_ranks_with_other_models_are_an_error_that_says_which(tmp_path):
    run_ranks(refuse, 2, tmp_path)


# ---- watch


def watch_together(rank, world):
    model = trained()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.01)
    with nk.watch(wrapped, optimizer, over_ranks=True) as ledger:
        for x, y in rows(seed=rank):
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            if rank == 1:  # evaluates without eval()
                with torch.no_grad():
                    model(x + 1)
    (stray,) = [one for one in ledger.findings if one.code == "NK204"]
    assert stray.message.startswith("on rank 1 of 2: ")
    assert stray.evidence["on_ranks"] == [1]

    with pytest.raises(RuntimeError, match="of the loop"), nk.watch(wrapped, optimizer, over_ranks=True):
        raise RuntimeError("of the loop")  # nothing is waited for
    with nk.watch(wrapped, optimizer) as alone:
        pass
    assert alone.findings == []


@pytest.mark.deep
def test_a_ledger_says_on_which_ranks(tmp_path):
    run_ranks(watch_together, 2, tmp_path)


# ---- without ranks


def test_without_ranks_they_are_silent():
    model = randomized(mlp())
    diagnosis = nk.examine(model, rows(), select="NK4")
    assert diagnosis.findings == []
    assert diagnosis.evidence["ranks"] == 1


def test_one_process_compares_with_nobody():
    model = randomized(mlp())
    assert nk.manifest(model, over_ranks=True) == nk.manifest(model) | {
        "ranks": {"count": 1, "num_batches_tracked": {}}
    }
    with nk.watch(model, over_ranks=True) as ledger:
        pass
    assert ledger.findings == []
