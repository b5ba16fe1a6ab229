"""Chromium without a window, asked over its debugging pipe: one browser looks at as many pages as a test has.

::

    with Browser(folder) as browser:
        page = browser.open(path, width=390)
        page.evaluate("document.title")
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE_S = 60.0
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 50) for number in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads file descriptor 3 and writes 4, which ours may be in the way of."""


def find() -> str | None:
    """The browser, where there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """Starts the browser; it ends with the block."""

    def __init__(self, folder: Path) -> None:
        program = find()
        assert program is not None, "look for it with find() first"
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        command = [sys.executable, "-c", _LAUNCH, str(theirs_in), str(theirs_out), program, *OPTIONS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def answers(self) -> bool:
        """Whether it started: a browser that lacks a library or a font does not."""
        try:
            self.ask("Browser.getVersion")
        except (AssertionError, BrokenPipeError):
            return False
        return True

    def open(
        self,
        path: Path,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        scripts: bool = True,
        domains: tuple[str, ...] = ("Log", "Network"),
    ) -> Page:
        """The page, loaded; `load_s` is how long that took."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", *domains):
            page.ask(f"{domain}.enable")
        scale = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.ask("Emulation.setDeviceMetricsOverride", **scale)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.ask("Emulation.setEmulatedMedia", features=scheme)
        page.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        began = time.monotonic()
        page.ask("Page.navigate", url=path.resolve().as_uri())
        page.wait_for("Page.loadEventFired")
        page.load_s = time.monotonic() - began
        return page

    def ask(self, method: str, session: str = "", **arguments: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self.read(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.load_s = 0.0

    def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **arguments)

    def wait_for(self, event: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not any(e.get("method") == event and e.get("sessionId") == self._session for e in self._browser.events):
            self._browser.events.append(self._browser.read(deadline))

    def evaluate(self, expression: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors and warnings on the console, and requests other than for the page itself."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            method, about = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(about["exceptionDetails"]["text"])
            elif method == "Log.entryAdded":
                found.append(about["entry"]["text"])
            elif method == "Runtime.consoleAPICalled":
                found.append(str(about["args"]))
            elif method == "Network.requestWillBeSent" and about["type"] != "Document":
                found.append(about["request"]["url"])
        return found

    def screenshot(self, path: Path, height: int | None = None) -> Path:
        """Of the whole page, or of its top."""
        width = self.evaluate("innerWidth")
        height = height or self.evaluate("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path
