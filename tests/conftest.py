"""Two lengths of a run, and one base for all its seeds.

pytest                  the ordinary run: tables thinned to a row for each mechanism, short property tests
pytest --deep           everything
pytest --base 7         other random state, order and examples everywhere; the same base gives the same run
pytest --base random    a base drawn now, and printed
pytest --isa avx2       with the loops of this instruction set, where the machine has a better one
"""

import faulthandler
import os
import random
import sys
import zlib

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from normkit.kernels import core, layer_calls, select
from support.case import Case

BASE = "NORMKIT_TEST_BASE"  # in the environment: worker processes, and what tests start, have the same

# What the tests of a module here share takes long to make: one process makes it, once, and the others go on.
TOGETHER = (
    "tests/test_onnx_vectors.py",
    "tests/kernels/test_sanitized.py",
    "tests/cli/",
    "tests/lab/engines/",
    "tests/lab/experiments/",
    "tests/surgery/replace/test_fit.py",
)

# Modules whose imports alone take seconds, of which nothing is for the ordinary run.
WITH_LARGE_PACKAGES = ("tests/test_opacus.py", "tests/test_timm.py")

# An example that was hard once is not kept for the next run: each run depends on its base alone.
always = settings(
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors, HealthCheck.too_slow],
)
settings.register_profile("ordinary", always, max_examples=8)
settings.register_profile("deep", always, max_examples=40)


def pytest_addoption(parser):
    parser.addoption("--deep", action="store_true", help="run everything: all rows of all tables, long property tests")
    parser.addoption("--base", help="the number that all seeds are made from, or 'random' (default: 0)")
    parser.addoption("--isa", help="the instruction set of the C++ loops: avx512, avx2 or baseline (default: the best)")


@pytest.hookimpl(tryfirst=True)  # before pytest-randomly chooses a seed of its own
def pytest_configure(config):
    if isa := config.getoption("--isa"):
        os.environ[core.INSTRUCTION_SET] = isa
        core.use_instruction_set(isa)
    given = config.getoption("--base") or os.environ.get(BASE) or "0"
    base = random.SystemRandom().randrange(2**32) if given == "random" else int(given) % 2**32
    os.environ[BASE] = str(base)
    config.option.randomly_seed = base
    hypothesis.core.global_force_seed = base
    settings.load_profile("deep" if config.getoption("--deep") else "ordinary")
    config.pluginmanager.register(AccuracyTable())


def pytest_report_header():
    kernels = ", ".join(f"{name} {value}" for name, value in select.status().items())
    return [
        f"base of all seeds: {os.environ[BASE]} (the same run again: --base {os.environ[BASE]})",
        f"kernels: {kernels}",
    ]


def pytest_ignore_collect(collection_path, config):
    is_large = collection_path.as_posix().endswith(WITH_LARGE_PACKAGES)
    return True if is_large and not config.getoption("--deep") else None


def pytest_collection_modifyitems(config, items):
    if config.getoption("--deep"):
        return
    deep = {item for item in items if item.get_closest_marker("deep") or not _has_ordinary_row(item)}
    items[:] = [item for item in items if item not in deep]
    config.hook.pytest_deselected(items=list(deep))


def _has_ordinary_row(item):
    rows = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return all(row.is_ordinary for row in rows if isinstance(row, Case))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    """Every test has a deadline (`faulthandler_timeout`), and so has the end of the process that ran them.

    One of several processes stays until the last test of the others has ended.
    """
    config = session.config
    others = float(config.getini("faulthandler_timeout")) if hasattr(config, "workerinput") else 0.0
    faulthandler.dump_traceback_later(others + 120, exit=True, file=sys.__stderr__)


class Scheduling(LoadScopeScheduling):
    """Tests go to processes in parts of a module, those of a module in `TOGETHER` all to one.

    Not one by one: xdist looks at every parcel that it has handed out each time a test ends.
    """

    def _split_scope(self, nodeid):
        module = nodeid.partition("::")[0]
        return module if module.startswith(TOGETHER) else f"{module} {zlib.crc32(nodeid.encode()) % 8}"


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _seed(request):
    """Random state that depends on the base and the test, not on the order."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()) ^ int(os.environ[BASE]))


@pytest.fixture(autouse=True, scope="session")
def _loops_at_any_size():
    """Tests are small; so that they test our loops, torch's operators do not take small calls from them.

    Tests with `as_shipped` have both as users do, and the tests of layer_calls.py some of their own.
    """
    shipped, layer_calls.SMALL = layer_calls.SMALL, dict.fromkeys(layer_calls.SMALL, 0)
    yield shipped
    layer_calls.SMALL = shipped


@pytest.fixture
def as_shipped(_loops_at_any_size, monkeypatch):
    monkeypatch.setattr(layer_calls, "SMALL", _loops_at_any_size)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)  # the tests themselves run side by side


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium, for the tests that look at pages."""
    from support.browser import NAMES, Browser, find_browser  # not above: it needs a POSIX system

    executable = find_browser()
    if executable is None:
        pytest.skip(
            f"the page was not looked at in a browser: none of {', '.join(NAMES)} is on PATH. Install one: "
            "apt-get install chromium"
        )
    started = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


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
