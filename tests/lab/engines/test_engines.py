"""Which engine runs: what cannot is said before anything is written, with exit code 2."""

import sys

import pytest

from normkit.cli.app import main
from normkit.errors import ArgumentError
from normkit.lab.engines import engine_named
from normkit.lab.engines.local import LocalEngine

RUN = ["lab", "run", "sigmoid-mlp", "--scale", "quick"]


def test_trials_run_here_unless_told_otherwise():
    assert isinstance(engine_named("local"), LocalEngine)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "rya"], "--engine must be one of local, ray; got 'rya'. Did you mean \"ray\"?"),
        (["--cpus-per-trial", "2"], "needs --engine ray"),
        (["--engine", "ray", "--cpus-per-trial", "0"], "--cpus-per-trial must be above 0; got 0.0."),
    ],
)
def test_what_no_engine_can_do_is_refused(capsys, tmp_path, options, said):
    with pytest.raises(SystemExit) as exit:
        main([*RUN, *options, "--out", str(tmp_path / "run")])
    assert exit.value.code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_ray_its_extra_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as exit:
        main([*RUN, "--engine", "ray", "--out", str(tmp_path / "run")])
    assert exit.value.code == 2
    assert "--engine ray needs ray, which cannot be imported" in (err := capsys.readouterr().err)
    assert "pip install 'normkit[ray]'" in err
    assert list(tmp_path.iterdir()) == []


def test_a_trial_needs_some_of_a_cpu():
    with pytest.raises(ArgumentError, match="above 0; got nan"):
        engine_named("ray", float("nan"))
