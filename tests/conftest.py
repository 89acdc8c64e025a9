import zlib

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples every time: a red run means a change, not luck.
settings.register_profile(
    "normkit",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
settings.load_profile("normkit")


@pytest.fixture(autouse=True)
def _seed(request):
    """Random state that differs from test to test and not from run to run, whatever the order."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)  # the tests themselves run side by side


class AccuracyTable:
    """What the accuracy tests measured, printed under the run's results, not only that they passed."""

    def __init__(self):
        self.worst = {}

    def pytest_runtest_logreport(self, report):
        for key, value in report.user_properties if report.when == "call" else ():
            if key == "accuracy":
                *row, theirs, ours = value
                before = self.worst.get(tuple(row), (0.0, 0.0))
                self.worst[tuple(row)] = (max(before[0], theirs), max(before[1], ours))

    def pytest_terminal_summary(self, terminalreporter):
        if not self.worst:
            return
        terminalreporter.section("worst error against float64 over the conformance inputs, training and evaluation")
        line = "{:<18}{:<10}{:<15}{:>8}{:>12}{:>12}".format
        terminalreporter.write_line(line("of the", "type", "layout", "mean", "torch", "normkit"))
        for (what, *row), errors in sorted(self.worst.items()):
            terminalreporter.write_line(line(what, *row, *(f"{e:.1e}" for e in errors)))


def pytest_configure(config):
    config.pluginmanager.register(AccuracyTable())
