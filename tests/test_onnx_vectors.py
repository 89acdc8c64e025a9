"""ONNX's own node vectors, from the onnx wheel. An operator is one function here and the names of its vectors."""

import warnings

import pytest
import torch

import normkit as nk


def batch_normalization(x, scale, bias, mean, var, *, epsilon=1e-5, momentum=0.9, training_mode=0):
    y = nk.functional.batch_norm(
        x,
        None if training_mode else mean,
        None if training_mode else var,
        scale,
        bias,
        training=bool(training_mode),
        eps=epsilon,
    )
    if not training_mode:
        return (y,)
    # ONNX's momentum weights the old value, and what it stores is the biased variance.
    stored = nk.ema(nk.Moments(mean, var, 0), nk.functional.batch_moments(x), 1 - momentum)
    return y, stored.mean, stored.var


OPERATORS = {"BatchNormalization": batch_normalization}

VECTORS = {
    "BatchNormalization": {
        "test_batchnorm_example",
        "test_batchnorm_epsilon",
        "test_batchnorm_example_training_mode",
        "test_batchnorm_epsilon_training_mode",
    },
}


@pytest.fixture(scope="module")
def cases():
    """All vectors by operator and name. onnx makes them once per process, so they cannot be asked for by operator."""
    with warnings.catch_warnings():
        # onnx overflows and divides by zero on purpose, in the vectors of other operators.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"onnx\.")
        from onnx.backend.test.case.node import collect_testcases

        found = {}
        for case in collect_testcases():
            found.setdefault(case.model.graph.node[0].op_type, {})[case.name] = case
    return found


def attributes(node):
    from onnx.helper import get_attribute_value

    return {a.name: get_attribute_value(a) for a in node.attribute}


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_vectors_are_those_we_know(cases, operator):
    assert set(cases[operator]) == VECTORS[operator]


@pytest.mark.parametrize(("operator", "name"), [(op, name) for op in OPERATORS for name in sorted(VECTORS[op])])
def test_agrees_with_onnx(cases, operator, name):
    case = cases[operator][name]
    ((inputs, expected),) = case.data_sets
    assert len(case.model.graph.node) == 1
    outputs = OPERATORS[operator](*map(torch.tensor, inputs), **attributes(case.model.graph.node[0]))
    assert len(outputs) == len(expected)
    for ours, onnxs in zip(outputs, expected, strict=True):
        # The vectors were computed in float32: a few of its roundings. Statistics of ours may be wider.
        torch.testing.assert_close(ours.float(), torch.tensor(onnxs), rtol=1e-5, atol=2e-6)
