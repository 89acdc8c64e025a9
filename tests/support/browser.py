"""A small client of Chromium's DevTools protocol, over the pipe that the browser reads as file descriptor 3."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 20.0  # seconds for an answer


def find_browser():
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A headless browser with an empty profile, ended by `close`."""

    def __init__(self, executable, profile):
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # Copies far from 3 and 4, so that neither is overwritten before it is copied there.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 64) for end in (commands, answers)]
        actions = [(os.POSIX_SPAWN_DUP2, end, fd) for end, fd in zip(high, (3, 4), strict=True)]
        actions += [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        arguments = [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = os.posix_spawn(executable, arguments, os.environ, file_actions=actions)
        for end in (commands, answers, *high):
            os.close(end)
        self._buffer = b""
        self._last = 0
        self.events = []

    def call(self, method, session=None, **parameters):
        """Send a command; return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._until(lambda got: got.get("id") == self._last)

    def wait_for(self, method, session):
        """Wait for a session's first event of this name, if it was not there already."""

        def is_it(got):
            return got.get("method") == method and got.get("sessionId") == session

        if not any(map(is_it, self.events)):
            self._until(is_it)

    def _until(self, is_wanted):
        deadline = time.monotonic() + PATIENCE
        while True:
            got = self._receive(deadline)
            if "method" in got:
                self.events.append(got)
            if is_wanted(got):
                assert "error" not in got, got["error"]
                return got.get("result", got.get("params"))

    def _receive(self, deadline):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            got = os.read(self._read, 1 << 20) if ready else b""
            assert got, "the browser is gone" if ready else f"no answer from the browser within {PATIENCE:.0f} s"
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def close(self):
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        for _ in range(100):
            if os.waitpid(self._process, os.WNOHANG)[0]:
                break
            time.sleep(0.05)
        else:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
        os.close(self._read)
        os.close(self._write)


class Page:
    """A tab that is watched from before its first byte."""

    def __init__(self, browser, url, width=1100, height=900, **media):
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._target = target
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.emulate(**media)
        self.call("Page.navigate", url=url)
        browser.wait_for("Page.loadEventFired", self._session)
        self.settle()

    def call(self, method, **parameters):
        return self._browser.call(method, self._session, **parameters)

    def resize(self, width, height=900):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def emulate(self, media="", scheme="light"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def run(self, expression):
        """Return an expression's value."""
        got = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def settle(self):
        """Wait until what is pending is painted."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def hover(self, x, y):
        for dx in (3, 0):  # a movement, not an appearance
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + dx, y=y)
        time.sleep(0.1)  # plotly looks at the mouse every so often
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y + 1)
        self.settle()

    def troubles(self):
        """What was thrown or logged as an error or a warning."""
        found = []
        for event in self._events():
            params = event["params"]
            if (
                event["method"] == "Runtime.exceptionThrown"
                or (event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"))
                or (event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"))
            ):
                found.append(params)
        return found

    def requests(self):
        """The addresses that were asked for."""
        asked = [event["params"] for event in self._events() if event["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in asked]

    def _events(self):
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    def close(self):
        self._browser.call("Target.closeTarget", targetId=self._target)
