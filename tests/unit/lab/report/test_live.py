"""The live page: this host only, made again as the run moves on, and no error while the run begins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import httpx
import pytest

from kbrl_async.errors import AddressTaken, CheckpointError
from kbrl_async.lab.report import live


@pytest.fixture
def made() -> list[str]:
    return []


@pytest.fixture
def serving(made: list[str]) -> Iterator[ThreadingHTTPServer]:
    def make() -> str:
        made.append("page")
        if len(made) == 1:
            raise CheckpointError("no <archive> yet")
        return f"<p>page {len(made)}"

    with live.server(make) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: ThreadingHTTPServer, path: str = "/", **headers: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{server.server_address[1]}{path}", headers=headers)


def test_only_this_host_reaches_it(serving: ThreadingHTTPServer) -> None:
    assert serving.server_address[0] == "127.0.0.1"
    assert get(serving, Host="evil.example").status_code == 421
    assert get(serving, "/../../etc/passwd").status_code == 404


def test_it_is_made_again_and_the_browser_asks_again(
    serving: ThreadingHTTPServer, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = get(serving)
    assert "nothing yet: no &lt;archive&gt; yet" in first.text
    assert first.headers["refresh"] == "10"
    monkeypatch.setattr(live, "PERIOD_S", 3600.0)
    assert get(serving).text == first.text  # not old enough
    monkeypatch.setattr(live, "PERIOD_S", 0.0)
    assert get(serving).text == "<p>page 2"
    assert len(made) == 2


def test_who_asks_while_it_is_made_gets_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on, monotonic = threading.Event(), threading.Event(), iter(range(0, 1000, 100))
    pages = iter(["old", "new"])

    def make() -> str:
        page = next(pages)
        if page == "new":
            inside.set()
            go_on.wait(120)
        return page

    page = live.Page(make, lambda: next(monotonic))
    assert page.get() == "old"
    slow: list[str] = []
    thread = threading.Thread(target=lambda: slow.append(page.get()))
    thread.start()
    assert inside.wait(120)
    assert page.get() == "old"
    go_on.set()
    thread.join()
    assert slow == ["new"]


def test_a_port_that_is_taken_is_said(serving: ThreadingHTTPServer) -> None:
    with pytest.raises(AddressTaken, match="can't be had"):
        live.server(lambda: "", serving.server_address[1])
