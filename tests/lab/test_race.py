"""Nets in a race learn as they would alone; who drops out follows from the losses, and takes no more steps."""

import copy
import math
import random

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import normkit as nk
from normkit.lab.race import LAST_RATE, Race, RaceStep

CLASSES = 4
MANY = 10**6  # classes: beside guessing among so many, every net of ours has learnt something
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)


def net_of():
    return nn.Sequential(nn.Linear(6, 8), nk.BatchNorm1d(8, activation="relu"), nn.Linear(8, CLASSES))


def unbounded():
    """One whose outputs overflow at high rates."""
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES))


class Deaf(nn.Module):
    """Knows nothing, and learns nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES))

    def forward(self, x):
        return x.new_zeros(len(x), CLASSES) + 0 * self.weight


def batches(count):
    """Some that can be learnt."""
    mapping = torch.randn(6, CLASSES)
    for _ in range(count):
        x = torch.randn(16, 6)
        yield x, (x @ mapping).argmax(1)


def race_of(net=None, rates=RATES, steps=64, classes=CLASSES):
    race = Race(net or net_of(), rates)
    return race, RaceStep(race, race.optimizer(0.9), steps, classes)


def state_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_each_net_learns_as_it_would_alone():
    net, seen = net_of(), list(batches(12))
    race, step = race_of(net, steps=1000)  # longer than what is looked at: none drops out
    for batch in seen:
        step(*batch)
    for place, rate in enumerate(RATES):
        alone = copy.deepcopy(net)
        optimizer = torch.optim.SGD(alone.parameters(), lr=rate, momentum=0.9, fused=True)
        for x, y in seen:
            optimizer.zero_grad()
            cross_entropy(alone(x), y).backward()
            optimizer.step()
        assert same(race.nets[place].state_dict(), alone.state_dict())


def test_a_net_whose_loss_is_not_finite_drops_out_and_the_others_do_not_notice():
    net, seen = unbounded(), list(batches(20))
    race, step = race_of(net, rates=(1e30, 0.1), steps=1000)
    alone, alone_step = race_of(net, rates=(0.1,), steps=1000)
    for batch in seen:
        assert step(*batch) == alone_step(*batch)
    assert race.running() == [1]
    assert same(race.nets[1].state_dict(), alone.nets[0].state_dict())
    assert [*race.running_nets()] == ["0.1"]


def test_if_all_drop_out_the_loss_is_infinite():
    race, step = race_of(unbounded(), rates=(1e30, 1e35))
    losses = [step(*batch) for batch in batches(20)]
    assert (race.running(), losses[-1]) == ([], math.inf)


@pytest.mark.parametrize("lowest", [math.log(CLASSES) - 0.03, math.log(CLASSES) - 0.01])
def test_the_losses_decide_who_goes_on_and_the_rates_while_nothing_was_learnt(lowest):
    race, step = race_of(Deaf(), steps=64)
    order = random.sample(range(5), 5)
    for batch in batches(3):
        step(*batch)
    race.losses[order] = torch.tensor([0.0, 0.01, 0.02, 0.03, 0.04], dtype=torch.float64)
    race.losses += (lowest - 0.1 * math.log(CLASSES)) / 0.9 - float(race.losses.min())
    step(*next(batches(1)))  # smooths the losses, and thins
    assert float(race.losses.min()) == pytest.approx(lowest)
    assert set(race.running()) == (set(order[:3]) if lowest < math.log(CLASSES) - 0.02 else {2, 3, 4})


def test_losses_are_smoothed():
    race, _ = race_of()
    seen = [random.random() for _ in range(4)]
    for loss in seen:
        race.note(2, loss)
    expected = seen[0]
    for loss in seen[1:]:
        expected = 0.9 * expected + 0.1 * loss
    assert float(race.losses[2]) == pytest.approx(expected)


def test_the_field_is_thinned_and_those_left_behind_take_no_steps():
    race, step = race_of(steps=64, classes=MANY)
    calls = [0] * 5
    for place, net in enumerate(race.nets):
        net.register_forward_hook(lambda *_, place=place: calls.__setitem__(place, calls[place] + 1))
    counts, stopped = [], {}
    for batch in batches(64):
        step(*batch)
        counts.append(len(race.running()))
        for place in range(5):
            if not race.runs[place]:
                before = stopped.setdefault((place, bool(race.decays[place])), state_of(race.nets[place]))
                assert same(race.nets[place].state_dict(), before)
    assert counts == [5] * 3 + [3] * 12 + [2] * 16 + [1] * 33
    assert sum(calls) == 5 * 4 + 3 * 12 + 2 * 16 + 32


def test_a_twin_starts_as_the_best_net_is_and_its_rate_decays():
    race, step = race_of(steps=64, classes=MANY)
    seen = list(batches(64))
    for batch in seen[:16]:
        step(*batch)
    (kept,), (twin,) = ([i for i in race.running() if bool(race.decays[i]) == decays] for decays in (False, True))
    optimizer = step._optimizer
    momenta = [
        [optimizer.state[parameter]["momentum_buffer"] for parameter in race.nets[i].parameters()] for i in (kept, twin)
    ]
    assert same(race.nets[kept].state_dict(), race.nets[twin].state_dict())
    assert all(torch.equal(one, other) and one is not other for one, other in zip(*momenta, strict=True))
    assert float(race.losses[kept]) == float(race.losses[twin]) == race.lowest_loss()
    assert [*race.running_nets()] == [f"{RATES[kept]:g}{' decayed' * (i == twin)}" for i in race.running()]
    step(*seen[16])
    assert same(race.nets[kept].state_dict(), race.nets[twin].state_dict())  # the first decayed rate is the kept one
    for batch in seen[17:]:
        race.runs[twin] = True
        step(*batch)
    assert optimizer.param_groups[twin]["lr"] == pytest.approx(RATES[kept] * LAST_RATE ** (47 / 48))
    assert optimizer.param_groups[kept]["lr"] == RATES[kept]


def test_nets_that_learn_nothing_give_up_at_the_half():
    race, step = race_of(Deaf(), steps=64)
    counts = []
    for batch in batches(64):
        assert step(*batch) == pytest.approx(math.log(CLASSES))
        counts.append(len(race.running()))
    assert counts == [5] * 3 + [3] * 28 + [1] * 33
    assert (int(race.taken), bool(race.is_over)) == (32, True)
    assert not race.decays.any()
    assert [*race.running_nets()] == ["0.3"]


def test_a_late_start_is_soon_enough_before_the_half():
    race, step = race_of(Deaf(), steps=64)
    for batch in batches(20):
        step(*batch)
    race.losses[3] = 0.5  # it has learnt
    for batch in batches(44):
        step(*batch)
    assert (race.running(), int(race.taken), bool(race.is_over)) == ([3], 64, False)


def test_a_race_is_resumed_from_its_state():
    seen = list(batches(64))
    race, step = race_of(steps=64)
    at = random.randrange(1, 64)
    for batch in seen[:at]:
        step(*batch)
    other, _ = race_of()
    optimizer = other.optimizer(0.9)
    other.load_state_dict(state_of(race))
    optimizer.load_state_dict(copy.deepcopy(step._optimizer.state_dict()))
    resumed = RaceStep(other, optimizer, 64, CLASSES)
    for batch in seen[at:]:
        assert resumed(*batch) == step(*batch)
    assert same(race.state_dict(), other.state_dict())
