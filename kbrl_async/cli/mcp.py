"""`kbrl mcp`: the verifier as tools of the Model Context Protocol, for coding agents."""

from __future__ import annotations

import argparse
import asyncio
import os
from importlib.metadata import version
from pathlib import Path

from kbrl_async.errors import MissingTool, UserError

KEY = "KBRL_MCP_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--http", metavar="[HOST:]PORT", help="serve HTTP at /mcp; default: stdin and stdout")
    parser.add_argument("--problems", metavar="DIR", default="", help="where ids are looked up; default: the suite")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: the GPU for GPU kernels where there is one")
    parser.add_argument("--history", metavar="FILE", type=Path, help="keep what was verified, for later sessions too")
    parser.add_argument("--skill", action="store_true", help="print a page that teaches an agent the tools, and end")


def run(args: argparse.Namespace) -> int:
    if args.skill:
        print(SKILL.read_text(), end="")
        return 0
    try:
        from kbrl_async.lab import mcp_server
    except ModuleNotFoundError as error:
        raise MissingTool(f"{error.name} is not installed", "pip install 'kbrl-async[mcp]'") from None
    from kbrl_async.lab.workbench import Workbench

    bench = Workbench(args.problems, args.device, args.history)
    bench.list_problems()  # a folder that is none is told before anybody connects
    ours = version("kbrl-async")
    if args.http is None:
        asyncio.run(mcp_server.serve_stdio(bench, ours))
    else:
        asyncio.run(mcp_server.serve_http(bench, ours, *_place(args.http), os.environ.get(KEY, "")))
    return 0


SKILL = Path(__file__).parent.parent / "lab" / "skill.md"


def _place(words: str) -> tuple[str, int]:
    host, _, port = words.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(f"--http {words} names no port", "Write --http 8765 or --http 127.0.0.1:8765")
    return host.strip("[]") or "127.0.0.1", int(port)
