import json

from bench_record import write_records
from normkit.bench import Plan, Progress, Result, Spread, choose
from normkit.bench.case import Effort
from record_markdown import record_as_markdown

EFFORT = Effort(rounds=25, model_rounds=9, compiles=False)
LAYER = choose(["batch/BN + ReLU 256,512"])[0]
NETWORKS = choose(["networks/resnet18*64x64 batch 16"])


def result(case, threads, **ratios):
    spreads = {name: Spread(value - 0.1, value, value + 0.1) for name, value in ratios.items()}
    return Result(case.family, case.name, threads, case.facts(), ratios=spreads)


def records(tmp_path, *results, isa=None):
    progress = Progress(Plan([LAYER], [1, 2], EFFORT, isa=isa), tmp_path / "results.json")
    for each in results:
        progress.add(each)
    progress.write(complete=True)
    return {path.stem: json.loads(path.read_text()) for path in write_records(tmp_path / "results.json", tmp_path)}


def test_cases_are_rows_and_threads_columns(tmp_path):
    found = records(tmp_path, result(LAYER, 1, eager=2.0, compile=3.0), result(LAYER, 2, eager=1.0))
    (table,) = found["speed-batch"]["tables"]
    assert table["columns"] == ["case", "1 thread", "compile, 1 thread", "2 threads"]
    assert table["rows"] == [["BN + ReLU 256,512", "2.00 (1.90 to 2.10)", "3.00 (2.90 to 3.10)", "1.00 (0.90 to 1.10)"]]


def test_training_and_evaluation_of_a_network_share_a_row(tmp_path):
    training, evaluation = NETWORKS
    found = records(tmp_path, result(training, 1, eager=1.1), result(evaluation, 1, eager=0.9))
    (table,) = found["speed-networks"]["tables"]
    assert table["columns"] == ["case", "training, 1 thread", "evaluation, 1 thread"]
    assert table["rows"] == [["resnet18, 64x64, batch 16", "1.10 (1.00 to 1.20)", "0.90 (0.80 to 1.00)"]]


def test_figures_say_what_is_wanted_and_what_was_missed(tmp_path):
    found = records(tmp_path, result(LAYER, 1, eager=2.0), result(LAYER, 2, eager=1.0))
    (table,) = found["speed-figures"]["tables"]
    rows = {row[0]: row[1:] for row in table["rows"]}
    assert rows["BN + ReLU training, 2-D fp32, over eager"] == [
        "at least 1.25",
        "2.00 (worst 2.00)",
        "1.00 (worst 1.00) **missed**",
    ]


def test_an_instruction_set_that_was_asked_for_is_in_the_name(tmp_path):
    found = records(tmp_path, result(LAYER, 1, eager=2.0), isa="avx2")
    assert set(found) == {"speed-batch-avx2", "speed-figures-avx2"}
    assert "25 interleaved rounds" in record_as_markdown(found["speed-batch-avx2"])
