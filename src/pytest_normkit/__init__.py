"""The plugin for pytest: the fixture `assert_healthy`.

A package of its own, because every run of pytest imports it: importing anything of normkit would import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def assert_healthy() -> Callable[..., Any]:
    """Examine a model and fail if anything is wrong with it: `assert_healthy(model, batches)`."""
    from normkit.doctor.pytest_plugin import assert_healthy

    return assert_healthy
