"""Loops with a fault and the same loops without it: watch finds the one, with its layer, and is silent on the other."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import normkit as nk
from support.loops import CLASSES, NORMS, at_norms, batches, codes, net, sgd, step, train


def watched(model, optimizer, loop):
    """Run a loop under watch, and return the ledger."""
    with nk.watch(model, optimizer=optimizer) as ledger:
        loop()
    assert ledger.stopped is None
    return ledger


# ---- NK204


def with_teacher(model, protect):
    """Every step asks the model itself, in training mode, for soft labels of other data."""
    optimizer = sgd(model)

    def loop():
        for (x, y), (other, _) in zip(batches(), batches(shift=1.0), strict=True):
            with protect(model), torch.no_grad():
                model(other)
            step(model, optimizer, x, y)

    return watched(model, optimizer, loop)


def as_it_is(model):
    return torch.no_grad()


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nk.BatchNorm2d])
def test_a_forward_under_no_grad_is_stray(norm):
    ledger = with_teacher(net(norm), as_it_is)
    assert codes(ledger) == at_norms("NK204")
    finding = ledger.findings[0]
    assert finding.evidence["writes"] == finding.evidence["trained"] == 6
    assert finding.evidence["file"] == __file__
    assert finding.evidence["line"] == with_teacher.__code__.co_firstlineno + 7
    assert finding.evidence["root"] == "Sequential"
    assert codes(with_teacher(net(norm), nk.no_updates)) == set()


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("forgotten", [True, False])
def test_an_evaluation_in_training_mode_is_stray(forgotten, gradients):
    model = net()
    optimizer = sgd(model)

    def loop():
        for _ in range(2):
            train(model, optimizer, batches(4))
            if not forgotten:
                model.eval()
            with torch.set_grad_enabled(gradients):
                for x, y in batches(3):
                    F.cross_entropy(model(x), y).item()
            model.train()

    ledger = watched(model, optimizer, loop)
    assert codes(ledger) == (at_norms("NK204") if forgotten else set())
    if forgotten:
        assert {finding.evidence["use"] for finding in ledger.findings} == {"no backward" if gradients else "no grad"}
        assert {finding.evidence["writes"] for finding in ledger.findings} == {6}


def test_an_evaluation_by_the_line_that_trains_is_stray():
    model = net()
    optimizer = sgd(model)

    def epoch(data, is_training):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            if is_training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def loop(mode):
        for _ in range(2):
            epoch(batches(4), True)
            model.train(mode)
            epoch(batches(3), False)
            model.train()

    assert codes(watched(model, optimizer, lambda: loop(True))) == at_norms("NK204")
    assert codes(watched(model, optimizer, lambda: loop(False))) == set()


@pytest.mark.parametrize("by", ["backward", "grad"])
@pytest.mark.parametrize("mode", [True, False])
def test_an_attack_is_stray(by, mode):
    model = net()
    optimizer = sgd(model)

    def attacked(x, y):
        x = x.clone().requires_grad_()
        loss = F.cross_entropy(model(x), y)
        gradient = torch.autograd.grad(loss, x)[0] if by == "grad" else (loss.backward(), x.grad)[1]
        return (x + 0.1 * gradient.sign()).detach()

    def loop():
        for x, y in batches():
            model.train(mode)
            hard = attacked(x, y)
            model.train()
            step(model, optimizer, hard, y)

    ledger = watched(model, optimizer, loop)
    assert codes(ledger) == (at_norms("NK204") if mode else set())
    if mode:
        assert {finding.evidence["use"] for finding in ledger.findings} == {"discarded"}


# ---- NK205


class Checkpointed(nn.Module):
    def __init__(self, body, reentrant):
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x):
        return checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nk.BatchNorm2d])
def test_checkpointing_counts_a_batch_twice_in_torch_s_layers_only(norm, reentrant):
    model = Checkpointed(net(norm), reentrant)
    optimizer = sgd(model)
    ledger = watched(model, optimizer, lambda: train(model, optimizer, batches()))
    faults = {("NK205", f"body.{name}") for name in NORMS} if norm is nn.BatchNorm2d else set()
    assert codes(ledger) == faults
    assert {finding.evidence["cause"] for finding in ledger.findings} == ({"recompute"} if faults else set())
    assert {finding.evidence["times"] for finding in ledger.findings} == ({2} if faults else set())


class Reusing(nn.Module):
    """One norm after each of two convolutions, or two norms."""

    def __init__(self, is_shared):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, bias=False), nn.Conv2d(6, 6, 3, bias=False)
        self.bn = nn.BatchNorm2d(6)
        self.other = self.bn if is_shared else nn.BatchNorm2d(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.bn(self.first(x)).relu()
        x = self.other(self.second(3 * x + 2)).relu()
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_reused_layer_is_written_twice(is_shared):
    model = Reusing(is_shared)
    optimizer = sgd(model)
    ledger = watched(model, optimizer, lambda: train(model, optimizer, batches()))
    assert codes(ledger) == ({("NK205", "bn")} if is_shared else set())
    assert [finding.evidence["cause"] for finding in ledger.findings] == (["reused"] if is_shared else [])


class Pairs(nn.Module):
    """Two views of the same pictures through one encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = net()

    def forward(self, x):
        return self.encoder(x) + self.encoder(x + 0.1 * torch.randn_like(x))


