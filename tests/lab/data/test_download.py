"""Against a server on this machine that misbehaves on request."""

import dataclasses
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from normkit.lab.data import DataError, download, get, load
from normkit.lab.data.catalogue import CATALOGUE

FILE = bytes(torch.randint(256, (600_000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8).tolist())
LIMIT = 1_000_000


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/file": FILE}
        self.knows_ranges = True
        self.tells_length = True
        self.cut_after = []  # for each request to come: how many bytes until the connection ends
        self.status = []  # for each request to come
        self.ranges = []  # of each request that came
        self.address = f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.ranges.append(asked)
        content = server.files.get(self.path)
        status = server.status.pop(0) if server.status else 200
        if content is None or status >= 400:
            self.send_error(404 if content is None else status)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and server.knows_ranges else None
        if start is not None and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        self.send_response(200 if start is None else 206)
        content = content[start or 0 :]
        if server.tells_length:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: server.cut_after.pop(0)] if server.cut_after else content)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "_PAUSE", 0)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def fetch(server, tmp_path):
    def fetch(path="file"):
        reports = []
        target = tmp_path / "got" / "file"
        download.download(server.address + path, target, LIMIT, lambda *args: reports.append(args))
        assert target.read_bytes() == FILE
        assert not target.with_name("file.part").exists()
        return reports

    fetch.part = tmp_path / "got" / "file.part"
    fetch.part.parent.mkdir()
    return fetch


def test_a_download(server, fetch):
    reports = fetch()
    assert reports[0] == (server.address + "file", 0, len(FILE))
    assert reports[-1] == (server.address + "file", len(FILE), len(FILE))
    assert [done for _, done, _ in reports] == sorted(done for _, done, _ in reports)
    assert server.ranges == [None]


def test_a_broken_connection_is_resumed(server, fetch):
    server.cut_after = [100_000, 1, 300_000]
    fetch()
    assert server.ranges == [None, "bytes=100000-", "bytes=100001-", "bytes=400001-"]


def test_an_interrupted_download_is_resumed(server, fetch):
    fetch.part.write_bytes(FILE[:123_456])
    assert fetch()[0][1:] == (123_456, len(FILE))
    assert server.ranges == ["bytes=123456-"]


def test_a_server_without_ranges_begins_again(server, fetch):
    server.knows_ranges = False
    fetch.part.write_bytes(b"x" * 123_456)
    fetch()


def test_a_part_that_is_whole_already(server, fetch):
    fetch.part.write_bytes(FILE)
    fetch()


def test_a_part_that_is_too_long_begins_again(server, fetch):
    fetch.part.write_bytes(FILE + b"x")
    fetch()
    assert server.ranges == [f"bytes={len(FILE) + 1}-", None]


def test_a_length_that_is_not_reports(server, fetch):
    server.tells_length = False
    assert fetch()[-1][1:] == (len(FILE), None)


def test_a_server_that_fails_for_a_moment(server, fetch):
    server.status = [503, 500]
    fetch()


def test_giving_up_keeps_what_came(server, fetch):
    server.cut_after = [200_000, 0, 0, 0]
    with pytest.raises(DataError, match=r"ended after 200000 of 600000 bytes\. 200000 bytes have arrived and are kept"):
        fetch()
    assert fetch.part.read_bytes() == FILE[:200_000]
    fetch()


def test_a_file_that_is_not_there_is_asked_for_once(server, fetch):
    with pytest.raises(DataError, match=r"/other could not be downloaded: HTTP Error 404"):
        fetch("other")
    assert len(server.ranges) == 1


def test_a_file_without_end_is_not_kept(server, fetch):
    server.files["/file"] = bytes(LIMIT + 1)
    with pytest.raises(DataError, match="not the file that was needed: it goes on after 1000000 bytes"):
        fetch()
    assert not fetch.part.exists()


def test_a_port_without_a_server(fetch, server, tmp_path):
    with pytest.raises(DataError, match=r"could not be downloaded: .*refused"):
        download.download("http://127.0.0.1:1/file", tmp_path / "x", LIMIT, lambda *args: None)


# ---- a whole set


def test_a_set_from_the_web(server, mnist, data_folder):
    server.files = {f"/{name}": content for name, content in mnist.idx_gz().items()}
    server.cut_after = [1000]
    get("mnist", server.address)
    assert load("mnist").train.labels.tolist() == mnist.labels[0].tolist()
    assert sum(1 for asked in server.ranges if asked) == 1
    assert not list((data_folder / "downloads").iterdir())


def test_a_damaged_set_from_the_web_is_forgotten(server, mnist, data_folder):
    server.files = {f"/{name}": content for name, content in mnist.idx_gz().items()}
    good, name = dict(server.files), "/t10k-images-idx3-ubyte.gz"
    server.files[name] = good[name][:-100] + bytes(100)
    with pytest.raises(DataError, match=r"(?s)mnist could not be fetched:.*damaged"):
        get("mnist", server.address)
    server.files = good
    assert get("mnist", server.address.rstrip("/")) == data_folder / "mnist.bin"


def test_the_next_home_is_asked(server, mnist, monkeypatch):
    homes = (server.address + "gone/", server.address)
    monkeypatch.setitem(CATALOGUE, "mnist", dataclasses.replace(mnist.entry, homes=homes))
    server.files = {f"/{name}": content for name, content in mnist.idx_gz().items()}
    get("mnist", "web")
    assert load("mnist").test.labels.tolist() == mnist.labels[1].tolist()


def test_what_an_unfinished_get_left_is_used(server, mnist, data_folder):
    server.files = {f"/{name}": content for name, content in mnist.idx_gz().items()}
    server.status = [200, 200, 403]
    with pytest.raises(DataError, match="HTTP Error 403"):
        get("mnist", server.address)
    server.ranges.clear()
    get("mnist", server.address)
    assert len(server.ranges) == 2
