"""What several tests of the kernels count with."""

import pytest

from normkit.kernels import native


class Counted:
    """The core, counting the calls of its loops."""

    def __init__(self, loops):
        self.loops, self.calls = loops, 0

    def __getattr__(self, name):
        self.calls += 1
        return getattr(self.loops, name)


@pytest.fixture
def counted(monkeypatch):
    counted = Counted(native.loops)
    monkeypatch.setattr(native, "loops", counted)
    return counted
