"""ONNX's own node vectors, from the onnx wheel. An operator is one function here and the names of its vectors."""

import warnings

import pytest
import torch

import normkit as nk
from normkit.kernels import reference, select
from normkit.kernels.reference import Recipe

pytestmark = pytest.mark.deep  # onnx takes long to make its vectors


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


def instance_normalization(x, scale, bias, *, epsilon=1e-5):
    return (nk.functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon),)


def group_normalization(x, scale, bias, *, num_groups, epsilon=1e-5):
    return (nk.functional.group_norm(x, num_groups, scale, bias, epsilon),)


def layer_normalization(x, scale, bias, *, axis=-1, epsilon=1e-5):
    over = tuple(range(axis % x.dim(), x.dim()))
    m = reference.moments(x, over)
    inverse_std, _ = nk.scale_shift(m, None, None, epsilon)
    return nk.functional.layer_norm(x, x.shape[over[0] :], scale, bias, epsilon), m.mean, inverse_std


def rms_normalization(x, scale, *, axis=-1, epsilon=1e-5):
    return (nk.functional.rms_norm(x, x.shape[axis % x.dim() :], scale, epsilon),)


def lrn(x, *, size, alpha=1e-4, beta=0.75, bias=1.0):
    return (nk.functional.local_response_norm(x, size, alpha, beta, bias),)


def mean_variance_normalization(x, *, axes=(0, 2, 3)):
    # ONNX adds its eps, 1e-9, to the deviation; we add ours to the variance.
    return (select.normalize(x, Recipe(tuple(axes), 1e-18))[0],)


OPERATORS = {
    "BatchNormalization": batch_normalization,
    "InstanceNormalization": instance_normalization,
    "GroupNormalization": group_normalization,
    "LayerNormalization": layer_normalization,
    "RMSNormalization": rms_normalization,
    "LRN": lrn,
    "MeanVarianceNormalization": mean_variance_normalization,
}


def over_last(stem):
    """The names of the vectors of a norm over the last dimensions: each rank, from each axis, counted from each end."""
    names = {f"{stem}_default_axis"}
    for rank, suffix in ((2, ""), (3, "_epsilon"), (4, "")):
        names |= {f"{stem}_{rank}d_axis{axis}{suffix}" for axis in range(rank)}
        names |= {f"{stem}_{rank}d_axis_negative_{axis}{suffix}" for axis in range(1, rank + 1)}
    return names


VECTORS = {
    "InstanceNormalization": {"test_instancenorm_example", "test_instancenorm_epsilon"},
    "GroupNormalization": {"test_group_normalization_example", "test_group_normalization_epsilon"},
    "LayerNormalization": over_last("test_layer_normalization"),
    "RMSNormalization": over_last("test_rms_normalization"),
    "LRN": {"test_lrn", "test_lrn_default"},
    "MeanVarianceNormalization": {"test_mvn"},
    "BatchNormalization": {
        "test_batchnorm_example",
        "test_batchnorm_epsilon",
        "test_batchnorm_example_training_mode",
        "test_batchnorm_epsilon_training_mode",
    },
}


@pytest.fixture(scope="session")
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
