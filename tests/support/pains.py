"""Faults as users meet them, each a training loop in at least two wirings, with and without the fault.

`PAINS` is the table: tests examine every loop, and `benchmarks/audited_pains.py` shows what another tool says of it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import normkit as nk

Around = Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]


class Seen(NamedTuple):
    """What was found: a code, or the verb that said it; the layer; in words, with the cause."""

    code: str
    layer: str | None
    words: str


@dataclass
class Trained:
    """What the user has when the loop has ended: a model, batches like those it is used on, and what verbs said."""

    model: nn.Module
    batches: Any
    optimizer: torch.optim.Optimizer | None = None
    said: list[Seen] = field(default_factory=list)


@dataclass(frozen=True)
class Pain:
    """A fault.

    Attributes:
        row: of the table of complaints.
        name: the fault, and how it is wired.
        code: what it is found as; "convert" is said by that verb.
        layers: where.
        cause: what the words must contain.
        is_spotty: whether it is enough that some of the layers are found, and no others.
        run: run(is_faulty, around) trains, with around(model, optimizer) about every loop.
    """

    row: int
    name: str
    code: str
    layers: frozenset[str]
    cause: str
    is_spotty: bool
    run: Callable[[bool, Around], Trained]

    def __str__(self) -> str:
        return f"{self.row}: {self.name}"


PAINS: list[Pain] = []


# ---- networks and data


class Residual(nn.Module):
    """Norms as modules, wired by hand."""

    def __init__(self, channels=3, norm=nn.BatchNorm2d, **options):
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(channels, 8, 3, padding=1, bias=False), norm(8, **options)
        self.conv, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8, **options)
        self.head = nn.Linear(8, 4)

    def features(self, x):
        x = F.relu(self.bn0(self.stem(x)))
        return F.relu(self.bn1(self.conv(x)) + x)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def plain(norm=nn.BatchNorm1d, **options):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(192, 32, bias=False),
        norm(32, **options),
        nn.ReLU(),
        nn.Linear(32, 32, bias=False),
        norm(32, **options),
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


def unwatched(model, optimizer):
    return nullcontext()


def sgd(parameters, rate=0.05):
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-4)


def train(model, batches, steps=60, rate=0.05, parameters=None, each=lambda model: None, around=unwatched):
    """An ordinary loop."""
    model.train()
    optimizer = sgd(parameters or model.parameters(), rate)
    with around(model, optimizer):
        for step in range(steps):
            x, y = batches[step % len(batches)]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            each(model)
    return optimizer


def seen(pain, is_faulty=True, examine=nk.examine):
    """What watch says of the loop, examine of the model after it, and verbs on the way; info left out."""
    findings = []

    @contextmanager
    def around(model, optimizer):
        with nk.watch(model, optimizer=optimizer) as ledger:
            yield
        assert ledger.stopped is None
        findings.extend(ledger.findings)

    trained = pain.run(is_faulty, around)
    findings += examine(trained.model, trained.batches, F.cross_entropy, trained.optimizer).findings
    return trained.said + [Seen(one.code, one.layer, one.message) for one in findings if one.severity != "info"]


def is_named(pain, found):
    """Whether the fault is among what was seen: with its code, in its layers and nowhere else, each with its cause."""
    mine = [one for one in found if one.code == pain.code]
    layers = {one.layer for one in mine}
    is_there = bool(layers) and layers <= pain.layers if pain.is_spotty else layers == pain.layers
    return is_there and layers == {one.layer for one in mine if pain.cause in one.words}


def pain(row, name, code, cause, layers=None, wirings=WIRINGS, is_spotty=False):
    """Add run(wiring, is_faulty, around) to the table, once for each wiring; by default it is found at all norms."""

    def register(run):
        for wiring in wirings:
            at = NORMS[wiring] if layers is None else layers[wiring] if isinstance(layers, dict) else layers
            title = f"{name}, {getattr(wiring, '__name__', wiring)}"

            def bound(is_faulty, around, wiring=wiring):
                return run(wiring, is_faulty, around)

            PAINS.append(Pain(row, title, code, frozenset(at), cause, is_spotty, bound))
        return run

    return register


# ---- the loops, by row


@pain(1, "a momentum so small that the statistics have not arrived", "NK102", "too few steps")
def _(wiring, is_faulty, around):
    model, batches = wiring(momentum=0.001 if is_faulty else 0.1), data()
    optimizer = train(model, batches, around=around)
    return Trained(model, batches, optimizer)


@pain(2, "a backbone frozen by requires_grad", "NK202", "")
def _(wiring, is_faulty, around):
    model, batches = wiring(), data()
    train(model, batches)
    layers = list(model.children())
    for layer in layers[:-1]:
        layer.requires_grad_(False)
    if not is_faulty:
        nk.freeze(model, inplace=True)
    optimizer = train(model, batches, steps=8, parameters=list(layers[-1].parameters()), around=around)
    return Trained(model, batches, optimizer)


@pain(3, "no running statistics", "NK201", "it stores none")
def _(wiring, is_faulty, around):
    model, batches = wiring(track_running_stats=not is_faulty), data()
    optimizer = train(model, batches, around=around)
    return Trained(model.eval(), batches, optimizer)


def pooled():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))


@pain(4, "a last batch of one example", "NK107", "", {pooled: ["2"], plain: NORMS[plain]}, [pooled, plain])
def _(wiring, is_faulty, around):
    model, examples = wiring(), 65 if is_faulty else 66
    optimizer = train(model, data(), around=around)
    found = TensorDataset(torch.randn(examples, 3, 8, 8), torch.randint(4, (examples,)))
    return Trained(model, DataLoader(found, batch_size=16), optimizer)


class BlockCheckpointed(Residual):
    """Only the features are recomputed."""

    def forward(self, x):
        kept = checkpoint(self.features, x, use_reentrant=False)
        return self.head(kept.mean((2, 3)))


class WholeCheckpointed(nn.Module):
    """All of a network is recomputed, by torch's older way."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.body = plain(norm)

    def forward(self, x):
        return checkpoint(self.body, x.requires_grad_(), use_reentrant=True)


