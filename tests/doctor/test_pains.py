"""Faults as users meet them: a training loop, then a model that is worse than it should be. Each in two wirings."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import normkit as nk


class Residual(nn.Module):
    """Norms as modules, wired by hand."""

    def __init__(self, channels=3, **options):
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, **options)
        self.conv, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, **options)
        self.head = nn.Linear(8, 4)

    def features(self, x):
        x = F.relu(self.bn0(self.stem(x)))
        return F.relu(self.bn1(self.conv(x)) + x)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def plain(**options):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(192, 32, bias=False),
        nn.BatchNorm1d(32, **options),
        nn.ReLU(),
        nn.Linear(32, 32, bias=False),
        nn.BatchNorm1d(32, **options),
        nn.ReLU(),
        nn.Linear(32, 4),
    )


WIRINGS = [Residual, plain]
NORMS = {Residual: ["bn0", "bn1"], plain: ["2", "5"]}


def data(batches=16, size=16):
    found = []
    for _ in range(batches):
        y = torch.randint(4, (size,))
        found.append((torch.randn(size, 3, 8, 8) + 0.7 * y[:, None, None, None], y))
    return found


def train(model, batches, steps=60, lr=0.05, parameters=None, each=lambda model: None):
    """An ordinary loop."""
    model.train()
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    for step in range(steps):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        each(model)
    return optimizer


def examined(model, batches, code, **options):
    found = nk.examine(model, batches, F.cross_entropy, **options).findings
    return {one.layer: one for one in found if one.code == code}


pytestmark = pytest.mark.deep
wirings = pytest.mark.parametrize("wiring", WIRINGS, ids=lambda w: w.__name__)


@wirings
def test_an_ordinary_run_is_healthy(wiring):
    model, batches = wiring(), data()
    optimizer = train(model, batches)
    for mode in (True, False):
        diagnosis = nk.examine(model.train(mode), batches, F.cross_entropy, optimizer)
        assert diagnosis.ok, [str(one) for one in diagnosis.findings]


@wirings
def test_row_1_evaluation_is_far_worse_than_training(wiring):
    """A momentum so small that the statistics have not arrived when evaluation reads them."""
    model, batches = wiring(momentum=0.001), data()
    train(model, batches)
    found = examined(model, batches, "NK102")
    assert set(found) <= set(NORMS[wiring])
    assert found
    assert all(one.evidence["cause"] == "few-steps" and one.severity == "error" for one in found.values())


@wirings
def test_row_2_a_frozen_backbone_drifts(wiring):
    model, batches = wiring(), data()
    train(model, batches)
    layers = list(model.children())
    for layer in layers[:-1]:
        layer.requires_grad_(False)
    optimizer = train(model, batches, steps=4, parameters=list(layers[-1].parameters()))
    assert set(examined(model, batches, "NK202", optimizer=optimizer)) == set(NORMS[wiring])
    nk.freeze(model, inplace=True)
    assert examined(model.train(), batches, "NK202", optimizer=optimizer) == {}


@wirings
def test_row_3_evaluation_depends_on_the_batch(wiring):
    model, batches = wiring(track_running_stats=False), data()
    train(model, batches)
    assert set(examined(model.eval(), batches, "NK201")) == set(NORMS[wiring])


@pytest.mark.parametrize("pooled", [True, False])
def test_row_4_the_last_batch_has_one_example(pooled):
    if pooled:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4)
        )
    else:
        model = plain()
    train(model, data())
    loader = DataLoader(TensorDataset(torch.randn(65, 3, 8, 8), torch.randint(4, (65,))), batch_size=16)
    assert "2" in examined(model, loader, "NK107")
    loader = DataLoader(TensorDataset(torch.randn(66, 3, 8, 8), torch.randint(4, (66,))), batch_size=16)
    assert examined(model, loader, "NK107") == {}


@wirings
def test_row_8_averaged_weights_with_the_buffers_of_the_model(wiring):
    model, batches = wiring(), data()
    average = AveragedModel(model)  # copies buffers, averages parameters
    train(model, batches, lr=0.2, each=average.update_parameters)
    found = examined(average, batches, "NK102")
    assert found
    assert {one.evidence["cause"] for one in found.values()} == {"averaged-weights"}
    assert all("EMA or SWA" in one.message for one in found.values())
    torch.optim.swa_utils.update_bn(batches, average)
    assert examined(average.eval(), batches, "NK102") == {}


@wirings
def test_row_8_averaged_weights_with_the_buffers_of_the_beginning(wiring):
    model, batches = wiring(), data()
    average = copy.deepcopy(model)

    def update(model):
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.05)

    train(model, batches, each=update)
    found = examined(average.eval(), batches, "NK101")
    assert set(found) == set(NORMS[wiring])
    assert all("EMA or SWA" in one.message for one in found.values())


@wirings
def test_row_9_one_infinite_batch_poisons_the_statistics(wiring):
    model, batches = wiring(), data()
    train(model, batches)
    bad = (batches[5][0].clone(), batches[5][1])
    bad[0][2] = torch.inf
    with torch.no_grad():
        model.train()(bad[0])
    found = examined(model, batches, "NK103")
    assert NORMS[wiring][0] in found
    assert found[NORMS[wiring][0]].severity == "error"
    named = examined(model, [*batches[:3], bad], "NK103")
    assert named[NORMS[wiring][0]].evidence["batch"] == 3


@wirings
def test_row_10_a_ported_momentum(wiring):
    model, batches = wiring(momentum=0.99), data()
    train(model, batches)
    assert set(examined(model, batches, "NK104")) == set(NORMS[wiring])


@wirings
def test_row_10_a_file_with_another_eps(wiring, tmp_path):
    model = wiring(eps=1e-3)
    train(model, data())
    nk.save(model, tmp_path / "m.safetensors")
    with pytest.raises(nk.MismatchError, match="eps") as caught:
        nk.load(wiring().train(), tmp_path / "m.safetensors")
    assert caught.value.code == "NK502"
    assert caught.value.layers == NORMS[wiring]


@wirings
def test_row_19_pruned_after_training(wiring):
    model, batches = wiring(), data()
    train(model, batches)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter[parameter.abs() < parameter.abs().flatten().kthvalue(int(0.8 * parameter.numel())).values] = 0
    found = examined(model, batches, "NK102")
    assert found
    assert all(one.evidence["cause"] == "pruning" for one in found.values())


@pytest.mark.parametrize("recurrent", [True, False])
def test_row_20_padding_is_counted(recurrent):
    lengths = torch.randint(4, 12, (16,))
    mask = (torch.arange(12) < lengths[:, None]).float()
    batches = [(torch.randn(16, 6, 12) * mask[:, None], torch.randint(4, (16,))) for _ in range(4)]

    class Sequences(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = (
                nn.Conv1d(6, 8, 1 if recurrent else 3, padding=0 if recurrent else 1),
                nn.BatchNorm1d(8),
            )
            self.rest = nn.GRU(8, 8, batch_first=True) if recurrent else None
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            x = F.relu(self.norm(self.conv(x)))
            x = x.mean(2) if self.rest is None else self.rest(x.transpose(1, 2))[0][:, -1]
            return self.head(x)

    model = Sequences()
    train(model, batches)
    assert set(examined(model, batches, "NK109")) == {"norm"}
    whole = [(torch.randn(16, 6, 12), y) for _, y in batches]
    assert examined(model, whole, "NK109") == {}


@wirings
def test_row_21_real_and_fake_batches(wiring):
    real = data()
    fake = [(1.5 * x - 3, y) for x, y in data()]
    both = [batch for pair in zip(real, fake, strict=True) for batch in pair]
    model = wiring()
    train(model, both)
    assert NORMS[wiring][0] in examined(model, both[:8], "NK108")
    halves = [
        (torch.cat([a[0][:8], b[0][:8]]), torch.cat([a[1][:8], b[1][:8]])) for a, b in zip(real, fake, strict=True)
    ]
    assert examined(model, halves, "NK108") == {}


@wirings
def test_row_22_federated_averages(wiring):
    """Clients keep their statistics, the server averages parameters only; and one subtracts what it added."""
    server, batches = wiring(), data()
    clients = []
    for seed in range(3):
        clients.append(copy.deepcopy(server))
        torch.manual_seed(seed)
        train(clients[-1], [(x * (1 + seed), y) for x, y in batches])
    with torch.no_grad():
        for parts in zip(server.parameters(), *(c.parameters() for c in clients), strict=True):
            parts[0].copy_(sum(parts[1:]) / 3)
    assert set(examined(server, batches, "NK101")) == set(NORMS[wiring])
    merged = copy.deepcopy(server)
    with torch.no_grad():
        for parts in zip(merged.buffers(), *(c.buffers() for c in clients), strict=True):
            parts[0].copy_(parts[1] + parts[2] - 3 * parts[3])
    found = examined(merged, batches, "NK103")
    assert found
    assert all("negative" in one.message for one in found.values())
