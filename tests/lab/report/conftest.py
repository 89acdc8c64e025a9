import pytest

from normkit.lab.experiments import NAMES as EXPERIMENTS
from normkit.lab.experiments import experiment_named
from normkit.lab.report import write_report, write_story
from support import report_samples


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    return write_report(report_samples.sections(), tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="session")
def story(tmp_path_factory):
    """Of two experiments; the others have not been run."""
    path = tmp_path_factory.mktemp("story") / "report.html"
    experiments = [experiment_named(name) for name in EXPERIMENTS]
    return write_story(report_samples.story_sections(), experiments, "normkit lab run all --out story --resume", path)
