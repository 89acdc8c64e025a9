from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from normkit import layers
from normkit.bench import FAMILIES, QUICK, Effort, choose
from normkit.bench.case import Result
from normkit.bench.cases import ON_REQUEST, all_cases, case_id
from normkit.bench.contestants import batch_norm
from normkit.bench.layer_case import Input, LayerCase
from normkit.errors import ArgumentError
from support.depth import thinned
from support.pages import ROOT

TINY = Effort(rounds=2, model_rounds=2, compiles=False)
SMALL = Input((4, 3))

# The rows of the kernels' own table.
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


def family(name):
    return [case for case in all_cases() if case.family == name]


def names(cases):
    return [case.name for case in cases]


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_the_twelve_inputs_of_the_kernels_and_ten_more(mode):
    cases = [case for case in family("batch") if (case.title, case.mode) == ("BN + ReLU", mode)]
    assert [str(case.input) for case in cases[:12]] == TWELVE
    assert len(cases) == 22


def test_residuals_and_no_activation_are_measured_on_the_same_inputs():
    inputs = [case.input for case in family("batch") if case.name.startswith("BN + ReLU evaluation")]
    for title in ("BN + add + ReLU", "BN"):
        assert [case.input for case in family("batch") if case.title == title] == inputs


def test_every_case_has_a_name_of_its_own():
    ids = [case_id(case) for case in all_cases()]
    assert len(set(ids)) == len(ids)


def test_every_family_has_its_cases():
    assert {case.family for case in all_cases()} == set(FAMILIES)
    for name in FAMILIES:
        assert {case.family for case in choose(families=[name])} == {name}
        assert {case.family for case in choose(families=[name], quick=True)} == {name}


def test_every_family_is_described():
    page = (ROOT / "docs" / "speed.md").read_text()
    assert [name for name in FAMILIES if f"| `{name}` |" not in page] == []


def test_a_run_without_a_choice_has_all_families_but_those_on_request():
    assert {case.family for case in choose()} == set(FAMILIES) - set(ON_REQUEST)
    assert {case.family for case in choose(quick=True)} == set(FAMILIES) - set(ON_REQUEST)
    assert len(choose(quick=True)) < len(choose()) < len(all_cases())


def test_cases_are_chosen_by_family_and_by_pattern():
    assert choose(["batch"]) == choose(families=["batch"]) == family("batch")
    both = family("masks") + family("small")
    assert choose(families=["small", "masks"]) == choose(families=["masks", "small"]) == both
    patterned = choose(["batch/BN + ReLU [0-9]*bf16"], quick=True)
    assert [str(case.input) for case in patterned if case.quick] == [n for n in TWELVE if n.endswith("bf16")]


def test_asked_for_by_a_pattern_a_case_needs_no_place_in_the_quick_benchmark():
    assert choose(["shapes"], quick=True) == family("shapes")
    assert choose(families=["shapes"], quick=True) == [case for case in family("shapes") if case.quick]


def test_a_pattern_reaches_families_on_request_and_is_held_to_the_families_named():
    assert names(choose(["networks/resnet18 64x64 batch 16"])) == ["resnet18 64x64 batch 16"]
    assert {case.family for case in choose(["*bf16*"], families=["within"])} == {"within"}
    with pytest.raises(ArgumentError, match=r"needs a family \(within\).*got 'batch', which no case matches"):
        choose(["batch"], families=["within"])


def test_a_pattern_without_a_case_is_an_error():
    with pytest.raises(ArgumentError, match=r"needs a family \(batch, activations, .*got 'bm', which no case matches"):
        choose(["batch", "bm"])


def test_an_unknown_family_is_an_error_with_the_nearest_name():
    with pytest.raises(ArgumentError, match=r'one of batch, .*; got \'mask\'\. Did you mean "masks"\?'):
        choose(families=["mask"])


def fewer_examples(case):
    """The case's input, with a batch that a test has time for."""
    examples, *rest = case.input.shape
    keeps = case.title == "InstanceNorm1d"  # whose first dimension is the channels
    return replace(case.input, shape=(examples if keeps else min(4, examples), *rest))


def randomize_(layer):
    for name, t in layer.state_dict().items():
        if t.is_floating_point():
            t.copy_(torch.rand_like(t) + 0.5 if name.endswith(("weight", "var")) else torch.randn_like(t) / 4)


@pytest.mark.parametrize("case", [c for c in all_cases() if isinstance(c, LayerCase)], ids=case_id)
def test_contestants_take_the_case_and_agree(case):
    """On fewer examples, the layers that are compared compute the same thing, whatever their parameters."""
    input = fewer_examples(case)
    x, extras = input.tensor(), {n: input.mask() if n == "mask" else input.tensor() for n in case.extras}
    ours = case.layers["ours"]().to(case.parameters)
    randomize_(ours)
    for who in case.layers.keys() & {"eager", "published"}:
        other = case.layers[who]().to(case.parameters)
        copy_state_(other, ours)
        fresh = case.layers["ours"]().to(case.parameters)
        fresh.load_state_dict(ours.state_dict())
        y, expected = (layer.train(case.mode != "evaluation")(x, **extras) for layer in (fresh, other))
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-3}.get(x.dtype, 0.1)
        torch.testing.assert_close(y, expected, atol=tolerance, rtol=tolerance)


def copy_state_(other, ours):
    """Give a contestant our layer's state, wherever it has a tensor of the same last name."""
    state = {name.rpartition(".")[2]: t for name, t in ours.state_dict().items()}
    copied = set()
    for name, t in other.state_dict().items():
        last = name.rpartition(".")[2]
        if last in state:
            kept = state[last]
            t.copy_(kept[0] if kept.dim() > t.dim() else kept)  # of several domains, the first
            copied.add(last)
    assert {"weight"} & state.keys() <= copied


