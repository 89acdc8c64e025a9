"""Whether a model is what it was."""

import torch


def everything(model):
    """What must be the same after an error and after undo: values, modes, hooks, requires_grad."""
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    hooks = [[*m._forward_pre_hooks.values(), *m._forward_hooks.values()] for m in model.modules()]
    return state, modes, hooks, [p.requires_grad for p in model.parameters()]


def assert_same(before, after):
    for key, value in before[0].items():
        assert torch.equal(value, after[0][key]), key
    assert before[1:] == after[1:]