_CHECKPOINTED = {BlockCheckpointed: NORMS[Residual], WholeCheckpointed: ["body.2", "body.5"]}


@pain(5, "activation checkpointing", "NK205", "activation checkpointing", _CHECKPOINTED, list(_CHECKPOINTED))
def _(wiring, is_faulty, around):
    model, batches = wiring(), data()
    if not is_faulty:
        model = nk.convert(model, "batch").model
    optimizer = train(model, batches, steps=20, around=around)
    return Trained(model, [(x.detach(), y) for x, y in batches], optimizer)


@pain(6, "accumulated gradients", "NK206", "accumulated")
def _(wiring, is_faulty, around):
    model, batches, every = wiring().train(), data(32, size=8 if is_faulty else 16), 4 if is_faulty else 1
    optimizer = sgd(model.parameters())
    with around(model, optimizer):
        for number, (x, y) in enumerate(batches):
            (F.cross_entropy(model(x), y) / every).backward()
            if (number + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    return Trained(model, batches[:8], optimizer)


class ActivatedNorm(nn.BatchNorm2d):
    """A subclass with an activation, as timm and others have it."""

    def __init__(self, num_features):
        super().__init__(num_features)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x))


class DoubledNorm(nn.BatchNorm2d):
    """A subclass that does something nobody can know of."""

    def forward(self, x):
        return 2 * super().forward(x).sigmoid()


def of_activated():
    return Residual(norm=ActivatedNorm)


def of_doubled():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, bias=False), DoubledNorm(8), nn.Conv2d(8, 8, 3, bias=False), DoubledNorm(8)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )


_SUBCLASSED = {of_activated: NORMS[Residual], of_doubled: ["1", "3"]}


