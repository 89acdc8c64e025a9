"""A classifier, and a stream of batches that shifts in the middle: other scales and offsets from there on."""

import copy
import gc

import torch
from torch import nn

import normkit as nk

CLASSES, FEATURES = 4, 8


class ShiftingStream:
    """Clouds of points, seen through one shift in the first half of the batches and another in the second.

    The classifier is trained without a shift. Its norms are torch's and ours.
    """

    def __init__(self, batches, size=32, seed=0):
        self.batches, self.size = batches, size
        self._draws = torch.Generator().manual_seed(seed)
        self._centres = 2 * torch.randn(CLASSES, FEATURES, generator=self._draws)
        self._shifts = [self._shift(), self._shift()]
        self._seed = seed
        self.model = self._trained()

    def __len__(self):
        return self.batches

    def __iter__(self):
        """The same batches each time, with labels; none is kept."""
        draws = torch.Generator().manual_seed(self._seed + 1)
        for number in range(self.batches):
            x, y = self._examples(self.size, draws)
            scale, offset = self._shifts[number >= self.batches // 2]
            yield scale * x + offset, y

    def inputs(self):
        """The batches without labels, to be gone over as often as one likes."""
        return [x for x, _ in self]

    def accuracy(self, predict):
        """The share of right predictions in the first and in the second half."""
        right = [0, 0]
        for number, (x, y) in enumerate(self):
            right[number >= self.batches // 2] += int((predict(x).argmax(1) == y).sum())
        return [count / (self.size * (self.batches // 2)) for count in right]

    def _shift(self):
        return (
            0.3 + 2 * torch.rand(FEATURES, generator=self._draws),
            4 * torch.randn(FEATURES, generator=self._draws),
        )

    def _examples(self, count, draws):
        labels = torch.randint(0, CLASSES, (count,), generator=draws)
        return self._centres[labels] + torch.randn(count, FEATURES, generator=draws), labels

    def _trained(self):
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            layers = [nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 16), nk.BatchNorm1d(16, activation="relu")]
            model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(16, CLASSES))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
            for _ in range(150):
                x, y = self._examples(64, self._draws)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        optimizer.zero_grad()
        return model.eval()


def evaluated(model):
    """A copy of a model as a function, in evaluation, without gradients."""
    still = copy.deepcopy(model).eval()
    return torch.no_grad()(still)


class ToOneClass(torch.optim.SGD):
    """Ordinary steps, and after some of them one that leaves nothing of the input: one class is certain."""

    def __init__(self, parameters, good):
        super().__init__(parameters, lr=1e-3)
        self.left = good

    def step(self, closure=None):
        super().step(closure)
        self.left -= 1
        if self.left == 0:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.fill_(1e4 if p.dim() == 1 else 0)
                self.param_groups[0]["params"][-2].zero_()


def live_tensors():
    """All tensors that exist, and the bytes that they hold."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    return len(found), sum(one.untyped_storage().nbytes() for one in found)
