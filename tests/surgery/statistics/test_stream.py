"""A stream is predicted batch by batch, followed where it shifts, and begun anew where that goes wrong."""

import copy
import tracemalloc
import warnings

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.surgery.statistics.adapt import adapt
from normkit.surgery.statistics.collect import BatchError
from normkit.surgery.statistics.recalibrate import recalibrate
from normkit.surgery.statistics.stream import KEPT_RESETS, adapt_stream
from support.case import randomize_
from support.model_state import assert_same, everything
from support.ranks import run_ranks
from support.shifting_stream import CLASSES, FEATURES, ShiftingStream, ToOneClass, evaluated, live_tensors
from support.warned import warned


@pytest.fixture(scope="module")
def source():
    return ShiftingStream(80)


@pytest.fixture
def model(source):
    return copy.deepcopy(source.model)


def reset(stream, batch):
    """What a stream says of a batch at which it is reset, and must warn."""
    with pytest.warns(nk.NormkitWarning, match=f"batch {stream.batches}: the model was reset: "):
        return stream(batch)


# ---- what it computes


class ByHand:
    """The average of batches' statistics as a sum with explicit weights, and a norm in evaluation, in plain torch."""

    def __init__(self, layer, momentum, prior):
        self.layer, self.momentum, self.prior = copy.deepcopy(layer), momentum, prior
        self.batches = []

    def __call__(self, x):
        self.batches.append((x.mean(0), x.var(0), len(x)))
        weights = [n * (1 - self.momentum) ** age for age, (_, _, n) in enumerate(reversed(self.batches))][::-1]
        total = sum(weights)
        kept = self.prior / (self.prior + total)
        layer = self.layer
        self.mean, self.var = (
            kept * own + (1 - kept) * sum(w * batch[i] for w, batch in zip(weights, self.batches, strict=True)) / total
            for i, own in enumerate((layer.running_mean, layer.running_var))
        )
        return layer.weight * (x - self.mean) / (self.var + layer.eps).sqrt() + layer.bias


@pytest.mark.parametrize("prior", [0.0, 7.5])
def test_statistics_are_the_faded_averages_of_batches_and_of_what_was_stored(prior):
    model = randomize_(nn.Sequential(nn.BatchNorm1d(3), nk.BatchNorm1d(3)).double())
    momentum = 0.05 + 0.9 * torch.rand(()).item()
    first, second = (ByHand(layer, momentum, prior) for layer in model)
    stream = adapt_stream(model, momentum=momentum, prior=prior, logits=None)
    for size in (5, 2, 9, 30, 4):
        x = torch.randn(size, 3).double() * 3 + torch.randn(3)
        expected = second(first(x))
        torch.testing.assert_close(stream(x), expected, rtol=1e-9, atol=1e-9)
        for layer, own in zip(stream.model, (first, second), strict=True):
            torch.testing.assert_close(layer.running_mean, own.mean, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(layer.running_var, own.var, rtol=1e-9, atol=1e-9)
    assert [int(layer.num_batches_tracked) for layer in stream.model] == [5, 5]
    assert stream.batches == 5


def test_the_first_batch_is_predicted_as_after_recalibrating_on_it(source, model):
    x = source.inputs()[0]
    torch.testing.assert_close(adapt_stream(model)(x), evaluated(recalibrate(model, [x], exact=True).model)(x))


def test_maps_and_norms_of_both_libraries():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nk.BatchNorm2d(4, activation="relu"), nn.Flatten(2))
    stream = adapt_stream(randomize_(model), momentum=1.0, logits=None)
    for _ in range(2):
        x = torch.randn(3, 2, 6, 6) + 2
        y = stream(x)
        inner = stream.model[0](x).detach()
        torch.testing.assert_close(stream.model[1].running_mean, inner.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(y, stream.model.eval()(x).detach())


def test_a_norm_is_a_model_too():
    stream, x = adapt_stream(randomize_(nn.BatchNorm1d(3).double()), logits=None), torch.randn(6, 3).double()
    stream(x)
    torch.testing.assert_close(stream.model.running_mean, x.mean(0), rtol=1e-9, atol=1e-9)


def test_a_norm_that_two_places_share_takes_both_as_one_batch():
    norm = randomize_(nn.BatchNorm1d(3).double())

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            self.norm(x)
            return self.norm(x + 5)

    stream = adapt_stream(Twice(), momentum=0.3, logits=None)
    given = [torch.randn(6, 3).double(), torch.randn(4, 3).double()]
    for x in given:
        stream(x)
    both = [torch.cat([x, x + 5]) for x in given]
    weights = [0.7 * 12, 8]
    expected = sum(w * x.mean(0) for w, x in zip(weights, both, strict=True)) / sum(weights)
    torch.testing.assert_close(stream.model.norm.running_mean, expected, rtol=1e-9, atol=1e-9)


def test_tent_steps_with_the_statistics_of_the_stream_held_fixed(source, model):
    """Two steps of plain gradient descent, against autograd on a copy in evaluation with these statistics."""
    rate = 0.1
    stream = adapt_stream(model, "tent", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate))
    plain = adapt_stream(model, momentum=0.1)
    for number, x in enumerate(source.inputs()[:2]):
        twin = copy.deepcopy(stream.model).eval()
        y = stream(x)
        if number == 0:
            assert torch.equal(y, plain(x))  # predicted before the step
        for layer, other in zip(twin, stream.model, strict=True):
            layer._buffers.update({name: buffer.clone() for name, buffer in other._buffers.items()})
        affine = [twin[0].weight, twin[0].bias, twin[2].weight, twin[2].bias]
        chances = twin(x).softmax(1)
        grads = torch.autograd.grad(-(chances * chances.log()).sum(1).mean(), affine)
        new = [stream.model[i].get_parameter(name) for i in (0, 2) for name in ("weight", "bias")]
        for mine, old, grad in zip(new, affine, grads, strict=True):
            torch.testing.assert_close(mine, old - rate * grad, rtol=1e-4, atol=1e-6)
    rest = {key: value for key, value in model.state_dict().items() if key[0] in "14"}
    assert all(torch.equal(stream.model.state_dict()[key], value) for key, value in rest.items())


