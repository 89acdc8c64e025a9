"""Errors that say what was needed, what came and what to do, and leave a layer as it was."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import normkit as nk


def refused(call: Callable[[], Any], *words: str, error: type[Exception] = ValueError) -> None:
    """Check that the call raises `error`, one of ours, with these words in its message, in this order."""
    with pytest.raises(error, match=".*".join(map(re.escape, words))) as caught:
        call()
    assert isinstance(caught.value, nk.NormkitError)


def refused_untouched(
    module: nn.Module, call: Callable[[], Any], *words: str, error: type[Exception] = ValueError
) -> None:
    """Check that the call is refused, and that the state of the module is as before."""
    before = copy.deepcopy(module.state_dict())
    refused(call, *words, error=error)
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], t) for name, t in before.items())
