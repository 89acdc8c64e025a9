from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import normkit as nk

EPS = float(np.finfo(np.float64).eps)
NAN = float("nan")


def moments_of(values, about=0.0):
    """Mean and biased variance of values (n, C), in numpy, about a point close to them: no digits are lost."""
    if len(values) == 0:
        return empty_moments(*values.shape[1:])
    near = values - about
    return nk.Moments(torch.tensor(about + near.mean(0)), torch.tensor(near.var(0)), len(values))


def with_tensor_count(m):
    return m._replace(count=torch.full_like(m.mean, m.count, dtype=torch.int64))


def random_moments(count, channels=3):
    mean, spread = torch.randn(2, channels, dtype=torch.float64)
    return nk.Moments(mean, spread.square() + 0.1, count)


def empty_moments(channels=3):
    nothing = torch.full((channels,), NAN, dtype=torch.float64)
    return nk.Moments(nothing, nothing.clone(), 0)


def assert_close(actual, expected, *, mean_atol=0.0, var_atol=0.0, rtol=1e-13):
    torch.testing.assert_close(actual.mean, expected.mean, rtol=rtol, atol=mean_atol)
    torch.testing.assert_close(actual.var, expected.var, rtol=rtol, atol=var_atol)
    assert torch.equal(torch.as_tensor(actual.count), torch.as_tensor(expected.count))


def assert_same(actual, expected):
    """To the last bit."""
    assert_close(actual, expected, rtol=0.0)


