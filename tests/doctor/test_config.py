import pytest

from normkit.doctor.config import Settings, find_settings, read_settings
from normkit.errors import ArgumentError
from support import diagnoses

WHOLE = """
[tool.normkit.doctor]
select = ["NK1", "batch-dependent-evaluation"]
ignore = ["NK106"]
fail-on = "error"

[tool.normkit.doctor.per-layer-ignores]
"backbone.*" = ["NK10", "NK203"]
"""


def written(folder, text):
    file = folder / "pyproject.toml"
    file.write_text(text, encoding="utf-8")
    return file


def of(code, layer="bn", severity="error"):
    return diagnoses.finding(code, "a-name", severity, layer)


def test_all_settings_are_read(tmp_path):
    assert read_settings(written(tmp_path, WHOLE)) == Settings(
        ["NK1", "batch-dependent-evaluation"], ["NK106"], "error", {"backbone.*": ["NK10", "NK203"]}
    )


@pytest.mark.parametrize("text", ["", "[tool.other]\na = 1", "[tool.normkit.doctor]"])
def test_what_is_not_said_stays_as_it_is(tmp_path, text):
    assert read_settings(written(tmp_path, text)) == Settings()


def test_the_nearest_file_counts(tmp_path):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    written(tmp_path, '[tool.normkit.doctor]\nfail-on = "info"')
    assert find_settings(below).fail_on == "info"
    written(below.parent, "")
    assert find_settings(below).fail_on == "warning"


def test_codes_are_ignored_for_layers_by_pattern():
    settings = Settings(per_layer_ignores={"backbone.*": ["NK10"], "head": ["redundant-bias"]})
    left_out = [of("NK101", "backbone.bn1"), of("NK106", "backbone.0.bn"), of("NK301", "head")]
    kept = [of("NK201", "backbone.bn1"), of("NK101", "head"), of("NK101", "the.backbone.bn"), of("NK101", None)]
    assert settings.counted([*left_out, *kept]) == kept


@pytest.mark.parametrize(("fail_on", "failing"), [
    ("error", ["error"]), ("warning", ["error", "warning"]), ("info", ["error", "warning", "info"]),
])  # fmt: skip
def test_severities_fail_from_one_on(fail_on, failing):
    settings = Settings(fail_on=fail_on)
    severities = ["error", "warning", "info"]
    assert [s for s in severities if settings.fails([of("NK101", severity=s)])] == failing
    assert not settings.fails([])


@pytest.mark.parametrize(("text", "said"), [
    ("[tool.normkit.doctor]\nselct = []", r"unknown key 'selct'.*Did you mean \"select\""),
    ("[tool.normkit.doctor]\nfail_on = 'error'", r"unknown key 'fail_on'.*Did you mean \"fail-on\""),
    ("[tool.normkit.doctor]\nfail-on = 'eror'", r"must be one of error, warning, info; got 'eror'.*\"error\""),
    ("[tool.normkit.doctor]\nfail-on = ['error']", "must be one of error, warning, info"),
    ("[tool.normkit.doctor]\nselect = 'NK1'", "select must be a list of codes"),
    ("[tool.normkit.doctor]\nignore = [1]", "ignore must be a list of codes"),
    ("[tool.normkit.doctor]\nselect = ['NK999']", "select: no rule has .*'NK999'"),
    ("[tool.normkit.doctor]\nper-layer-ignores = ['NK1']", "per-layer-ignores must be a table"),
    ("[tool.normkit.doctor.per-layer-ignores]\n'a*' = 'NK1'", r"'a\*' must be a list of codes"),
    ("[tool.normkit]\ndoctor = 1", "doctor must be a table"),
    ("[tool", "cannot be read"),
])  # fmt: skip
def test_what_is_wrong_is_named_with_its_file(tmp_path, text, said):
    file = written(tmp_path, text)
    with pytest.raises(ArgumentError, match=said) as caught:
        read_settings(file)
    assert str(file) in str(caught.value)