def test_a_stream_that_shifts_is_followed(source, model):
    still = source.accuracy(evaluated(model))
    whole = source.accuracy(evaluated(adapt(model, source.inputs()).model))
    stream = adapt_stream(model)
    followed = source.accuracy(stream)
    assert min(followed) > 0.9
    assert all(mine > theirs + 0.05 for mine, theirs in zip(followed, whole, strict=True))
    assert all(mine > theirs + 0.05 for mine, theirs in zip(followed, still, strict=True))
    assert not stream.resets


# ---- what it leaves


@pytest.mark.parametrize("method", ["adabn", "tent"])
@pytest.mark.parametrize("inplace", [False, True])
def test_undo_modes_hooks_and_gradients(source, model, method, inplace):
    model.train()
    model[2].weight.requires_grad_(False)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    grads, before = [p.grad for p in model.parameters()], everything(model)
    stream = adapt_stream(model, method, inplace=inplace)
    for x in source.inputs()[:3]:
        assert not stream(x).requires_grad
    assert (stream.model is model) == inplace
    assert not torch.equal(stream.model[0].running_mean, before[0]["0.running_mean"])
    assert everything(stream.model)[1:] == before[1:]
    if inplace:
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert stream.undo() is model
    assert_same(before, everything(model))


def test_reset_begins_anew_bit_for_bit(source, model):
    x = source.inputs()
    stream = adapt_stream(model, "tent", prior=9)
    before = [stream(one) for one in x[:3]]
    stream.reset()
    assert_same(everything(model), everything(stream.model))
    assert all(torch.equal(stream(one), old) for one, old in zip(x[:3], before, strict=True))
    assert (stream.batches, len(stream.resets)) == (6, 0)


@pytest.mark.parametrize("method", ["adabn", "tent"])
def test_a_batch_that_fails_adds_nothing(source, model, method):
    def forward(model, batch):
        found = model(batch)
        if len(batch) == 5:
            raise OSError("gone")
        return found

    x = source.inputs()
    stream, other = adapt_stream(model, method, forward), adapt_stream(model, method)
    stream(x[0]), other(x[0])
    before = everything(stream.model)
    with pytest.raises(BatchError, match=r"batch 1 \(the first is 0\) failed: OSError: gone The model is as it was"):
        stream(x[1][:5])
    assert_same(before, everything(stream.model))
    assert torch.equal(stream(x[2]), other(x[2]))


def test_a_single_value_per_channel_is_predicted_and_teaches_nothing(source, model):
    x, single = source.inputs()[0], source.inputs()[1][:1]
    stream = adapt_stream(model)
    assert torch.equal(stream(single), evaluated(model)(single))
    stream(x)
    before = everything(stream.model)
    torch.testing.assert_close(stream(single), evaluated(stream.model)(single))
    assert_same(before, everything(stream.model))


# ---- what it watches


def provoked(stream, x, good, within):
    """The batch at which a collapse after some good steps was seen; it must be one of the next few."""
    for number, one in enumerate(x):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stream(one)
        if caught:
            assert good <= number <= good + within
            assert "predictions collapsed, from entropy" in str(caught[0].message)
            return number
    pytest.fail("no collapse was seen")


