"""A race: copies of one net, each at a rate of its own, learn from the same batches, and those behind drop out."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

SMOOTHING = 0.9  # of what a net's loss was before a step
LEARNT = 0.02  # of loss, below that of a net that knows nothing
LAST_RATE = 0.01  # of the first, at the end of a decay


class Race(nn.Module):
    """The nets and where the race stands. All of it is in buffers, so that a checkpoint keeps it."""

    rates: Tensor
    decays: Tensor
    runs: Tensor
    losses: Tensor
    taken: Tensor
    is_over: Tensor

    def __init__(self, net: nn.Module, rates: Sequence[float]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(copy.deepcopy(net) for _ in rates)
        self.register_buffer("rates", torch.tensor(rates, dtype=torch.float64))
        self.register_buffer("decays", torch.zeros(len(rates), dtype=torch.bool))
        self.register_buffer("runs", torch.ones(len(rates), dtype=torch.bool))
        self.register_buffer("losses", torch.full((len(rates),), math.nan, dtype=torch.float64))
        self.register_buffer("taken", torch.tensor(0))  # steps
        self.register_buffer("is_over", torch.tensor(False))

    def optimizer(self, momentum: float) -> torch.optim.SGD:
        """Return an optimizer with a group for each net, at its rate."""
        groups = [{"params": [*net.parameters()], "lr": float(self.rates[i])} for i, net in enumerate(self.nets)]
        return torch.optim.SGD(groups, momentum=momentum, fused=True)

    def running(self) -> list[int]:
        """The places of the nets that have not dropped out."""
        return [place for place, runs in enumerate(self.runs) if runs]

    def running_nets(self) -> dict[str, nn.Module]:
        """The nets that have not dropped out, by their rates."""
        decays = ["", " decayed"]
        return {f"{float(self.rates[i]):g}{decays[int(self.decays[i])]}": self.nets[i] for i in self.running()}

    def lowest_loss(self) -> float:
        """The smoothed loss of the net that leads; infinite if none is left."""
        return min((float(self.losses[net]) for net in self.running()), default=math.inf)

    def note(self, net: int, loss: float) -> None:
        """Smooth a net's loss; a net whose loss is not finite drops out."""
        before = float(self.losses[net])
        self.losses[net] = loss if math.isnan(before) else SMOOTHING * before + (1 - SMOOTHING) * loss
        self.runs[net] = math.isfinite(loss)

    def keep(self, count: int, by: Tensor) -> None:
        """Let so many nets go on: those that are lowest by a number for each."""
        order = sorted(self.running(), key=lambda net: float(by[net]))
        self.runs[order[count:]] = False


class RaceStep:
    """A step of every net that runs, on the same batch; at some steps the field is thinned.

    After a sixteenth of the steps the three nets with the lowest losses go on; after a quarter the best of them, and a
    twin whose rate decays from now on; after half of them the better of the two. As long as no net has learnt anything,
    losses are noise: the three are those with the highest rates, all three go on after a quarter of the steps, and
    after half of them the race is over: no more steps are taken. Nets that have dropped out take no time.
    """

    def __init__(self, race: Race, optimizer: torch.optim.Optimizer, steps: int, classes: int) -> None:
        """`optimizer` is the race's."""
        self._race, self._optimizer, self._steps = race, optimizer, steps
        self._learnt = math.log(classes) - LEARNT

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Take the step; return the lowest smoothed loss, which is infinite once every net has dropped out."""
        if not self._race.is_over:
            self._set_rates()
            self._descend(x, y)
            self._race.taken += 1
            self._thin()
        return self._race.lowest_loss()

    def _set_rates(self) -> None:
        quarter = self._steps // 4
        share = (int(self._race.taken) - quarter) / (self._steps - quarter)
        for net in self._race.running():
            rate = float(self._race.rates[net])
            self._optimizer.param_groups[net]["lr"] = rate * LAST_RATE**share if self._race.decays[net] else rate

    def _descend(self, x: Tensor, y: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for net in self._race.running():
            loss = cross_entropy(self._race.nets[net](x), y)
            self._race.note(net, loss.item())
            if self._race.runs[net]:
                loss.backward()
        self._optimizer.step()  # leaves parameters without a gradient alone

    def _thin(self) -> None:
        race, taken, steps = self._race, int(self._race.taken), self._steps
        has_learnt = race.lowest_loss() < self._learnt
        order = race.losses if has_learnt else -race.rates
        if taken == steps // 16:
            race.keep(3, order)
        elif taken == steps // 4 and has_learnt:
            race.keep(1, order)
            self._fork()
        elif taken == steps // 2:
            race.keep(1, order)
            race.is_over.fill_(not has_learnt)

    def _fork(self) -> None:
        """Give the only net that runs a twin, whose rate decays, in a place that has become free."""
        race = self._race
        (one,) = race.running()
        twin = int(not one)
        race.nets[twin].load_state_dict(race.nets[one].state_dict())
        for theirs, mine in zip(race.nets[one].parameters(), race.nets[twin].parameters(), strict=True):
            self._optimizer.state[mine] = {key: value.clone() for key, value in self._optimizer.state[theirs].items()}
        race.rates[twin], race.losses[twin] = race.rates[one], race.losses[one]
        race.decays[twin] = race.runs[twin] = True
