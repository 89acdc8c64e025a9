"""The line of the user's code that called a model."""

import sys

import pytest
import torch
from torch import nn

from normkit.doctor.call_site import CallSite, call_site

LIBRARY = """
def fit(step, x):
    return step(x)
"""


class Seen(nn.Module):
    def forward(self, x):
        self.site = call_site()
        return x


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A training loop of an installed package."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "somebodys_trainer.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    import somebodys_trainer

    yield somebodys_trainer
    del sys.modules["somebodys_trainer"]


def line():
    return sys._getframe(1).f_lineno


def test_it_is_the_caller_of_the_outermost_module():
    inner = Seen()
    model = nn.Sequential(nn.Sequential(inner), nn.ReLU())
    here = line() + 1
    model(torch.ones(1))
    assert inner.site == CallSite(__file__, here, "Sequential")


def test_a_user_s_step_that_a_library_calls_is_found(library):
    inner = Seen()
    model = nn.Sequential(inner)

    def step(x):
        return model(x)

    library.fit(step, torch.ones(1))
    assert inner.site == CallSite(__file__, step.__code__.co_firstlineno + 1, "Sequential")


def test_where_a_library_calls_the_model_the_user_s_call_of_the_library_is_named(library):
    inner = Seen()
    here = line() + 1
    library.fit(nn.Sequential(inner), torch.ones(1))
    assert inner.site == CallSite(__file__, here, "Sequential")


def test_outside_of_any_module_there_is_none():
    assert call_site() == CallSite(None, None, "")
    assert str(call_site()) == "an unknown line"
