import sys
from types import ModuleType

import pytest
import torch


@pytest.fixture
def namespace(monkeypatch, tmp_path):
    """A module of its own for a page's names, so that what it defines can be found and pickled."""
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return vars(module)