def test_a_layer_that_is_reused_on_alike_inputs_is_worth_knowing_only():
    model = Pairs()
    optimizer = sgd(model)
    ledger = watched(model, optimizer, lambda: train(model, optimizer, batches()))
    assert codes(ledger) == set()
    assert {(f.code, f.severity, f.layer) for f in ledger.findings} == {
        ("NK205", "info", f"encoder.{n}") for n in NORMS
    }


@pytest.mark.parametrize("is_protected", [True, False])
def test_a_second_forward_on_the_same_batch_is_a_second_write(is_protected):
    """As sharpness-aware minimization does it: gradients at one place, and again at another."""
    model = net()
    optimizer = sgd(model)

    def loop():
        for x, y in batches():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            moves = [0.01 * parameter.grad for parameter in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            optimizer.zero_grad()
            with nk.no_updates(model) if is_protected else torch.enable_grad():
                F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)
            optimizer.step()

    ledger = watched(model, optimizer, loop)
    assert ("NK205" in {code for code, _ in codes(ledger)}) is not is_protected
    if not is_protected:
        assert codes(ledger) == at_norms("NK205")


# ---- NK206


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("norm", ["batch", "accumulated"])
def test_accumulation_is_seen_in_layers_that_do_not_accumulate(norm, micro_batches):
    model = net() if norm == "batch" else net(nk.AccumulatedBatchNorm2d, micro_batches=micro_batches)
    optimizer = sgd(model)

    def loop():
        for number, (x, y) in enumerate(batches(12, size=6)):
            F.cross_entropy(model(x), y).backward()
            if (number + 1) % micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()

    ledger = watched(model, optimizer, loop)
    is_faulty = norm == "batch" and micro_batches > 1
    assert codes(ledger) == (at_norms("NK206") if is_faulty else set())
    if is_faulty:
        evidence = ledger.findings[0].evidence
        assert (evidence["batches"], evidence["batch_size"], evidence["steps"]) == (3, 6, 4)


# ---- NK103, NK104, NK108, NK202


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_the_batch_that_brings_nan_is_named(value):
    model = net()
    optimizer = sgd(model)
    data = batches()
    if value is not None:
        data[3][0][5, 1, 2, 2] = value
    ledger = watched(model, optimizer, lambda: train(model, optimizer, data))
    assert codes(ledger) == (at_norms("NK103") if value is not None else set())
    for finding in ledger.findings:
        assert (finding.evidence["step"], finding.evidence["batch"]) == (3, 3)
        assert finding.evidence["nonfinite_inputs"] == 1