def test_a_collapse_is_caught_and_the_source_takes_over(source, model):
    good, x = 12, source.inputs()
    stream = adapt_stream(model, "tent", optimizer=lambda parameters: ToOneClass(parameters, good))
    number = provoked(stream, x, good, 12)
    assert [one.batch for one in stream.resets] == [number]
    assert "to entropy" in stream.resets[0].why
    assert_same(everything(model), everything(stream.model))
    assert stream.batches == number + 1
    unwatched = adapt_stream(model, "tent", optimizer=lambda parameters: ToOneClass(parameters, good), collapse=0)
    for one in x[: good + 1]:
        last = unwatched(one)
    assert len(last.argmax(1).unique()) == 1  # it was a collapse
    assert not unwatched.resets


def test_a_second_collapse_right_after_a_reset_is_caught_too(source, model):
    steps = iter([12, 1])
    stream = adapt_stream(model, "tent", optimizer=lambda parameters: ToOneClass(parameters, next(steps)))
    provoked(stream, source.inputs(), 12, 12)
    assert provoked(stream, source.inputs(), 1, 12) > 1
    assert len(stream.resets) == 2


def test_nan_and_infinity_reset(source, model):
    x = source.inputs()
    stream = adapt_stream(model)
    stream(x[0])
    bad = x[1].clone()
    bad[2, 1] = torch.nan
    found = reset(stream, bad)
    torch.testing.assert_close(found, evaluated(model)(bad), equal_nan=True)
    assert stream.resets[0].batch == 1
    assert "0 (BatchNorm1d) needs finite input" in stream.resets[0].why
    assert_same(everything(model), everything(stream.model))
    assert torch.equal(stream(x[2]), adapt_stream(model)(x[2]))
    wild = adapt_stream(model, "tent", optimizer=lambda p: torch.optim.SGD(p, lr=torch.inf), collapse=0)
    reset(wild, x[0])
    assert "gamma or beta became NaN or infinite" in wild.resets[0].why
    assert_same(everything(model), everything(wild.model))


def test_a_drift_that_is_too_far_resets(source, model):
    stream = adapt_stream(model, max_drift=0.01)
    found = reset(stream, source.inputs()[0])
    assert torch.equal(found, evaluated(model)(source.inputs()[0]))
    assert "0 (BatchNorm1d): drift" in stream.resets[0].why
    assert "at most 0.01 was allowed" in stream.resets[0].why
    far = adapt_stream(model, max_drift=1e6)
    far(source.inputs()[0])
    assert not far.resets


@pytest.mark.filterwarnings("ignore::normkit.NormkitWarning")
def test_no_more_than_the_latest_resets_are_kept(source, model):
    stream = adapt_stream(model, max_drift=0.01)
    x = source.inputs()[0][:4]
    for _ in range(KEPT_RESETS + 5):
        stream(x)
    assert [one.batch for one in stream.resets] == list(range(5, KEPT_RESETS + 5))


# ---- outputs and layers of other kinds


def test_logits_are_found_and_outputs_keep_their_shape(source, model):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = copy.deepcopy(model)

        def forward(self, x):
            return {"features": x, "logits": self.inner(x)}

    stream = adapt_stream(Named(), "tent", logits=lambda output: output["logits"])
    other, x = adapt_stream(model, "tent"), source.inputs()
    for one in x[:2]:
        found = stream(one)
        assert torch.equal(found["logits"], other(one))
        assert not found["logits"].requires_grad


def test_frozen_norms_are_skipped_and_those_without_statistics_step(source):
    layers = [nk.FrozenBatchNorm1d(FEATURES), nn.Linear(FEATURES, 6), nn.LayerNorm(6), nn.Linear(6, CLASSES)]
    model = nn.Sequential(*layers)
    stream = adapt_stream(model, "tent", lr=0.01)
    stream(source.inputs()[0])
    assert not torch.equal(stream.model[2].weight, model[2].weight)
    assert [(one.layer, one.why) for one in stream.skipped] == [("0", "is frozen; unfreeze the model first")]
    with pytest.raises(nk.ArgumentError, match="needs norms that store the statistics of batches"):
        adapt_stream(model)


def test_only_names_layers(source, model):
    stream = adapt_stream(model, only="2")
    stream(source.inputs()[0])
    assert torch.equal(stream.model[0].running_mean, model[0].running_mean)
    assert not torch.equal(stream.model[2].running_mean, model[2].running_mean)
    whitened = nn.Sequential(nn.BatchNorm1d(4), nk.WhitenedBatchNorm1d(4))
    assert warned(adapt_stream, whitened, logits=None).skipped[0].layer == "1"


