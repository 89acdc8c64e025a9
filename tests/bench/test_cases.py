import pytest
import torch
from torch import nn

from normkit import layers
from normkit.bench import QUICK, Effort, choose
from normkit.bench.case import Result
from normkit.bench.cases import CASES, GROUPS, batch_norm_relu, case_id
from normkit.bench.layer_case import LayerCase
from normkit.errors import ArgumentError

TINY = Effort(rounds=2, model_rounds=2, compiles=False)

# The rows of the kernels' own table, which every figure about BN + ReLU is over.
TWELVE = [
    "32,64,56,56",
    "64,256,14,14",
    "128,64,32,32",
    "8,2048,7,7",
    "256,512",
    "32,64,56,56 channels_last",
    "64,256,14,14 channels_last",
    "128,64,32,32 channels_last",
    "8,2048,7,7 channels_last",
    "32,64,56,56 bf16",
    "32,64,56,56 channels_last bf16",
    "256,512 bf16",
]


def group(name):
    return [case for case in CASES if case.group == name]


@pytest.mark.parametrize(("name", "mode"), [("bn", "training"), ("bn-eval", "evaluation")])
def test_the_twelve_cases_are_there(name, mode):
    assert [case.name for case in group(name)] == TWELVE
    assert {case.mode for case in group(name)} == {mode}


def test_every_case_has_a_name_of_its_own():
    names = [case_id(case) for case in CASES]
    assert len(set(names)) == len(names)
    assert GROUPS == ("bn", "bn-eval", "small", "networks", "family", "untuned", "memory", "models")


def test_the_quick_benchmark_has_something_of_every_group():
    assert {case.group for case in choose([], quick=True)} == set(GROUPS)
    assert len(choose([], quick=True)) < len(choose([], quick=False)) == len(CASES)


def test_cases_are_chosen_by_group_and_by_pattern():
    assert choose(["bn"], quick=False) == group("bn")
    assert [case.name for case in choose(["bn/*bf16"], quick=True)] == [n for n in TWELVE if n.endswith("bf16")]
    # Asked for by name, a case needs no place in the quick benchmark.
    assert choose(["networks"], quick=True) == group("networks")


def test_a_pattern_without_a_case_is_an_error():
    with pytest.raises(ArgumentError, match=r"needs a group \(bn, bn-eval, .*got 'bm', which no case matches"):
        choose(["bn", "bm"], quick=False)


@pytest.mark.parametrize("case", [c for c in CASES if isinstance(c, LayerCase)], ids=case_id)
def test_both_layers_take_the_case_and_agree(case):
    """On fewer examples, the layers that are compared compute the same thing."""
    fewer = tuple(min(4, n) if d == 0 else n for d, n in enumerate(case.shape))
    x = LayerCase(case.group, fewer, {}, layout=case.layout, dtype=case.dtype).tensor()
    y, expected = (case.layers[who]().train(case.mode != "evaluation")(x) for who in ("ours", "eager"))
    tolerance = {torch.float32: 1e-3, torch.bfloat16: 0.05}[case.dtype]
    torch.testing.assert_close(y, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_training_is_measured_beside_copy_and_triad(layout):
    case = LayerCase("bn", (4, 3, 5, 5), batch_norm_relu((4, 3, 5, 5)), layout=layout)
    result = case.measure(TINY)
    assert result.errors == {}
    assert result.seconds.keys() == {"ours", "eager", "limit"}
    assert result.ratios.keys() == {"eager"}
    assert result.multiples.keys() == {"ours", "eager"}
    assert all(s.low <= s.median <= s.high for s in [*result.seconds.values(), *result.ratios.values()])
    assert result.facts["layout"] == ("NCHW" if layout == "contiguous" else layout)
    assert result.facts["input_bytes"] == 4 * 3 * 5 * 5 * 4


def test_the_limit_of_a_backward_is_a_triad_on_top_of_the_copy(monkeypatch):
    def times(steps, rounds):
        return {name: [{"copy": 1.0, "triad": 2.0}.get(name, 6.0)] * rounds for name in steps}

    monkeypatch.setattr("normkit.bench.layer_case.interleave", times)
    for mode, limit in (("training", 3.0), ("forward", 1.0), ("evaluation", 1.0)):
        result = LayerCase("bn", (4, 3), batch_norm_relu((4, 3)), mode=mode).measure(TINY)
        assert result.seconds["limit"].median == limit
        assert result.multiples["ours"].median == 6.0 / limit


def test_each_mode_does_what_it_says():
    seen = []

    class Watched(nn.Identity):
        def forward(self, input):
            seen.append((self.training, torch.is_grad_enabled(), input.requires_grad, input.grad))
            return input * 1

    for mode, expected in (
        ("training", (True, True, True, None)),
        ("forward", (True, True, True, None)),
        ("evaluation", (False, False, False, None)),
    ):
        seen.clear()
        LayerCase("bn", (4, 3), {"ours": Watched}, mode=mode).measure(TINY)
        assert set(seen) == {expected}


def test_contestants_have_inputs_of_their_own():
    seen = {}

    def watched(name):
        class Watched(nn.Identity):
            def forward(self, input):
                seen.setdefault(name, set()).add(input.data_ptr())
                return input * 1

        return Watched

    LayerCase("bn", (4, 3), {name: watched(name) for name in ("ours", "eager")}).measure(TINY)
    assert len(seen["ours"]) == len(seen["eager"]) == 1
    assert seen["ours"] != seen["eager"]


def test_who_fails_is_reported_and_the_others_measured():
    broken = {"ours": lambda: layers.BatchNorm1d(3, activation="no such"), "eager": nn.Identity}
    result = LayerCase("bn", (4, 3), broken).measure(TINY)
    assert "ArgumentError" in result.errors["ours"]
    assert result.seconds.keys() == {"eager", "limit"}
    assert result.ratios == {}


def test_compilers_take_part_only_where_asked():
    contestants = batch_norm_relu((4, 3), compiled=True)
    assert list(contestants) == ["ours", "eager", "compile", "compile-leaky"]
    assert LayerCase("bn", (4, 3), contestants).measure(TINY).seconds.keys() == {"ours", "eager", "limit"}
    assert not QUICK.compiles


def test_results_survive_json():
    result = LayerCase("bn", (4, 3), batch_norm_relu((4, 3))).measure(TINY)
    assert Result.from_json(result.as_json()) == result