@pytest.mark.parametrize(("momentum", "is_faulty"), [(0.99, True), (0.9, True), (0.1, False), (1.0, False)])
def test_a_momentum_of_the_other_convention_is_seen(momentum, is_faulty):
    model = net(momentum=momentum)
    optimizer = sgd(model)
    ledger = watched(model, optimizer, lambda: train(model, optimizer, batches(3)))
    assert codes(ledger) == (at_norms("NK104") if is_faulty else set())


def discriminator_steps(model, optimizer, is_apart, count=12):
    """Real and fake in two forwards, or in one."""
    for (real, _), (fake, _) in zip(batches(count), batches(count, shift=1.5, scale=0.5), strict=True):
        optimizer.zero_grad()
        if is_apart:
            F.softplus(-model(real).mean(1)).mean().backward()
            F.softplus(model(fake).mean(1)).mean().backward()
        else:
            out = model(torch.cat([real, fake])).mean(1)
            (F.softplus(-out[: len(real)]).mean() + F.softplus(out[len(real) :]).mean()).backward()
        optimizer.step()


@pytest.mark.parametrize("is_apart", [True, False])
def test_batches_of_two_distributions_are_seen(is_apart):
    model = net()
    optimizer = sgd(model)
    ledger = watched(model, optimizer, lambda: discriminator_steps(model, optimizer, is_apart))
    found = codes(ledger)
    assert (("NK108", "1") in found) is is_apart
    if not is_apart:
        assert found == set()
        return
    assert ("NK206", "1") not in found
    (finding,) = (finding for finding in ledger.findings if (finding.code, finding.layer) == ("NK108", "1"))
    first = discriminator_steps.__code__.co_firstlineno
    assert sorted(finding.evidence["lines"]) == [[f"{__file__}:{first + 5}"], [f"{__file__}:{first + 6}"]]
    assert finding.evidence["shares"] == [0.5, 0.5]


@pytest.mark.parametrize("how", ["requires_grad", "left out of the optimizer", "frozen", "trained"])
def test_frozen_layers_whose_statistics_move_are_seen(how):
    model = net()
    backbone, head = model[:6], model[7]
    if how == "requires_grad":
        backbone.requires_grad_(False)
    if how == "frozen":
        nk.freeze(model, inplace=True)
        backbone.requires_grad_(False)
    optimizer = sgd(model if how == "trained" else head)
    ledger = watched(model, optimizer, lambda: train(model, optimizer, batches()))
    assert codes(ledger) == (set() if how in ("frozen", "trained") else at_norms("NK202"))
    assert all(finding.evidence["drift"] > 0.01 for finding in ledger.findings)


def test_gamma_and_beta_alone_may_be_frozen():
    """The statistics have to follow the weights, which learn."""
    model = net()
    for name in NORMS:
        model[int(name)].requires_grad_(False)
    optimizer = sgd(model)
    assert codes(watched(model, optimizer, lambda: train(model, optimizer, batches()))) == set()


# ---- NK307


@pytest.mark.parametrize("decay", [0.0, 1e-4])
@pytest.mark.parametrize("rate", [0.01, 300.0])
def test_weights_that_run_away_are_seen(rate, decay):
    model = nn.Sequential(nn.Linear(16, 12, bias=False), nn.ReLU(), nn.BatchNorm1d(12), nn.Linear(12, CLASSES))
    groups = [
        {"params": [model[0].weight], "lr": rate, "weight_decay": decay},
        {"params": [*model[2].parameters(), *model[3].parameters()], "lr": 0.01},
    ]
    optimizer = torch.optim.SGD(groups)
    start = model[0].weight.norm().item()
    data = [(torch.randn(24, 16), torch.randint(CLASSES, (24,))) for _ in range(20)]
    ledger = watched(model, optimizer, lambda: train(model, optimizer, data))
    growth = model[0].weight.norm().item() / start
    assert growth < 1.3 if rate < 1 else growth > 4  # the two sides that must be told apart
    assert codes(ledger) == ({("NK307", "0")} if rate > 1 and not decay else set())
    for finding in ledger.findings:
        assert finding.evidence["growth"] == pytest.approx(growth, rel=1e-6)
        assert finding.evidence["norm"] == "2"


# ---- loops without a fault