@pain(7, "torch's conversion to SyncBatchNorm of a subclass", "convert", "", _SUBCLASSED, list(_SUBCLASSED))
def _(wiring, is_faulty, around):
    """What convert says of the layers that torch's converter would ruin: kept with what they do, or refused."""
    model, batches = wiring(), data()
    if not is_faulty:
        for name, layer in list(model.named_modules()):
            if isinstance(layer, nn.BatchNorm2d):
                model.set_submodule(name, nn.BatchNorm2d(8))
    optimizer = train(model, batches, around=around)
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nk.NormkitWarning)  # of what is refused: it is in skipped as well
        done = nk.convert(model, "sync", example=batches[0][0])
    said = [Seen("convert", change.layer, str(change)) for change in done.skipped]
    said += [Seen("convert", change.layer, str(change)) for change in done.changed if "kept" in change.why]
    torchs = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)) if is_faulty else model
    return Trained(torchs, batches, optimizer, said)


_AVERAGED = {wiring: [f"module.{name}" for name in names] for wiring, names in NORMS.items()}


@pain(8, "SWA weights with the buffers of the model", "NK102", "EMA or SWA", _AVERAGED, is_spotty=True)
def _(wiring, is_faulty, around):
    model, batches = wiring(), data()
    average = AveragedModel(model)  # copies buffers, averages parameters
    optimizer = train(model, batches, rate=0.5, each=average.update_parameters, around=around)
    if not is_faulty:
        update_bn(batches, average)
    return Trained(average.eval(), batches, optimizer)


@pain(8, "EMA weights with the buffers of the beginning", "NK101", "EMA or SWA")
def _(wiring, is_faulty, around):
    model, batches = wiring(), data()
    average = copy.deepcopy(model)

    def update(model):
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.05)

    optimizer = train(model, batches, each=update, around=around)
    if not is_faulty:
        update_bn(batches, average)
    return Trained(average.eval(), batches, optimizer)


@pain(9, "an infinite batch whose step was skipped", "NK103", "by batch 30")
def _(wiring, is_faulty, around):
    """The loss is not finite, so that the loop skips the step, as a GradScaler does; the statistics have it already."""
    model, batches = wiring().train(), data(40)
    if is_faulty:
        batches[30][0][2] = torch.inf
    optimizer = sgd(model.parameters())
    with around(model, optimizer):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if loss.isfinite():
                loss.backward()
                optimizer.step()
    return Trained(model, batches[:8], optimizer)


@pain(10, "a ported momentum of 0.99", "NK104", "0.99")
def _(wiring, is_faulty, around):
    model, batches = wiring(momentum=0.99 if is_faulty else 0.01), data()
    optimizer = train(model, batches, around=around)
    return Trained(model, batches, optimizer)


@pain(10, "weights reloaded into another eps", "NK502", "eps")
def _(wiring, is_faulty, around):
    model, batches = wiring(eps=1e-3), data()
    optimizer = train(model, batches, around=around)
    reloaded, said = wiring(eps=1e-5 if is_faulty else 1e-3).train(), []
    reloaded.load_state_dict(model.state_dict())  # as the user does it: without a word
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        nk.save(model, path)
        try:
            nk.load(wiring(eps=1e-5 if is_faulty else 1e-3).train(), path)
        except nk.MismatchError as error:
            said = [Seen(error.code, layer, str(error)) for layer in error.layers]
    return Trained(reloaded, batches, optimizer, said)


@pain(18, "soft labels by the model itself, under no_grad", "NK204", "under no_grad")
def _(wiring, is_faulty, around):
    model, batches = wiring().train(), data()
    optimizer = sgd(model.parameters())
    with around(model, optimizer):
        for x, y in batches:
            with torch.no_grad(), nullcontext() if is_faulty else nk.no_updates(model):
                soft = model(x + 1).softmax(1)
            optimizer.zero_grad()
            out = model(x)
            (F.cross_entropy(out, y) + 0.1 * F.mse_loss(out.softmax(1), soft)).backward()
            optimizer.step()
    return Trained(model, batches, optimizer)


