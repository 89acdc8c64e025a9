"""Files from the web: what an interrupted download has left behind is gone on with."""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from normkit.lab.data.types import DataError

Progress = Callable[[str, int, int | None], None]  # what is coming, bytes so far, bytes in all where that is known

_CHUNK = 1 << 18
_ATTEMPTS = 3  # in a row that bring nothing
_PAUSE = 0.5  # seconds between two of them
_SECONDS = 30.0  # without a byte
_FAILURES = (OSError, http.client.HTTPException)  # urllib's own errors are OSErrors


def download(url: str, target: Path, limit: int, progress: Progress) -> None:
    """Bring a file of at most `limit` bytes; until it is whole, it is called `.part`."""
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    failures = 0
    while True:
        before = _size(part)
        try:
            _go_on(url, part, limit, progress)
        except _FAILURES as error:
            failures = failures + 1 if _size(part) <= before else 0
            if failures == _ATTEMPTS or _is_final(error):
                raise DataError(_message(url, part, error)) from error
            time.sleep(_PAUSE)
        else:
            os.replace(part, target)
            return


def _go_on(url: str, part: Path, limit: int, progress: Progress) -> None:
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 416:  # there is nothing from here on
                raise
            if _total(error.headers.get("Content-Range")) == have:
                return
        part.unlink()  # longer than the file itself: it was another one's
        _go_on(url, part, limit, progress)
        return
    with response:
        start = have if response.status == 206 else 0  # a server that knows no ranges begins again
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
    """More than there can be."""


def _is_final(error: Exception) -> bool:
    """Whether asking again cannot help."""
    if isinstance(error, _TooLong):
        return True
    if isinstance(error, urllib.error.HTTPError):
        return error.code < 500
    return isinstance(error, OSError) and error.filename is not None  # not the web's: the disk's


def _message(url: str, part: Path, error: Exception) -> str:
    have = _size(part)
    if isinstance(error, _TooLong):
        part.unlink()
        return f"{url} is not the file that was needed: {error}."
    rest = f" {have} bytes have come and are kept: the same command goes on from there." if have else ""
    return f"{url} could not be downloaded: {error}.{rest}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _total(content_range: str | None) -> int | None:
    found = re.fullmatch(r"bytes \*/(\d+)", content_range or "")
    return int(found[1]) if found else None