def plain(model, optimizer):
    train(model, optimizer, batches())


def gradient_reset_late(model, optimizer):
    """The gradient of the step before is there while the model runs, and is not set to None."""
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def averaged_copies(model, optimizer):
    """An average of the weights in a copy, which is evaluated: the copy is not the model."""
    average = copy.deepcopy(model)
    for x, y in batches():
        step(model, optimizer, x, y)
        average.load_state_dict(model.state_dict())
        with torch.no_grad():
            average(x)
        copy.deepcopy(model)(x)


def lower_precision(model, optimizer):
    """Autocast, and a scaler that finds infinity and skips steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for number, (x, y) in enumerate(batches(8)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * (float("inf") if number in (0, 1, 5) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()


def closures(model, optimizer):
    for x, y in batches():

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def several_losses(model, optimizer):
    """One forward, two backwards."""
    for x, y in batches():
        optimizer.zero_grad()
        out = model(x)
        F.cross_entropy(out, y).backward(retain_graph=True)
        out.square().mean().backward()
        optimizer.step()


def two_views(model, optimizer):
    """Two forwards of unlike batches of one distribution, and one backward for both."""
    for (x, _), (z, _) in zip(batches(), batches(), strict=True):
        optimizer.zero_grad()
        (model(x) - model(z)).square().mean().backward()
        optimizer.step()


def another_s_step(model, optimizer):
    """A generator learns by what the discriminator, which is watched, says of its pictures."""
    generator = nn.Conv2d(3, 3, 1)
    other = sgd(generator)
    for (real, _), (noise, _) in zip(batches(), batches(), strict=True):
        fake = generator(noise)
        optimizer.zero_grad()
        out = model(torch.cat([real, fake.detach()])).mean(1)
        (F.softplus(-out[:12]).mean() + F.softplus(out[12:]).mean()).backward()
        optimizer.step()
        other.zero_grad()
        F.softplus(-model(fake).mean(1)).mean().backward()
        other.step()


def estimated_anew(model, optimizer):
    train(model, optimizer, batches())
    torch.optim.swa_utils.update_bn(batches(3), model)


def interrupted(model, optimizer):
    """A batch of another shape fails in the middle of the network, and the loop goes on."""
    for number, (x, y) in enumerate(batches()):
        if number == 2:
            with pytest.raises(RuntimeError):
                model(torch.randn(12, 3, 10, 10))
        step(model, optimizer, x, y)


LOOPS = [plain, gradient_reset_late, averaged_copies, lower_precision, closures, several_losses, two_views,
         another_s_step, estimated_anew, interrupted]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, pytest.param(nk.BatchNorm2d, marks=pytest.mark.deep)])
def test_ordinary_loops_are_left_alone(loop, norm):
    model = net(norm)
    optimizer = sgd(model)
    ledger = watched(model, optimizer, lambda: loop(model, optimizer))
    assert codes(ledger) == set()
    assert ledger.ok
    assert ledger.steps > 0
    assert all(account.writes for account in ledger.accounts.values())


# ---- what is refused


def test_bad_arguments_are_refused_and_nothing_is_attached():
    model = net()
    with pytest.raises(nk.ArgumentError, match=r"watch needs a torch.nn.Module; got a list"):
        nk.watch([model])
    with pytest.raises(nk.ArgumentError, match=r"watch needs a torch.optim.Optimizer.*; got a Sequential"):
        nk.watch(model, model)
    with pytest.raises(nk.ArgumentError, match="no rule has a code that begins with 'NK9'"):
        nk.watch(model, select="NK9")
    with pytest.raises(nk.ArgumentError, match="cannot look into a scripted Sequential"):
        nk.watch(torch.jit.script(net()))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())


def test_rules_are_chosen():
    model = net(momentum=0.99)
    for options, expected in (({"select": "NK1"}, at_norms("NK104")), ({"ignore": ["NK104"]}, set())):
        with nk.watch(model, **options) as ledger:
            model(batches(1)[0][0]).sum().backward()
            ledger.step()
        assert codes(ledger) == expected
