"""Training over ranks: N processes with parts of a batch take the steps of one process with the whole."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.errors import UnsupportedError
from normkit.lab.data import Share
from normkit.lab.experiment import Trial
from normkit.lab.experiments import experiment_named
from normkit.lab.ranks.group import current_ranks
from normkit.lab.ranks.options import StepOptions
from normkit.lab.ranks.training import check_divisible, over_ranks
from support.ranks import run_ranks

STEPS = 50
# How a batch of 32 is cut, by turns: in equal parts, in unequal ones, and with nothing for the first rank.
CUTS = {2: ([16, 16], [5, 27], [0, 32]), 4: ([8, 8, 8, 8], [1, 2, 13, 16], [0, 11, 0, 21])}


def inception_trial(arm="bn-x5"):
    found = next(each for each in experiment_named("inception").arms("quick") if each.name == arm)
    return Trial("inception", found, 0, "quick", "fashion-mini")


def training_of(trial, dtype):
    """As the experiment sets it up, in another type; its momenta are made at the first step."""
    training = experiment_named("inception").training(trial)
    training.model.to(dtype)
    batches = training.batches
    return replace(training, batches=lambda start: ((x.to(dtype), y) for x, y in batches(start)))


def uneven(training, world):
    """The parts of each batch, cut in another way in every step."""

    def shares(start, share):
        for step, (x, y) in enumerate(training.batches(start), start):
            sizes = CUTS[world][step % 3]
            yield x.split(sizes)[share.rank], y.split(sizes)[share.rank]

    return replace(training, shares=shares)


def losses(training, step):
    found = []
    for at, (x, y) in enumerate(itertools.islice(training.batches(0), STEPS)):
        for group in training.optimizer.param_groups:
            group["lr"] = training.rate(at)
        found.append(step(x, y))
    return torch.tensor(found, dtype=torch.float64)


def whole_curve(trial, dtype):
    """Of one process, by a loop that knows nothing of ranks."""
    training = training_of(trial, dtype)

    def step(x, y):
        training.optimizer.zero_grad()
        loss = training.loss(training.model(x), y)
        loss.backward()
        training.optimizer.step()
        return loss.item()

    return losses(training, step)


def parted_curve(trial, dtype, world, options=StepOptions()):  # noqa: B008
    training = over_ranks(uneven(training_of(trial, dtype), world), current_ranks(torch.device("cpu")), options)
    return losses(training, training.update)


def compare_curves(rank, world):
    """In float64 differences of rounding, of 1e-16, may grow; in float32 they grow as its own from float64 do."""
    trial = inception_trial()
    exact, single = (whole_curve(trial, dtype) for dtype in (torch.float64, torch.float32))
    assert exact[-10:].mean() < 0.7 * exact[:3].mean()  # it learns
    torch.testing.assert_close(parted_curve(trial, torch.float64, world), exact, rtol=1e-9, atol=1e-9)
    rounding = (single - exact).abs().cummax(0).values
    difference = (parted_curve(trial, torch.float32, world) - single).abs()
    # Two curves in float32, each as far from the exact one as rounding takes it, and four times that for luck; at the
    # beginning, where there is no difference yet, a few units in the last place of the loss.
    assert (difference <= 4 * 2 * rounding + 1e-6).all(), (difference, rounding)


@pytest.mark.deep
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_have_the_loss_curve_of_one_process(world, tmp_path):
    run_ranks(compare_curves, world, tmp_path)


def toy_training(seed=3):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nk.BatchNorm1d(8, activation="relu"), nn.Linear(8, 3)).double()
    x, y = torch.randn(32, 4).double(), torch.randint(3, (32,))
    trial = experiment_named("inception").training(inception_trial())
    return replace(
        trial,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batches=lambda start: itertools.repeat((x, y)),
        rate=lambda step: 0.1,
    )


def compare_toys(rank, world):
    ranks = current_ranks(torch.device("cpu"))
    whole, training = toy_training(), toy_training()
    parted = over_ranks(uneven(training, world), ranks, StepOptions())

    def step(x, y):
        whole.optimizer.zero_grad()
        loss = whole.loss(whole.model(x), y)
        loss.backward()
        whole.optimizer.step()
        return loss.item()

    expected = losses(whole, step)
    torch.testing.assert_close(losses(parted, parted.update), expected, rtol=1e-11, atol=1e-11)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(parted.model.state_dict()[name], value, rtol=1e-10, atol=1e-10)
    compare_micro_batches(ranks, world)
    take_half_precision(ranks)


def compare_micro_batches(ranks, world):
    """Without statistics of a batch, micro-batches change nothing."""

    def without_norm():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        return replace(toy_training(), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    one = over_ranks(uneven(without_norm(), world), ranks, StepOptions())
    several = over_ranks(uneven(without_norm(), world), ranks, StepOptions(micro_batches=3))
    expected = losses(one, one.update)
    torch.testing.assert_close(losses(several, several.update), expected, rtol=1e-11, atol=1e-11)


def take_half_precision(ranks):
    training = over_ranks(toy_training(), ranks, StepOptions(precision="bfloat16"))
    training.model.float()
    seen = []
    training.model[0].register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    x, y = next(training.batches(0))
    training.update(x.float(), y)
    assert seen == [torch.bfloat16]
    assert {p.grad.dtype for p in training.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_parts_of_batches_of_any_size_give_the_steps_of_the_whole(world, tmp_path):
    run_ranks(compare_toys, world, tmp_path)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
def test_each_example_of_a_batch_belongs_to_one_rank(ranks):
    batch = torch.arange(32)
    parts = [Share(rank, ranks).of(batch) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), batch)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"update": lambda x, y: 0.0}, "steps of its own"),
        ({"probes": lambda loss: []}, "probes"),
        ({"loss": nn.functional.mse_loss}, "mean over examples"),
        ({"model": nn.Sequential(nk.GhostBatchNorm2d(3))}, r"0 \(GhostBatchNorm2d\)"),
        ({"model": nn.Sequential(nk.BatchRenorm2d(3))}, r"0 \(BatchRenorm2d\)"),
    ],
)
def test_what_cannot_be_parted_is_refused(change, reason):
    with pytest.raises(UnsupportedError, match=f"toy cannot be trained over ranks: .*{reason}"):
        check_divisible(replace(toy_training(), **change), "toy")
    check_divisible(toy_training(), "toy")