@pytest.mark.parametrize(
    "layout", thinned(["contiguous", "channels_last", "slice", "every other"], ["slice"].__contains__)
)
def test_training_is_measured_beside_copy_and_triad(layout):
    case = LayerCase("batch", Input((4, 3, 5, 5), layout), batch_norm((4, 3, 5, 5)))
    result = case.measure(TINY)
    assert result.errors == {}
    assert result.seconds.keys() == {"ours", "eager", "limit"}
    assert result.ratios.keys() == {"eager"}
    assert result.multiples.keys() == {"ours", "eager"}
    assert all(s.low <= s.median <= s.high for s in [*result.seconds.values(), *result.ratios.values()])
    assert result.facts["layout"] == ("NCHW" if layout == "contiguous" else layout)
    assert result.facts["input_bytes"] == 4 * 3 * 5 * 5 * 4


@pytest.mark.parametrize(
    ("layout", "shape", "strides"),
    [
        ("contiguous", (2, 3, 4, 6), (72, 24, 6, 1)),
        ("channels_last", (2, 3, 4, 6), (72, 1, 18, 3)),
        ("slice", (2, 3, 4, 6), (144, 24, 6, 1)),
        ("every other", (2, 3, 4, 6), (144, 48, 12, 2)),
        ("transposed", (2, 3, 5), (15, 1, 3)),
    ],
)
def test_inputs_lie_in_memory_as_their_layout_says(layout, shape, strides):
    x = Input(shape, layout, torch.float64).tensor()
    assert (tuple(x.shape), x.stride(), x.dtype) == (shape, strides, torch.float64)


def test_a_mask_is_of_the_positions_and_leaves_some_out():
    mask = Input((8, 3, 6, 7)).mask()
    assert (mask.shape, mask.dtype) == ((8, 6, 7), torch.bool)
    assert 0 < mask.sum() < mask.numel()


def test_the_limit_of_a_backward_is_a_triad_on_top_of_the_copy(monkeypatch):
    def times(steps, rounds):
        return {name: [{"copy": 1.0, "triad": 2.0}.get(name, 6.0)] * rounds for name in steps}

    monkeypatch.setattr("normkit.bench.layer_case.interleave", times)
    for mode, limit in (("training", 3.0), ("forward", 1.0), ("evaluation", 1.0)):
        result = LayerCase("batch", SMALL, batch_norm((4, 3)), mode=mode).measure(TINY)
        assert result.seconds["limit"].median == limit
        assert result.multiples["ours"].median == 6.0 / limit


class Watched(nn.Module):
    """Passes its input on, and keeps what it was called with."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, input, **extras):
        self.seen.append((self.training, torch.is_grad_enabled(), input, extras))
        return input * 1


def test_each_mode_does_what_it_says():
    for mode, expected in (("training", True), ("forward", True), ("evaluation", False)):
        seen = []
        LayerCase("batch", SMALL, {}, mode=mode).step(partial(Watched, seen))()
        ((training, grad_enabled, x, _),) = seen
        assert (training, grad_enabled, x.requires_grad) == (expected,) * 3


def test_a_step_has_no_gradients_left_from_the_one_before():
    before = []

    class Looking(nn.Linear):
        def forward(self, input):
            before.append((input.grad, self.weight.grad))
            return super().forward(input)

    step = LayerCase("batch", SMALL, {}).step(lambda: Looking(3, 3))
    step()
    step()
    assert before == [(None, None)] * 2


def test_extras_are_passed_and_only_the_residual_has_a_gradient():
    seen = []
    case = LayerCase("batch", Input((4, 3, 2)), {}, extras=("residual", "mask"))
    case.step(lambda: Watched(seen))()
    ((_, _, x, extras),) = seen
    assert extras["residual"].shape == x.shape
    assert extras["residual"].requires_grad
    assert (extras["mask"].shape, extras["mask"].dtype) == ((4, 2), torch.bool)


def test_parameters_have_the_type_asked_for():
    seen = []

    class Typed(nn.Linear):
        def forward(self, input):
            seen.append(self.weight.dtype)
            return super().forward(input)

    LayerCase("types", Input((4, 3), dtype=torch.float64), {}, parameters=torch.float64).step(lambda: Typed(3, 3))()
    assert seen == [torch.float64]


def test_contestants_have_inputs_of_their_own():
    seen = {"ours": [], "eager": []}
    LayerCase("batch", SMALL, {name: lambda name=name: Watched(seen[name]) for name in seen}).measure(TINY)
    ours, eager = ({x.data_ptr() for _, _, x, _ in calls} for calls in seen.values())
    assert len(ours) == len(eager) == 1
    assert ours != eager


def test_who_fails_is_reported_and_the_others_measured():
    broken = {"ours": lambda: layers.BatchNorm1d(3, activation="no such"), "eager": nn.Identity}
    result = LayerCase("batch", SMALL, broken).measure(TINY)
    assert "ArgumentError" in result.errors["ours"]
    assert result.seconds.keys() == {"eager", "limit"}
    assert result.ratios == {}


def test_compilers_take_part_only_where_asked():
    contestants = batch_norm((4, 3), compiled=True)
    assert list(contestants) == ["ours", "eager", "compile", "compile-leaky"]
    assert LayerCase("batch", SMALL, contestants).measure(TINY).seconds.keys() == {"ours", "eager", "limit"}
    assert not QUICK.compiles


def test_results_survive_json():
    result = LayerCase("batch", SMALL, batch_norm((4, 3)), tags={"everyday": True}).measure(TINY)
    assert result.facts["everyday"] is True
    assert Result.from_json(result.as_json()) == result
