"""torch's AveragedModel averages the state of each layer, buffers too, and what it holds then runs."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from support.cases import CASES, randomize_
from support.depth import first_of_each


@pytest.mark.parametrize("case", first_of_each(CASES, lambda case: case.name), ids=str)
def test_averaged_model_with_buffers(case):
    # A weight before the layer: torch cannot average a model that has no state.
    layer = nn.Sequential(nn.Linear(case.shape[-1], case.shape[-1]), case.build()).double()
    x = case.input(torch.float64)
    averaged = AveragedModel(layer, use_buffers=True)
    states = []
    for _ in range(3):
        randomize_(layer)
        layer(x)  # the running statistics move, as between two updates
        averaged.update_parameters(layer)
        states.append(copy.deepcopy(layer.state_dict()))
    twin = copy.deepcopy(layer)
    mean = {name: torch.stack([state[name] for state in states]).double().mean(0) for name in states[0]}
    twin.load_state_dict({name: t.to(states[0][name].dtype) for name, t in mean.items()})
    for name, t in averaged.module.state_dict().items():
        if t.is_floating_point():
            torch.testing.assert_close(t, mean[name], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(averaged.eval()(x), twin.eval()(x), rtol=1e-10, atol=1e-10)
    assert averaged.train()(x).isfinite().all()
