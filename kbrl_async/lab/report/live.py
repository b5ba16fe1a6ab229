"""A run's report while the run goes on: the same page, made again as the run moves on, for this host only.

::

    browser ─▶ 127.0.0.1 ─▶ the page, made anew where it is older than `PERIOD_S`; the browser asks again by itself
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kbrl_async.errors import AddressTaken, KbrlError

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")
PERIOD_S = 10.0


class Page:
    """The newest page. One thread makes it, the others get the one before; `make` may raise while a run begins."""

    def __init__(self, make: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._clock, self._lock = make, clock, threading.Lock()
        self._text, self._made_at = "", float("-inf")

    def get(self) -> str:
        if not self._lock.acquire(blocking=not self._text):
            return self._text
        try:
            if self._clock() - self._made_at >= PERIOD_S:
                self._text = self._made()
                self._made_at = self._clock()
            return self._text
        finally:
            self._lock.release()

    def _made(self) -> str:
        try:
            return self._make()
        except KbrlError as error:
            return (
                f"<!doctype html><meta charset=utf-8><title>starting</title><p>nothing yet: {html.escape(str(error))}"
            )


def server(make: Callable[[], str], port: int = 0) -> ThreadingHTTPServer:
    """Bound and not yet serving; `server_address[1]` is its port.

    :raises AddressTaken: somebody else has the port.
    """
    page = Page(make)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
            if name not in NAMES:  # another site's name that leads here
                self.send_error(421)
            elif self.path not in ("/", "/index.html"):
                self.send_error(404)
            else:
                self._answer(page.get().encode())

        def _answer(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Refresh", f"{PERIOD_S:g}")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nobody reads that."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise AddressTaken(f"port {port} can't be had: {error.strerror}", "Choose another --port, or 0") from None
