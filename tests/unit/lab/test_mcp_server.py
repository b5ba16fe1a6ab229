"""The tools as the protocol's official client sees them: schemas, structured answers, progress, errors, keys."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")

import httpx
from mcp import Client

from kbrl_async.errors import UserError
from kbrl_async.lab import mcp_server
from kbrl_async.lab.workbench import Workbench
from tests.candidates import affine, elementwise
from tests.ports import free_port
from tests.unit.kernels.funnel.conftest import QUICK

PROBLEM = affine()
RIGHT = elementwise("2 * x[i] + 1")
HANGS = elementwise("2 * x[i] + 1", after="for (volatile int i = 0; ; i++) ;")
pytestmark = pytest.mark.filterwarnings("ignore")


async def asked(*calls: tuple[str, dict[str, Any]], **more: Any) -> list[Any]:
    async with mcp_server.entered(Workbench(options=QUICK), "1") as made, Client(made) as client:
        return [await client.call_tool(name, arguments, **more) for name, arguments in calls]


def test_every_tool_says_what_it_takes_and_gives() -> None:
    async def listed() -> Any:
        async with mcp_server.entered(Workbench(), "1") as made, Client(made) as client:
            return (await client.list_tools()).tools

    tools = {tool.name: tool for tool in asyncio.run(listed())}
    assert set(tools) == {"list_problems", "get_problem", "verify", "bench", "compare", "profile", "history"}
    assert all(tool.output_schema and tool.description for tool in tools.values())
    assert "ctx" not in tools["verify"].input_schema["properties"]


def test_answers_are_structured_and_progress_is_told() -> None:
    heard: list[str] = []

    async def told(_done: float, _total: float | None, doing: str | None) -> None:
        heard.append(doing or "")

    right, hangs, kept = asyncio.run(
        asked(
            ("verify", {"problem": PROBLEM, "candidate": RIGHT}),
            ("verify", {"problem": PROBLEM, "candidate": HANGS}),
            ("history", {}),
            progress_callback=told,
        )
    )
    assert right.structured_content["ok"]
    assert right.structured_content["speed"]["confidence"] == 0.98
    assert hangs.structured_content["fault"] == "timeout"
    assert [e["fault"] for e in kept.structured_content["entries"]] == ["timeout", "ok"]
    assert "verifying" in heard


def test_what_is_asked_wrongly_is_an_error_result_in_one_line() -> None:
    unknown, huge, missing = asyncio.run(
        asked(
            ("get_problem", {"problem_id": "L9/1"}),
            ("verify", {"problem": PROBLEM, "candidate": "x\n" * 2_000_000}),
            ("verify", {"problem": PROBLEM}),
        )
    )
    assert all(answer.is_error for answer in (unknown, huge, missing))
    assert "asked wrongly: there is no problem 'L9/1'. Nearest: " in unknown.content[0].text
    assert "at most 1,048,576" in huge.content[0].text


def test_a_cancelled_call_frees_the_bench() -> None:
    begun = asyncio.Event()

    async def told(_done: float, _total: float | None, doing: str | None) -> None:
        if doing == "verifying":
            begun.set()

    async def cancels() -> Any:
        async with mcp_server.entered(Workbench(options=QUICK), "1") as made, Client(made) as client:
            call = asyncio.create_task(
                client.call_tool("verify", {"problem": PROBLEM, "candidate": HANGS}, progress_callback=told)
            )
            await asyncio.wait_for(begun.wait(), 120)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return await client.call_tool("verify", {"problem": PROBLEM, "candidate": RIGHT})

    assert asyncio.run(cancels()).structured_content["ok"]


def test_beyond_this_host_it_is_served_with_a_key_only() -> None:
    with pytest.raises(UserError, match="KBRL_MCP_KEY"):
        asyncio.run(mcp_server.serve_http(Workbench(), "1", "0.0.0.0", 1, ""))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """`kbrl mcp --http` in a process of its own, with a key."""
    port = free_port()
    command = [sys.executable, "-m", "kbrl_async", "mcp", "--http", str(port), "--history", str(tmp_path / "h.jsonl")]
    process = subprocess.Popen(command, env={**os.environ, "KBRL_MCP_KEY": "open sesame"})
    try:
        url, deadline = f"http://127.0.0.1:{port}/mcp", time.monotonic() + 180
        while True:
            try:
                httpx.get(url)
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline, "it never listened"
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(120)


def test_over_http_only_who_has_the_key_gets_in(served: str) -> None:
    from mcp.client.streamable_http import streamable_http_client

    assert httpx.get(served).status_code == 401
    assert httpx.get(served, headers={"Authorization": "Bearer wrong"}).status_code == 401

    async def lists() -> Any:
        http = _client("Bearer open sesame")
        async with http, Client(streamable_http_client(served, http_client=http)) as client:
            return await client.call_tool("list_problems", {"level": 1})

    assert asyncio.run(lists()).structured_content["total"] == 24


def _client(authorization: str) -> Any:
    import httpx2  # what the protocol's client speaks through

    return httpx2.AsyncClient(headers={"Authorization": authorization})
