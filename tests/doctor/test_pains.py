"""Faults as users meet them: a training loop, then a model that is worse than it should be. Each in two wirings."""

import pytest
import torch
from torch.nn import functional as F

import normkit as nk
from support.pains import NORMS, PAINS, WIRINGS, data, is_named, seen, train

pytestmark = pytest.mark.deep
wirings = pytest.mark.parametrize("wiring", WIRINGS, ids=lambda w: w.__name__)
pains = pytest.mark.parametrize("pain", PAINS, ids=str)

ROWS = {*range(1, 11), *range(18, 23)}


def examined(model, batches, code, **options):
    found = nk.examine(model, batches, F.cross_entropy, **options).findings
    return {one.layer: one for one in found if one.code == code}


@pains
def test_the_fault_is_found_with_its_layer_and_its_cause(pain):
    found = seen(pain)
    assert is_named(pain, found), found


@pains
def test_the_loop_without_the_fault_is_not_blamed_for_it(pain):
    assert [one for one in seen(pain, is_faulty=False) if one.code == pain.code] == []


def test_every_complaint_has_two_wirings():
    assert {pain.row for pain in PAINS} == ROWS
    assert all(len([pain for pain in PAINS if pain.row == row]) >= 2 for row in ROWS)


@wirings
def test_an_ordinary_run_is_healthy(wiring):
    model, batches = wiring(), data()
    optimizer = train(model, batches)
    for mode in (True, False):
        diagnosis = nk.examine(model.train(mode), batches, F.cross_entropy, optimizer)
        assert diagnosis.ok, [str(one) for one in diagnosis.findings]


@wirings
def test_statistics_that_have_not_arrived_are_an_error(wiring):
    model, batches = wiring(momentum=0.001), data()
    train(model, batches)
    found = examined(model, batches, "NK102")
    assert found
    assert all(one.evidence["cause"] == "few-steps" and one.severity == "error" for one in found.values())


@wirings
def test_the_batch_that_poisons_the_statistics_is_named_by_examine(wiring):
    model, batches = wiring(), data()
    train(model, batches)
    bad = (batches[5][0].clone(), batches[5][1])
    bad[0][2] = torch.inf
    with torch.no_grad():
        model.train()(bad[0])
    named = examined(model, [*batches[:3], bad], "NK103")
    assert named[NORMS[wiring][0]].severity == "error"
    assert named[NORMS[wiring][0]].evidence["batch"] == 3
