"""Remedies on models in random state: what they change, what they measure, and what they leave alone."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normkit as nk
from normkit.doctor.diagnosis import Diagnosis, Patient
from normkit.doctor.remedies import REMEDIES
from normkit.surgery.result import Surgery
from support import diagnoses
from support.case import randomize_
from support.model_state import assert_same, everything


def net():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return randomize_(model)


def batches(count=3):
    return [(2 * torch.randn(16, 3, 8, 8) + 1, torch.randint(5, (16,))) for _ in range(count)]


def diagnosed(model, *findings, loss=F.cross_entropy, given=None):
    return Diagnosis(list(findings), {}, Patient(model, batches() if given is None else given, loss))


def of(code, layer, remedy="Do it yourself."):
    return diagnoses.finding(code, "a-name", "error", layer, remedy=remedy)


def recalibrated(model, given):
    return nk.recalibrate(model, given).model.state_dict()


@pytest.mark.parametrize("code", ["NK101", "NK102", "NK103"])
def test_statistics_are_taken_from_the_batches(code):
    model, given = net(), batches()
    if code == "NK103":
        model[1].running_var[2] = math.nan
    cure = diagnosed(model, of(code, "1"), of(code, "4"), loss=None, given=given).cure()
    assert isinstance(cure, Surgery)
    expected = recalibrated(model, given)
    for name, value in cure.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    (step,) = cure.steps
    assert (step.codes, step.is_kept, cure.measure) == ((code,), True, "distance")
    assert step.after < step.before  # infinitely far before, where a statistic is NaN
    assert [change.layer for change in cure.changed] == ["1", "4"]
    assert all(change.why.startswith(code) for change in cure.changed)


def test_layers_that_are_right_keep_what_a_whole_training_has_averaged():
    given = batches()
    model = nk.recalibrate(net(), given).model.eval()
    model[4].num_batches_tracked.fill_(1000)
    with torch.no_grad():
        model[4].running_mean.mul_(1.001)
        model[1].running_mean.add_(3 * model[1].running_var.sqrt())
    cure = diagnosed(model, of("NK102", "1"), loss=None, given=given).cure()
    of_one, of_all = cure.steps
    assert (of_one.is_kept, of_all.is_kept) == (True, False)
    assert "taken back" in str(of_all)
    for name, value in model[4].state_dict().items():
        assert torch.equal(cure.model[4].state_dict()[name], value), name
    torch.testing.assert_close(cure.model[1].running_mean, recalibrated(model, given)["1.running_mean"])
    assert ([change.layer for change in cure.changed], list(cure.skipped)) == (["1"], [])


def test_layers_that_are_off_without_a_finding_are_taken_along_if_that_is_worth_it():
    model, given = net(), batches()
    cure = diagnosed(model, of("NK102", "1"), loss=None, given=given).cure()
    expected = recalibrated(model, given)
    assert cure.steps[-1].what.startswith("statistics of all layers")
    assert cure.steps[-1].is_kept
    assert {change.layer for change in cure.changed} == {"1", "4"}
    assert torch.equal(cure.model[4].running_var, expected["4.running_var"])


def test_the_loss_is_that_of_evaluation_before_and_after():
    model, given = net().train(), batches()
    findings = of("NK102", "1"), of("NK102", "4")
    cure = diagnosed(model, *findings, given=given, loss=lambda out, y: out.square().mean()).cure()

    def loss(model):
        with torch.no_grad():
            return sum(model.eval()(x).square().mean().item() for x, _ in given) / len(given)

    (step,) = cure.steps
    assert step.before == pytest.approx(loss(copy.deepcopy(model)), rel=1e-5)
    with_new = nk.recalibrate(model, given).model
    assert step.after == pytest.approx(loss(with_new), rel=1e-5)
    assert step.is_kept == (step.after <= step.before)


def test_what_makes_the_measure_worse_is_taken_back():
    model, given = net(), batches()
    goal = [copy.deepcopy(model).eval()(x).detach() for x, _ in given]
    rows = [(x, y) for (x, _), y in zip(given, goal, strict=True)]
    before = everything(model)
    findings = of("NK102", "1"), of("NK102", "4")
    cure = diagnosed(model, *findings, given=rows, loss=F.mse_loss).cure(inplace=True)
    assert_same(before, everything(model))
    (step,) = cure.steps
    assert step.before < 1e-10 < step.after
    assert not step.is_kept
    assert (list(cure.changed), cure.skipped[0].layer) == ([], "1")
    assert "it made the measure worse" in cure.skipped[0].why
    assert "taken back" in str(cure)


@pytest.mark.parametrize(("momentum", "turned"), [(0.9, 0.1), (0.99, 0.01), (0.999, 0.001)])
def test_a_momentum_is_turned_round(momentum, turned):
    model = net()
    for layer in (model[1], model[4]):
        layer.momentum = momentum
    cure = diagnosed(model, of("NK104", "1"), of("NK104", "4"), loss=None).cure()
    assert (cure.model[1].momentum, cure.model[4].momentum) == (turned, turned)
    assert cure.changed[-1].what == f"momentum {momentum:g} to {turned:g}"
    statistics, last = cure.steps  # those of the last batch are taken again
    assert statistics.after < statistics.before
    assert last.before == last.after == statistics.after


def test_a_norm_with_frozen_parameters_is_frozen_whole():
    model = net().train()
    model[4].requires_grad_(False)
    x = batches()[0][0]
    expected = copy.deepcopy(model).eval()(x)
    mended = diagnosed(model, of("NK202", "4")).cure().model
    kept = mended[4].running_mean.clone()
    mended.train()(x)
    assert torch.equal(mended[4].running_mean, kept)
    assert isinstance(mended[1], nn.BatchNorm2d)
    mended[1].load_state_dict(model[1].state_dict())
    torch.testing.assert_close(mended.eval()(x), expected)


def test_a_norm_that_learns_trains_as_the_model_does():
    model = net().train()
    model[4].eval()
    cure = diagnosed(model, of("NK203", "4")).cure(inplace=True)
    assert model[4].training
    assert cure.changed[0].what == "put into training mode"
    cure.undo()
    assert not model[4].training


def test_a_norm_in_evaluation_is_left_where_it_may_be_meant_so():
    model = net().train()
    model[4].eval().requires_grad_(False)
    before = everything(model)
    cure = diagnosed(model, of("NK203", "4", "Load first.")).cure(inplace=True)
    assert_same(before, everything(model))
    assert cure.skipped[0].why == "Load first."


def test_what_is_not_safe_is_skipped_with_its_remedy():
    model = net()
    before = everything(model)
    cure = diagnosed(model, of("NK106", "1", "Use larger batches."), of("NK504", None)).cure(inplace=True)
    assert_same(before, everything(model))
    assert [change.why for change in cure.skipped] == ["Use larger batches.", "Do it yourself."]
    assert (list(cure.changed), list(cure.steps)) == ([], [])
    assert "no finding has a remedy that is safe to apply" in str(cure)


def test_a_layer_that_a_remedy_does_not_reach_is_skipped():
    findings = of("NK202", "4"), of("NK102", "nowhere")
    cure = diagnosed(net().eval(), *findings, loss=None).cure()
    assert {(change.layer, change.what.split()[0]) for change in cure.skipped} == {
        ("4", "NK202"),
        ("nowhere", "NK102"),
    }


def test_on_a_copy_the_model_is_left_alone_and_undo_gives_it_back():
    model = net()
    model[1].momentum = 0.9
    before = everything(model)
    cure = diagnosed(model, of("NK102", "1"), of("NK104", "1"), loss=None).cure()
    assert_same(before, everything(model))
    assert model[1].momentum == 0.9
    assert cure.undo() is model


def test_in_place_undo_restores_every_bit():
    model = net().train()
    model[1].momentum = 0.9
    model[4].requires_grad_(False)
    before = everything(model)
    findings = of("NK102", "1"), of("NK104", "1"), of("NK202", "4")
    cure = diagnosed(model, *findings, loss=None).cure(inplace=True)
    assert cure.model is model
    assert {step.codes for step in cure.steps} == {("NK102", "NK104"), ("NK104",), ("NK202",)}
    cure.undo()
    assert_same(before, everything(model))
    assert (model[1].momentum, type(model[4])) == (0.9, nn.BatchNorm2d)


def test_batches_that_are_not_finite_are_said_and_change_nothing():
    model, bad = net(), torch.full((4, 3, 8, 8), math.inf)
    before = everything(model)
    cure = diagnosed(model, of("NK103", "1"), given=[(bad, torch.zeros(4).long())]).cure(inplace=True)
    assert_same(before, everything(model))
    assert "needs finite input" in cure.skipped[0].why
    assert not cure.steps[0].is_kept


def test_an_error_of_the_model_leaves_everything_as_it_was():
    model = net()
    before = everything(model)
    with pytest.raises(RuntimeError):
        diagnosed(model, of("NK102", "1"), given=[(torch.randn(4, 7, 8, 8), torch.zeros(4).long())]).cure(inplace=True)
    assert_same(before, everything(model))


def test_one_value_per_channel_is_cured_without_a_distance():
    model = randomize_(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    model[1].momentum = 0.99
    cure = diagnosed(model, of("NK104", "1"), given=[torch.randn(1, 3)], loss=None).cure()
    statistics, momentum = cure.steps
    assert (statistics.is_kept, momentum.is_kept) == (False, True)
    assert (momentum.before, cure.model[1].momentum) == (None, 0.01)


def test_a_last_batch_of_one_is_left_out():
    model, given = net(), batches()
    single = given[0][0][:1], given[0][1][:1]
    cure = diagnosed(model, of("NK102", "1"), of("NK102", "4"), given=[*given, single], loss=None).cure()
    expected = recalibrated(model, given)
    assert torch.equal(cure.model[1].running_var, expected["1.running_var"])


def test_it_says_what_each_remedy_did():
    text = str(diagnosed(net(), of("NK102", "1"), of("NK102", "4"), loss=None).cure())
    assert text.startswith("distance in evaluation, remedy by remedy:\n  NK102: statistics of the layers named")
    assert "changed 2, skipped 0" in text


def test_only_statistics_have_several_remedies():
    codes = [code for remedy in REMEDIES for code in remedy.codes]
    assert {code for code in codes if codes.count(code) > 1} == {"NK101", "NK102", "NK103", "NK104"}
