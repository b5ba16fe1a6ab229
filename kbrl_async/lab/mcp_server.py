"""The workbench as tools of the Model Context Protocol, over stdio or HTTP; run by `kbrl mcp`, see docs/mcp.md.

Each tool gives structured content with a schema. While one works its progress is told, where a client asked for it; a
client that cancels, or vanishes, ends its call at the next step. What is asked wrongly, or the host can't do, is an
error result in one line; a wrong candidate is none.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, TypeVar

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kbrl_async.errors import KbrlError, ProblemError, UserError
from kbrl_async.lab.answers import CandidateReport, Comparison, HistoryList, ProblemList, ProblemView, ProfileReport
from kbrl_async.lab.workbench import Workbench

_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_MOST_BODY = 4 << 20
"""Bytes of one request: two candidates and a problem, at most."""
INSTRUCTIONS = """\
Verifies and times kernels that replace a PyTorch module. A candidate is a Python file that defines ModelNew; \
get_problem says how it has to look. Work so: get_problem, verify a simple right kernel, profile it, change one thing, \
verify again; bench or compare before you claim anything. A speedup counts only where proven_faster is true. \
Correctness is checked on secret inputs, and the kernel itself has to compute: PyTorch operators in its place are found.
"""
_T = TypeVar("_T")

Id = Annotated[str, Field(description="a problem's id, such as L1/13, or the whole source of a problem")]
Source = Annotated[str, Field(description="a Python file with ModelNew, or the kernel_id of an earlier candidate")]
Language = Annotated[str, Field(description="c, cpp, cuda, cuda-nvrtc or triton; empty: guessed from the source")]


def server(bench: Workbench, version: str) -> MCPServer[None]:
    """The tools over an entered workbench."""
    made: MCPServer[None] = MCPServer(
        "kbrl", title="Kernel workbench", instructions=INSTRUCTIONS, version=version, log_level="WARNING"
    )
    _add_readers(made, bench)
    _add_bench(made, bench)
    return made


def _add_readers(made: MCPServer[None], bench: Workbench) -> None:
    def list_problems(level: int | None = None, search: str = "", offset: int = 0, limit: int = 100) -> ProblemList:
        """List problems: PyTorch modules to write kernels for. `search` is a part of an id."""
        return _answered(bench.list_problems, level, search, offset, limit)

    def get_problem(problem_id: str, backend: str = "c") -> ProblemView:
        """A problem's source, what a candidate in this backend has to look like, and an example of one."""
        return _answered(bench.get_problem, problem_id, backend)

    def history(problem_id: str = "", limit: int = 20, with_sources: bool = False) -> HistoryList:
        """What was verified here, newest first, and the best kernel so far (with_sources: with its source)."""
        return _answered(bench.history, problem_id, limit, sources=with_sources)

    for tool in (list_problems, get_problem, history):
        made.add_tool(tool, annotations=_READS)


def _add_bench(made: MCPServer[None], bench: Workbench) -> None:
    async def verify(
        problem: Id, candidate: Source, ctx: Context[None, Any], backend: Language = "", timing: bool = True
    ) -> CandidateReport:
        """Build a candidate, check it on secret inputs, and time it against PyTorch. Seconds."""
        return await _worked(bench.verify(problem, candidate, backend, timing=timing, told=_teller(ctx)))

    async def bench_(
        problem: Id, candidate: Source, ctx: Context[None, Any], backend: Language = ""
    ) -> CandidateReport:
        """Like verify, with a careful time: a narrow interval, some seconds more."""
        return await _worked(bench.bench(problem, candidate, backend, told=_teller(ctx)))

    async def compare(
        problem: Id, first: Source, second: Source, ctx: Context[None, Any], backend: Language = ""
    ) -> Comparison:
        """Time two candidates of one problem carefully and say whether one is proven faster than the other."""
        return await _worked(bench.compare(problem, first, second, backend, told=_teller(ctx)))

    async def profile(problem: Id, candidate: Source, ctx: Context[None, Any], backend: Language = "") -> ProfileReport:
        """What limits a correct candidate: roofline, loops that were not vectorised, where its time goes."""
        return await _worked(bench.profile(problem, candidate, backend, told=_teller(ctx)))

    made.add_tool(bench_, name="bench")
    for tool in (verify, compare, profile):
        made.add_tool(tool)


def _answered(call: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    try:
        return call(*args, **kwargs)
    except KbrlError as error:
        raise ToolError(_format_error(error)) from None


async def _worked(call: Awaitable[_T]) -> _T:
    try:
        return await call
    except KbrlError as error:
        raise ToolError(_format_error(error)) from None


def _format_error(error: KbrlError) -> str:
    """Whose fault it is, the cause and the cure."""
    if isinstance(error, ProblemError):
        return f"the problem's fault: {error}"
    if isinstance(error, UserError):
        return f"asked wrongly: {error}"
    return f"the host's fault, nothing is known of the candidate: {error}"


def _teller(ctx: Context[None, Any]) -> Callable[[int, str], Awaitable[None]]:
    async def report(done: int, doing: str) -> None:
        await ctx.report_progress(float(done), None, doing)

    return report


async def serve_stdio(bench: Workbench, version: str) -> None:
    """Until the client closes our stdin."""
    async with bench:
        await server(bench, version).run_stdio_async()


async def serve_http(bench: Workbench, version: str, host: str, port: int, key: str) -> None:
    """At `http://HOST:PORT/mcp`. `key` empty: for everybody who can connect.

    :raises UserError: others than this host could connect, and there is no key.
    """
    if not key and host not in ("127.0.0.1", "::1", "localhost"):
        raise UserError(f"{host} is no loopback address, and there is no key", "Set KBRL_MCP_KEY")
    async with bench:
        made = server(bench, version)
        app = made.streamable_http_app(host=host, max_request_body_size=_MOST_BODY)
        guarded: ASGIApp = functools.partial(_guarded, app, key) if key else app
        config = uvicorn.Config(guarded, host=host, port=port, log_level=logging.WARNING, interface="asgi3")
        await uvicorn.Server(config).serve()


async def _guarded(app: ASGIApp, key: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Only who brings the key as a bearer token gets in."""
    if scope["type"] == "http":
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        if not hmac.compare_digest(given, f"Bearer {key}".encode()):
            app = PlainTextResponse("no key, or not this one: send 'Authorization: Bearer …'", 401)
    await app(scope, receive, send)


@contextlib.asynccontextmanager
async def entered(bench: Workbench, version: str) -> AsyncIterator[MCPServer[None]]:
    """A server in this process, for tests and for hosts of several servers."""
    async with bench:
        yield server(bench, version)
