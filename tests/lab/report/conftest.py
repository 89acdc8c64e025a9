import pytest

from normkit.lab.report import write_report
from support import report_samples
from support.browser import NAMES, Browser, find_browser


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    return write_report(report_samples.sections(), tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    executable = find_browser()
    if executable is None:
        pytest.skip(
            f"the report was not looked at in a browser: none of {', '.join(NAMES)} is on PATH. Install one: "
            "apt-get install chromium"
        )
    started = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()
