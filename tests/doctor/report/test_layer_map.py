import pytest

from normkit.doctor.report.layer_map import LARGEST_ROW, heat, layer_map, legend
from support import diagnoses


def rows_of(names, findings=()):
    return layer_map([diagnoses.layer(name) for name in names], findings)


def hugging_face_names():
    stages = [(stage, block) for stage, blocks in enumerate((3, 4, 6, 3)) for block in range(blocks)]
    of_blocks = [
        f"resnet.encoder.stages.{stage}.layers.{block}.layer.{i}.normalization"
        for stage, block in stages
        for i in range(3)
    ]
    return ["resnet.embedder.embedder.normalization", *of_blocks]


@pytest.mark.parametrize(("names", "titles"), [
    (diagnoses.resnet50_names(), ["", "layer1", "layer2", "layer3", "layer4"]),
    (hugging_face_names(), ["resnet.embedder.embedder", *(f"resnet.encoder.stages.{i}" for i in range(4))]),
    (["a.bn", "b.bn", "c.bn"], [""]),
    ([""], [""]),
    ([str(i) for i in range(60)], [""]),
    ([], []),
], ids=["torchvision", "transformers", "few", "root", "flat", "none"])  # fmt: skip
def test_rows_are_parts_of_the_model(names, titles):
    rows = rows_of(names)
    assert [row.title for row in rows] == titles
    assert [cell.name for row in rows for cell in row.cells] == [name or "the model itself" for name in names]
    if names and "." in names[-1]:
        assert max(len(row.cells) for row in rows) <= LARGEST_ROW


def test_a_label_is_what_its_row_does_not_say():
    of_layer3 = rows_of(diagnoses.resnet50_names())[3]
    assert [cell.label for cell in of_layer3.cells[:4]] == ["0.bn1", "0.bn2", "0.bn3", "0.downsample.1"]


@pytest.mark.parametrize(("share", "color"), [
    (None, 0), (-0.2, 0), (0.0, 0), (0.009, 0), (0.01, 1), (0.1, 2), (0.3, 3), (0.5, 4), (1.2, 4),
])  # fmt: skip
def test_colors_follow_shares(share, color):
    assert heat(share) == color


def test_the_legend_names_every_color():
    assert legend() == [(0, "under 1%"), (1, "1% to 5%"), (2, "5% to 20%"), (3, "20% to 50%"), (4, "50% and more")]


def test_a_cell_has_its_share_and_its_findings():
    info = diagnoses.finding("NK301", "redundant-bias", "info", "bn1")
    (row,) = rows_of(["bn1", "bn2"], [info, diagnoses.stale("bn1", 0.5), diagnoses.stale("bn1", 0.5)])
    first, second = row.cells
    assert (first.severity, first.codes) == ("error", ["NK301", "NK102"])
    assert (second.severity, second.codes) == (None, [])
    assert first.id != second.id
