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
                *row, what, theirs, ours = value
                worst = self.worst.setdefault(tuple(row), {}).setdefault(what, [0.0, 0.0])
                worst[:] = max(worst[0], theirs), max(worst[1], ours)

    def pytest_terminal_summary(self, terminalreporter):
        if not self.worst:
            return
        terminalreporter.section("worst error against float64 over the conformance inputs: torch's, ours")
        line = "{:<7}{:<10}{:<15}{:>6}{:>18}{:>18}{:>18}".format
        kinds = ("output", "gradients", "statistics")
        terminalreporter.write_line(line("mode", "type", "layout", "mean", *kinds))
        for row, errors in sorted(self.worst.items()):
            pairs = ("{:.1e} {:.1e}".format(*errors[kind]) if kind in errors else "" for kind in kinds)
            terminalreporter.write_line(line(*row, *pairs))


def pytest_configure(config):
    config.pluginmanager.register(AccuracyTable())
