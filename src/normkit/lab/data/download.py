"""Files from the web: an interrupted download is resumed from what it left."""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from normkit.atomic import put_in_place
from normkit.lab.data.types import DataError

DownloadProgress = Callable[[str, int, int | None], None]  # the address, bytes so far, bytes in all if known

_CHUNK = 1 << 18
_ATTEMPTS = 3  # in a row without a new byte
_PAUSE = 0.5  # seconds between two of them
_SECONDS = 30.0  # without a byte
_FAILURES = (OSError, http.client.HTTPException)  # urllib's own errors are OSErrors


def download(url: str, target: Path, limit: int, progress: DownloadProgress) -> None:
    """Fetch a file of at most `limit` bytes; until it is complete its name ends in `.part`."""
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    failures = 0
    while True:
        before = _size(part)
        try:
            _resume(url, part, limit, progress)
        except _FAILURES as error:
            failures = failures + 1 if _size(part) <= before else 0
            if failures == _ATTEMPTS or _is_final(error):
                raise DataError(_message(url, part, error)) from error
            time.sleep(_PAUSE)
        else:
            put_in_place(part, target)
            return


def _resume(url: str, part: Path, limit: int, progress: DownloadProgress) -> None:
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 416:  # the file has nothing from this byte on
                raise
            if _total(error.headers.get("Content-Range")) == have:
                return
        part.unlink()  # longer than the file itself: it was part of another
        _resume(url, part, limit, progress)
        return
    with response:
        start = have if response.status == 206 else 0  # a server that ignores ranges starts from the first byte
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None and length.isdigit() else None
        _append(response, part, start, total, limit, lambda done: progress(url, done, total))


def _append(
    response: http.client.HTTPResponse,
    part: Path,
    start: int,
    total: int | None,
    limit: int,
    notify: Callable[[int], None],
) -> None:
    done = start
    with open(part, "ab") as file:
        file.truncate(start)
        notify(done)
        while chunk := response.read(_CHUNK):
            done += len(chunk)
            if done > limit:
                raise _TooLong(f"it goes on after {limit} bytes, more than the whole set has")
            file.write(chunk)
            notify(done)
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done} of {total} bytes")


class _TooLong(OSError):
    """More bytes than the set can have."""


def _is_final(error: Exception) -> bool:
    """Whether asking again cannot help."""
    if isinstance(error, _TooLong):
        return True
    if isinstance(error, urllib.error.HTTPError):
        return error.code < 500
    return isinstance(error, OSError) and error.filename is not None  # an error of the disk, not of the network


def _message(url: str, part: Path, error: Exception) -> str:
    have = _size(part)
    if isinstance(error, _TooLong):
        part.unlink()
        return f"{url} is not the file that was needed: {error}. Try another --source."
    rest = f" {have} bytes have arrived and are kept: the same command resumes from there." if have else ""
    return f"{url} could not be downloaded: {error}.{rest}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _total(content_range: str | None) -> int | None:
    found = re.fullmatch(r"bytes \*/(\d+)", content_range or "")
    return int(found[1]) if found else None
