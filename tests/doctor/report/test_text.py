import pytest

from normkit.doctor.report.text import MOST_LAYERS, findings_text, plain_text
from support import diagnoses


def rows(text, code):
    """The first lines of a code's rows."""
    return [line for line in text.splitlines() if f" {code} " in line]


def test_it_says_how_much_was_found_and_what_it_costs():
    first, second, *_ = str(diagnoses.spoiled()).splitlines()
    assert first == "2 errors, 1 warning, 1 note in 53 norm layers, 8 batches, 4.2 s"
    assert second == "Loss: 0.31 in training mode, 2.302 in evaluation, 0.33 recalibrated."


def test_rows_stand_in_the_order_of_the_findings_with_layer_and_share():
    made = diagnoses.spoiled()
    lines = str(made).splitlines()
    found = [line for line in lines if line.startswith((" error", " warning", " info"))]
    assert [line.split()[:3] for line in found] == [[f.severity, f.code, f.layer] for f in made.findings]
    assert [line.split()[3] for line in found[:2]] == ["90%", "7%"]
    assert "stale-statistics" in found[0]


def test_every_remedy_stands_once():
    text = str(diagnoses.spoiled())
    assert text.count(diagnoses.RECALIBRATE) == 1
    assert "NK303: Move the dropout behind the norm." in text


def test_a_fault_of_all_layers_is_cut_short():
    text = str(diagnoses.everywhere(40))
    assert len([line for line in text.splitlines() if line.startswith(" error")]) == MOST_LAYERS
    assert f"NK102 stale-statistics: {40 - MOST_LAYERS} more." in text


def test_nothing_found_is_said():
    assert str(diagnoses.healthy()) == "Nothing was found in 3 norm layers, 8 batches, 4.2 s"


def test_a_distance_instead_of_a_loss():
    gap = {"measure": "distance", "training": 0.0, "evaluation": 3.25, "recalibrated": 0.01}
    text = str(diagnoses.diagnosis([], [], gap))
    assert "Outputs in evaluation are 3.25 of their standard deviations away from those in training mode" in text


def test_names_are_no_markup_and_what_is_not_finite_is_shown():
    assert "[red]" in str(diagnoses.hostile())
    assert "NaN in evaluation" in str(diagnoses.small())


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_its_width_and_no_letter_of_a_name_is_lost(width):
    name = "resnet.encoder.stages.2.layers.5.layer.1.normalization"
    text = plain_text(diagnoses.diagnosis([diagnoses.stale(name, 0.5)], [diagnoses.layer(name, 0.5, 1.0)]), width)
    assert max(map(len, text.splitlines())) <= width
    if width == 200:
        assert name[:36] in text


def test_a_root_that_is_a_norm_has_a_name():
    assert "the model itself" in str(diagnoses.diagnosis([diagnoses.stale("", 1.0)], [diagnoses.layer("")]))


def test_shares_are_those_of_statistics_alone():
    about_eps = diagnoses.finding("NK105", "epsilon-dominates", "warning", "bn")
    about_statistics = diagnoses.finding("NK101", "untrained-statistics", "error", "bn")
    text = str(diagnoses.diagnosis([about_statistics, about_eps], [diagnoses.layer("bn", 0.4)]))
    (of_statistics,), (of_eps,) = rows(text, "NK101"), rows(text, "NK105")
    assert "40%" in of_statistics
    assert "%" not in of_eps


def test_a_ledger_s_findings_have_the_same_table():
    stray = diagnoses.finding("NK204", "stray-update", "error", "bn", file="train.py", line=7)
    text = findings_text([stray], "8 steps, 2 layers with statistics")
    assert text.startswith("1 error in 8 steps, 2 layers with statistics\n")
    assert " error      NK204   bn " in text