@pain(18, "an attack in training mode", "NK204", "thrown away")
def _(wiring, is_faulty, around):
    model, batches = wiring().train(), data()
    optimizer = sgd(model.parameters())
    with around(model, optimizer):
        for x, y in batches:
            near = x.clone().requires_grad_()
            with nullcontext() if is_faulty else nk.no_updates(model):
                gradient = torch.autograd.grad(F.cross_entropy(model(near), y), near)[0]
            optimizer.zero_grad()
            F.cross_entropy(model(x + 0.1 * gradient.sign()), y).backward()
            optimizer.step()
    return Trained(model, batches, optimizer)


@pain(19, "80% of the weights pruned after training", "NK102", "pruning")
def _(wiring, is_faulty, around):
    model, batches = wiring(), data()
    optimizer = train(model, batches, around=around)
    for layer in model.modules():
        if is_faulty and isinstance(layer, nn.Conv2d | nn.Linear):
            prune.l1_unstructured(layer, "weight", 0.8)
            prune.remove(layer, "weight")
    return Trained(model, batches, optimizer)


class Sequences(nn.Module):
    """A norm over padded sequences, before a mean or a recurrent layer."""

    def __init__(self, is_recurrent):
        super().__init__()
        width = 1 if is_recurrent else 3
        self.conv, self.norm = nn.Conv1d(6, 8, width, padding=width // 2), nn.BatchNorm1d(8)
        self.rest = nn.GRU(8, 8, batch_first=True) if is_recurrent else None
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        x = x.mean(2) if self.rest is None else self.rest(x.transpose(1, 2))[0][:, -1]
        return self.head(x)


def recurrent():
    return Sequences(is_recurrent=True)


def convolutional():
    return Sequences(is_recurrent=False)


@pain(20, "padding is counted", "NK109", "", ["norm"], [recurrent, convolutional])
def _(wiring, is_faulty, around):
    batches = []
    for _ in range(8):
        mask = (torch.arange(12) < torch.randint(4, 12, (16, 1))).float()
        batches.append((torch.randn(16, 6, 12) * (mask[:, None] if is_faulty else 1.0), torch.randint(4, (16,))))
    model = wiring()
    optimizer = train(model, batches, around=around)
    return Trained(model, batches, optimizer)


@pain(21, "real and fake batches in turns", "NK108", "", is_spotty=True)
def _(wiring, is_faulty, around):
    real, fake = data(), [(1.5 * x - 3, y) for x, y in data()]
    if is_faulty:
        batches = [batch for pair in zip(real, fake, strict=True) for batch in pair]
    else:
        pairs = zip(real, fake, strict=True)
        batches = [(torch.cat([a[0][:8], b[0][:8]]), torch.cat([a[1][:8], b[1][:8]])) for a, b in pairs]
    model = wiring()
    optimizer = train(model, batches, around=around)
    return Trained(model, batches[:8], optimizer)


def _clients(wiring, batches, around):
    """A server's model, and three that were trained from it, on data of different scale."""
    server, clients = wiring(), []
    for number in range(3):
        clients.append(copy.deepcopy(server))
        train(clients[-1], [(x * (1 + number), y) for x, y in batches], around=around)
    with torch.no_grad():
        for parts in zip(server.parameters(), *(c.parameters() for c in clients), strict=True):
            parts[0].copy_(sum(parts[1:]) / 3)
    return server, clients


@pain(22, "federated: only parameters are averaged", "NK101", "which no batch has updated")
def _(wiring, is_faulty, around):
    batches = data()
    server, _ = _clients(wiring, batches, around)
    if not is_faulty:
        server = nk.recalibrate(server, batches).model
    return Trained(server, batches)


@pain(22, "federated: buffers are added and subtracted", "NK103", "negative")
def _(wiring, is_faulty, around):
    batches = data()
    server, clients = _clients(wiring, batches, around)
    weights = (1, 1, -3) if is_faulty else (1 / 3, 1 / 3, 1 / 3)
    with torch.no_grad():
        for parts in zip(server.buffers(), *(c.buffers() for c in clients), strict=True):
            parts[0].copy_(sum(w * part for w, part in zip(weights, parts[1:], strict=True)))
    return Trained(server, batches)
