"""Plans: what the C++ loops take, and how they see memory."""

import pytest
import torch

from normkit.kernels import core, plans
from normkit.kernels.plans import Layout, Plan
from normkit.kernels.reference import Recipe

pytestmark = pytest.mark.skipif(core.WHY_NOT is not None, reason=str(core.WHY_NOT))

BATCH = Recipe((0, 2, 3), 1e-5, None, True, (1, 6, 1, 1))


@pytest.mark.parametrize("last", [False, True], ids=["planes", "rows"])
def test_a_batch_is_seen_as_one_population_of_channels(last):
    x = torch.randn(4, 6, 5, 3).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    found = plans.plan(x, BATCH)
    assert isinstance(found, Plan)
    assert found.layout == Layout(int(last), 1, 4, 6, 1, 15)
    assert (found.statistics, found.values, found.shape) == (6, 60, (6,))


def test_lines_are_seen_as_a_population_each():
    found = plans.plan(torch.randn(4, 5, 8), Recipe((2,), 1e-5))
    assert isinstance(found, Plan)
    assert (found.statistics, found.values, found.shape) == (20, 8, (4, 5))


@pytest.mark.parametrize("shape", [(4, 7, 5, 3), (4, 6, 5)], ids=["channels", "rank"])
def test_a_batch_norm_has_no_plan_for_another_shape(shape):
    x, terms = torch.randn(4, 6, 5, 3), ((6,), (4,), 1e-5, None)
    assert plans.of_batch(x.dtype, x.shape, x.stride(), (6,), (6,), *terms) is not None
    x = torch.randn(shape)
    assert plans.of_batch(x.dtype, x.shape, x.stride(), (6,), (6,), *terms) is None


def test_a_divided_input_is_put_together_again():
    x = torch.randn(2, 6, 5)
    found = plans.of_groups(x.dtype, x.shape, x.stride(), (6,), (6,), 3, 6, 1e-5, None)
    assert found is not None
    assert found.divided(x).shape == (2, 3, 2, 5)
    assert torch.equal(found.undivided(found.divided(x)), x)
