import pytest

from normkit.atomic import put_in_place, replacing


def write(path, text):
    with replacing(path) as part:
        part.write_text(text)


def fail_half_way(path):
    with replacing(path) as part:
        part.write_text("new")
        raise RuntimeError("half-way")


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_nothing_has_happened(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="half-way"):
        fail_half_way(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    write(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_a_part_that_was_never_written_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "file"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_finished_part_is_renamed(tmp_path):
    part = tmp_path / "file.part"
    part.write_text("all of it")
    put_in_place(part, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