@st.composite
def splits(draw):
    """Values (n, 2) around an offset, with a trend so that parts differ, cut anywhere: parts may be empty."""
    n = draw(st.sampled_from([1, 2, 13, 300, 5000]))
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=5)))
    offset = draw(st.sampled_from([0.0, 3.0, 1e8, -1e8]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = offset + np.linspace(0, 5, n)[:, None] + rng.normal(size=(n, 2))
    return offset, values, np.split(values, cuts)


@settings(max_examples=100)
@given(splits(), st.booleans())
def test_merged_parts_have_the_moments_of_the_whole(split, tensor_counts):
    offset, values, parts = split
    moments = [moments_of(part, about=offset) for part in parts]
    if tensor_counts:
        moments = [with_tensor_count(m) for m in moments]
    merged = reduce(nk.Moments.merge, moments)
    # A mean near 1e8 is known to 1.5e-8, and so is a gap between two of them, which multiplies the spread. Taking
    # E[x^2] - E[x]^2 instead would be off by about 1e16 * EPS, that is by more than the variance.
    rounding = 8 * len(parts) * EPS * (abs(offset) + 10)
    expected = moments_of(values, about=offset)
    assert_close(
        merged,
        with_tensor_count(expected) if tensor_counts else expected,
        mean_atol=rounding,
        var_atol=10 * rounding,
    )


# Exact in float32 as in float64, and zero rather than so small that squares or shares of it underflow.
numbers = st.floats(-1e6, 1e6, width=32).map(lambda v: v if abs(v) > 1e-3 else 0.0)
variances = numbers.map(abs)
counts = st.one_of(st.integers(1, 10), st.integers(1, 10**6), st.integers(1, 2**40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tensor_counts", [False, True])
@settings(max_examples=100)
@given(mean_a=numbers, var_a=variances, n_a=counts, mean_b=numbers, var_b=variances, n_b=counts)
def test_merge_is_as_exact_as_its_type_for_any_counts(dtype, tensor_counts, mean_a, var_a, n_a, mean_b, var_b, n_b):
    a = nk.Moments(torch.tensor([mean_a], dtype=dtype), torch.tensor([var_a], dtype=dtype), n_a)
    b = nk.Moments(torch.tensor([mean_b], dtype=dtype), torch.tensor([var_b], dtype=dtype), n_b)
    if tensor_counts:
        a, b = with_tensor_count(a), with_tensor_count(b)

    share = Fraction(n_b, n_a + n_b)
    gap = Fraction(mean_b) - Fraction(mean_a)
    mean = Fraction(mean_a) + gap * share
    var = (1 - share) * Fraction(var_a) + share * Fraction(var_b) + gap**2 * share * (1 - share)

    # Every term of the variance is positive, so nothing cancels and a few roundings are all there can be.
    eps = torch.finfo(dtype).eps
    for merged in (a.merge(b), b.merge(a)):
        assert merged.mean.item() == pytest.approx(float(mean), rel=0, abs=4 * eps * max(abs(mean_a), abs(mean_b)))
        assert merged.var.item() == pytest.approx(float(var), rel=8 * eps, abs=0)
        assert merged.count == n_a + n_b


@st.composite
def any_moments(draw):
    """Moments of one channel near one of few offsets; of no values now and then, which then hold NaN."""
    n = draw(st.one_of(st.just(0), counts))
    if n == 0:
        return empty_moments(1)
    mean = draw(st.sampled_from([0.0, 1e8])) + draw(st.floats(-10, 10))
    return nk.Moments(
        torch.tensor([mean], dtype=torch.float64), torch.tensor([draw(st.floats(0, 100))], dtype=torch.float64), n
    )


def assert_equal_up_to_rounding(left, right, *inputs):
    """Within a few roundings of the means, which enter the variance times their distance."""
    means = [m.mean.item() for m in inputs if m.count]
    if not means:
        assert left.count == right.count == 0
        return
    size, spread = max(map(abs, means)), max(means) - min(means)
    assert_close(left, right, mean_atol=16 * EPS * size, var_atol=16 * EPS * size * spread)


@settings(max_examples=100)
@given(any_moments(), any_moments(), any_moments(), st.booleans())
def test_merge_is_associative(a, b, c, tensor_counts):
    inputs = [with_tensor_count(m) for m in (a, b, c)] if tensor_counts else [a, b, c]
    x, y, z = inputs
    assert_equal_up_to_rounding(x.merge(y).merge(z), x.merge(y.merge(z)), *inputs)


@settings(max_examples=100)
@given(any_moments(), any_moments(), st.booleans())
def test_merge_is_commutative(a, b, tensor_counts):
    x, y = (with_tensor_count(a), with_tensor_count(b)) if tensor_counts else (a, b)
    assert_equal_up_to_rounding(x.merge(y), y.merge(x), x, y)


@pytest.mark.parametrize("as_count", [lambda m: m, with_tensor_count], ids=["int", "tensor"])
class TestMomentsOfNothing:
    def test_change_nothing_on_the_right(self, as_count):
        full = as_count(random_moments(7))
        assert_same(full.merge(as_count(empty_moments())), full)

    def test_change_nothing_on_the_left(self, as_count):
        full = as_count(random_moments(7))
        assert_same(as_count(empty_moments()).merge(full), full)

    def test_of_both_sides_stay_nothing(self, as_count):
        nothing = as_count(empty_moments()).merge(as_count(empty_moments()))
        full = as_count(random_moments(7))
        assert torch.as_tensor(nothing.count).eq(0).all()
        assert_same(nothing.merge(full), full)
        assert_same(full.merge(nothing), full)

    def test_leave_gradients_alone(self, as_count):
        x = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(2, 3, dtype=torch.float64)
        full = as_count(nk.Moments(x.mean(0), x.var(0, correction=0), 9))
        (expected,) = torch.autograd.grad((full.mean * weight[0] + full.var * weight[1]).sum(), x, retain_graph=True)
        merged = as_count(empty_moments()).merge(full).merge(as_count(empty_moments()))
        (actual,) = torch.autograd.grad((merged.mean * weight[0] + merged.var * weight[1]).sum(), x)
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-15)


def test_each_channel_may_be_empty_on_its_own():
    a, b = np.random.default_rng(5).normal(2.0, 3.0, size=(2, 8, 3))
    # Channel 0 has values on the left only, channel 1 on the right only, channel 2 on both sides.
    left, right = moments_of(a), moments_of(b)
    left.mean[1] = left.var[1] = right.mean[0] = right.var[0] = NAN
    left, right = left._replace(count=torch.tensor([8, 0, 8])), right._replace(count=torch.tensor([0, 8, 8]))
    both = moments_of(np.concatenate([a, b]))
    expected = nk.Moments(
        torch.stack([left.mean[0], right.mean[1], both.mean[2]]),
        torch.stack([left.var[0], right.var[1], both.var[2]]),
        torch.tensor([8, 8, 16]),
    )
    assert_close(left.merge(right), expected)
    assert_close(right.merge(left), expected)


@given(any_moments(), any_moments())
def test_counts_may_be_tensors_on_either_side(a, b):
    expected = with_tensor_count(a.merge(b))
    for left, right in [(a, with_tensor_count(b)), (with_tensor_count(a), b), map(with_tensor_count, (a, b))]:
        assert_equal_up_to_rounding(left.merge(right), expected, a, b)


def test_merge_leaves_its_operands_alone():
    a, b = random_moments(3), random_moments(5)
    before = [t.clone() for t in (a.mean, a.var, b.mean, b.var)]
    a.merge(b)
    assert all(map(torch.equal, before, (a.mean, a.var, b.mean, b.var)))


@pytest.mark.parametrize("as_count", [lambda m: m, with_tensor_count], ids=["int", "tensor"])
@pytest.mark.parametrize("n", [2, 3, 50])
def test_unbiased_var_has_bessels_correction(n, as_count):
    values = torch.randn(n, 3, dtype=torch.float64).numpy() + 4
    m = as_count(moments_of(values))
    torch.testing.assert_close(m.unbiased_var, torch.tensor(values.var(0, ddof=1)), rtol=1e-13, atol=0)


@pytest.mark.parametrize("as_count", [lambda m: m, with_tensor_count], ids=["int", "tensor"])
@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("var", [0.0, 2.0])
def test_unbiased_var_of_too_few_values_is_not_a_number_to_use(n, var, as_count):
    m = as_count(nk.Moments(torch.randn(3).double(), torch.full((3,), var, dtype=torch.float64), n))
    assert not m.unbiased_var.isfinite().any()


@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "as_momentum", [float, lambda m: torch.tensor(m, dtype=torch.float64)], ids=["float", "tensor"]
)
def test_ema_weights_the_new_value_with_the_momentum(momentum, as_momentum):
    stored, batch = random_moments(4), random_moments(20)
    new = nk.ema(stored, batch, as_momentum(momentum))
    torch.testing.assert_close(new.mean, (1 - momentum) * stored.mean + momentum * batch.mean, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(new.var, (1 - momentum) * stored.var + momentum * batch.var, rtol=1e-14, atol=0)


@pytest.mark.parametrize("count", [4, torch.tensor(4)], ids=["int", "tensor"])
def test_ema_counts_one_more_batch_and_writes_nothing(count):
    stored, batch = random_moments(count), random_moments(20)
    before = [t.clone() for t in (stored.mean, stored.var, batch.mean, batch.var)]
    assert nk.ema(stored, batch, 0.25).count == 5
    assert stored.count == 4
    assert all(map(torch.equal, before, (stored.mean, stored.var, batch.mean, batch.var)))


def batches_of(sizes):
    rng = np.random.default_rng(sum(sizes))
    # Batches around different means, or pooled and paper would hardly differ.
    return [rng.normal(rng.normal(0, 2), rng.uniform(0.5, 2), size=(n, 3)) for n in sizes]


SIZES = pytest.mark.parametrize("sizes", [(6, 6, 6), (2, 40, 7), (9,)], ids=["equal", "unequal", "one"])


@SIZES
def test_pooled_population_is_that_of_all_values(sizes):
    batches = batches_of(sizes)
    values = np.concatenate(batches)
    pooled = nk.population(map(moments_of, batches))  # pooled is the default, and any iterable will do
    expected = nk.Moments(torch.tensor(values.mean(0)), torch.tensor(values.var(0, ddof=1)), sum(sizes))
    assert_close(pooled, expected, mean_atol=1e-14)
    assert_same(nk.population(map(moments_of, batches), "pooled"), pooled)


@SIZES
def test_paper_population_averages_means_and_unbiased_variances(sizes):
    batches = batches_of(sizes)
    mean = np.mean([b.mean(0) for b in batches], axis=0)
    var = np.mean([b.var(0, ddof=1) for b in batches], axis=0)
    paper = nk.population(map(moments_of, batches), "paper")
    assert_close(paper, nk.Moments(torch.tensor(mean), torch.tensor(var), sum(sizes)), mean_atol=1e-14)


def test_paper_population_is_algorithm_2_for_batches_of_one_size():
    m = 6
    batches = batches_of([m] * 4)
    var = m / (m - 1) * np.mean([b.var(0) for b in batches], axis=0)
    paper = nk.population([moments_of(b) for b in batches], method="paper")
    torch.testing.assert_close(paper.var, torch.tensor(var), rtol=1e-13, atol=0)


@SIZES
@pytest.mark.parametrize("method", ["pooled", "paper"])
def test_population_takes_tensor_counts(sizes, method):
    moments = [moments_of(b) for b in batches_of(sizes)]
    expected = with_tensor_count(nk.population(moments, method))
    assert_close(nk.population([with_tensor_count(m) for m in moments], method), expected, mean_atol=1e-14)


def test_pooled_population_ignores_empty_batches():
    first, second = map(moments_of, batches_of((5, 8)))
    expected = nk.population([first, second])
    assert_same(nk.population([empty_moments(), first, empty_moments(), second]), expected)


@pytest.mark.parametrize("method", ["pooled", "paper"])
def test_population_of_no_batches_is_an_error(method):
    with pytest.raises(nk.ArgumentError, match="at least one batch; got none"):
        nk.population(iter([]), method)


def test_population_refuses_an_unknown_method():
    with pytest.raises(nk.ArgumentError, match=r"method must be \"pooled\" or \"paper\"; got 'mean'\."):
        nk.population([random_moments(5)], "mean")


def test_half_precision_moments_of_more_values_than_it_can_count():
    m = nk.Moments(torch.ones(1).half(), torch.ones(1).half(), 70_000)
    merged = m.merge(m)
    assert (merged.mean.item(), merged.var.item(), merged.count) == (1.0, 1.0, 140_000)


def test_the_papers_average_needs_batches_with_a_variance():
    one = nk.Moments(torch.ones(2), torch.zeros(2), 1)
    with pytest.raises(nk.ArgumentError, match=r"more than 1 value.*pooled"):
        nk.population([one], method="paper")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("keepdim", [True, False])
def test_pooled_along_a_dimension_is_merged_one_by_one(dim, keepdim):
    count = torch.randint(0, 5, (4, 3))
    count[:, 0] = 0  # one that has nothing anywhere
    mean, var = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64)
    parts = nk.Moments(torch.where(count > 0, mean, NAN), torch.where(count > 0, var, NAN), count)
    merged = reduce(nk.Moments.merge, (nk.Moments(*each) for each in zip(*(t.unbind(dim) for t in parts), strict=True)))
    pooled = parts.pooled(dim, keepdim)
    assert pooled.mean.shape == torch.empty(4, 3).sum(dim, keepdim=keepdim).shape
    pooled = nk.Moments(*(t.squeeze(dim) if keepdim else t for t in pooled))
    assert torch.equal(pooled.count, merged.count)
    counted = pooled.count > 0
    for found, expected in ((pooled.mean, merged.mean), (pooled.var, merged.var)):
        torch.testing.assert_close(found[counted], expected[counted], rtol=1e-12, atol=1e-13)
    equal = nk.Moments(mean, var, 5).pooled(dim, keepdim)
    each = nk.Moments(mean, var, torch.full((4, 3), 5)).pooled(dim, keepdim)
    assert equal.count == 5 * (4, 3)[dim]
    assert_close(equal._replace(count=each.count), each, mean_atol=1e-14, var_atol=1e-14)