# ---- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "adbn"}, r'got \'adbn\'\. Did you mean "adabn"\?'),
        ({"momentum": 0}, "momentum must lie above 0 and be 1 at most; got 0"),
        ({"momentum": 1.5}, "momentum must lie above 0"),
        ({"prior": -1}, "prior must be 0 examples or more; got -1"),
        ({"lr": 0}, "lr must be positive; got 0"),
        ({"collapse": 2}, r"collapse must be in 0\.\.1; got 2"),
        ({"window": 0}, "window must be 1 prediction or more, a whole number; got 0"),
        ({"window": 2.5}, "a whole number; got 2.5"),
        ({"only": "nothing"}, "only='nothing' fits no layer"),
    ],
)
def test_bad_arguments_change_nothing(model, options, message):
    before = everything(model)
    with pytest.raises(nk.ArgumentError, match=message):
        adapt_stream(model, **{"inplace": True} | options)
    assert_same(before, everything(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "tent", "logits": None}, "needs logits"),
        ({"logits": lambda output: output[:, 0]}, r"logits must return a tensor \(N, classes\)"),
        ({"method": "tent", "forward": lambda model, x: model(x).detach()}, "does not depend on gamma and beta"),
    ],
)
def test_outputs_that_do_not_fit_change_nothing(source, model, options, message):
    before = everything(model)
    stream = adapt_stream(model, inplace=True, **options)
    with pytest.raises(nk.ArgumentError, match=message):
        stream(source.inputs()[0])
    assert_same(before, everything(model))


# ---- several processes


def synced(x_of_rank, is_synced):
    """A stream in the same random state in every process, and what it stores after its batches."""
    torch.manual_seed(5)
    model = randomize_(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4)).double())
    if is_synced:
        nk.convert(model, "sync", inplace=True)
    stream = adapt_stream(model, momentum=0.3, prior=5)
    for _ in range(4):
        stream(x_of_rank(torch.randn(12, 3).double() * 2 + 1))
    bad = torch.full((12, 3), torch.nan).double()
    with pytest.warns(nk.NormkitWarning, match="the model was reset"):
        stream(x_of_rank(bad))
    stream(x_of_rank(torch.randn(12, 3).double()))
    return stream.model.state_dict()


def stream_on_one_rank(rank, world, folder):
    state = synced(lambda x: x[rank::world], is_synced=True)
    torch.save(state, folder / f"rank{rank}.pt")
    model = nk.convert(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4)), "sync").model
    with pytest.raises(nk.ArgumentError, match="steps on the batches of one process"):
        adapt_stream(model, "tent")


@pytest.mark.deep
def test_synchronized_norms_average_over_all_ranks(tmp_path):
    run_ranks(stream_on_one_rank, 2, tmp_path, tmp_path)
    whole = synced(lambda x: x, is_synced=False)
    for rank in (0, 1):
        for key, value in torch.load(tmp_path / f"rank{rank}.pt").items():
            torch.testing.assert_close(value, whole[key], rtol=1e-9, atol=1e-9)


# ---- a long one


@pytest.mark.deep
@pytest.mark.parametrize("method", ["adabn", "tent"])
def test_a_thousand_batches_with_a_shift_in_flat_memory(method):
    source = ShiftingStream(1000)
    still = source.accuracy(evaluated(source.model))
    whole = source.accuracy(evaluated(adapt(source.model, source.inputs()).model))
    stream, at = adapt_stream(source.model, method), {}

    def predict(x):
        found = stream(x)
        if stream.batches in (200, 1000):
            at[stream.batches] = live_tensors(), tracemalloc.get_traced_memory()[0]
        return found

    tracemalloc.start()
    try:
        followed = source.accuracy(predict)
    finally:
        tracemalloc.stop()
    assert at[200][0] == at[1000][0]  # not one tensor, not one byte more
    assert at[1000][1] - at[200][1] < 50_000  # of Python's own; 800 batches of 1 KB each would be far more
    assert min(followed) > 0.95
    assert all(mine > theirs + 0.05 for mine, theirs in zip(followed, whole, strict=True))
    assert all(mine > theirs + 0.05 for mine, theirs in zip(followed, still, strict=True))
    assert not stream.resets


@pytest.mark.deep
def test_a_collapse_in_a_thousand_batches_costs_little():
    source, good, right = ShiftingStream(1000), 300, []
    steps = iter([good, 2000])  # after the reset, no more than ordinary ones
    stream = adapt_stream(source.model, "tent", optimizer=lambda parameters: ToOneClass(parameters, next(steps)))
    for number, (x, y) in enumerate(source):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = stream(x)
        right.append((found.argmax(1) == y).float().mean().item())
        if caught:
            after = number + 1
    assert [one.batch for one in stream.resets] == [after - 1]
    assert good <= after - 1 <= good + 12
    assert sum(right[good:after]) / (after - good) < 0.6
    assert sum(right[after:]) / (1000 - after) > 0.95
