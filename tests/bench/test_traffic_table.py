import pytest

from normkit.bench.traffic_table import Counted, TrafficRow, count_traffic


@pytest.fixture(scope="module")
def rows():
    return count_traffic()


def test_every_call_is_counted_in_both_modes_and_types(rows):
    calls = {row.call for row in rows}
    assert calls >= {"BN + relu", "BN + gelu", "GroupNorm(32)", "InstanceNorm2d", "LayerNorm", "RMSNorm"}
    combinations = {(row.call, row.mode, row.dtype) for row in rows}
    assert len(rows) == len(combinations) == len(calls) * 4


def test_torchs_own_step_of_batch_norm_and_relu_is_what_is_known(rows):
    (row,) = (row for row in rows if (row.call, row.mode, row.dtype) == ("BN + relu", "training", "float32"))
    assert (row.torch.passes, row.torch.bytes) == (4, 10 * row.input_bytes)


def test_counting_is_the_same_each_time(rows):
    assert count_traffic() == rows


@pytest.mark.parametrize(
    ("ours", "no_more"), [((4, 100), True), ((3, 90), True), ((5, 100), False), ((4, 101), False), ((3, 101), False)]
)
def test_no_more_means_neither_passes_nor_bytes(ours, no_more):
    row = TrafficRow("BN", "training", "float32", 10, Counted(*ours), Counted(4, 100))
    assert row.is_no_more is no_more
    assert row.as_json()["ours"] == {"passes": ours[0], "bytes": ours[1]}
