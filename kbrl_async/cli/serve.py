"""`kbrl serve`: the verifier over HTTP, in one process or over a broker with farms and benches.

Exit codes: 0 stopped in order · 2 wrong usage · 3 the host lacks something · 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import msgspec

from kbrl_async.cli.launch import gave_up, start_and_wait
from kbrl_async.cli.shared import add_settings, resolve
from kbrl_async.errors import MissingTool, UserError
from kbrl_async.kernels.settings import OUTPUTS, Rules
from kbrl_async.runs.config import process_counts
from kbrl_async.runs.folder import plan, prepare, writing
from kbrl_async.serving import settings as serving
from kbrl_async.serving.settings import Serve

DEFAULT = Serve()
SERVICE = "verification"
WORKERS = ("broker", "compile_farm", "timing_bench", "verifier")
FOLDER = "runs/serve"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default=DEFAULT.host, help=f"address to listen at; default: {DEFAULT.host}, this host only")
    add("--port", type=int, default=DEFAULT.port, help=f"default: {DEFAULT.port}; 0: any that is free")
    add("--keys", metavar="FILE", default="", help="lines 'NAME KEY'; needed where others can reach the port")
    add("--problems", metavar="SOURCE", default="", help="where ids are looked up; default: the project's suite")
    add("--device", default=DEFAULT.device, help="cpu, cuda or cuda:N; default: auto")
    add("--workers", type=int, default=DEFAULT.workers, help="candidates verified at once; default: 1")
    add("--preset", default=DEFAULT.preset, help="reward of clients that can't say one; default: stage3")
    add("--rules", choices=("open", "strict"), help="default: open; with --broker compile_farm.rules, strict")
    add("--per-minute", type=float, default=0.0, metavar="N", help="questions of one client; default: no limit")
    add("--no-timing", action="store_true", help="never time anything")
    add("--folder", type=Path, default=Path(FOLDER), help=f"where jobs are kept; default: {FOLDER}")
    add("--broker", action="store_true", help="start a broker, farms and benches; other hosts can join: kbrl worker")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    _check_libraries()
    settings = serving.check(
        Serve(
            host=args.host,
            port=args.port,
            keys=str(Path(args.keys).absolute()) if args.keys else "",
            problems=args.problems,
            device=args.device,
            workers=args.workers,
            over_broker=args.broker,
            preset=args.preset,
            per_minute=args.per_minute,
            timing=not args.no_timing,
        )
    )
    folder, counts, rules = _over_broker(args) if args.broker else _alone(args)
    serving.write(folder, msgspec.structs.replace(settings, rules=rules))
    print(f"jobs are kept in {folder}; Ctrl-C stops the service, the same command goes on", flush=True)
    ended = start_and_wait(folder, {**counts, SERVICE: 1})
    if ended.interrupted:
        return 0 if ended.code != 130 else 130
    raise gave_up(ended, "service", f"Read its last lines above and in {folder / 'logs'}")


def _alone(args: argparse.Namespace) -> tuple[Path, dict[str, int], Rules]:
    """All in one process: its folder needs no run."""
    if args.overrides or args.config:
        raise UserError("settings are those of farms and benches", "Add --broker, or leave them out")
    folder: Path = args.folder
    with writing(folder):
        (folder / "logs").mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder, {}, args.rules or DEFAULT.rules


def _over_broker(args: argparse.Namespace) -> tuple[Path, dict[str, int], Rules]:
    folder: Path = args.folder
    words = [f"log_path={folder.absolute().parent}", f"name={folder.name}"]
    if args.rules:
        words += [f"compile_farm.rules={args.rules}", f"timing_bench.outputs={OUTPUTS[args.rules]}"]
    args.overrides = [*words, *args.overrides]
    config = resolve(args)
    plan(config)
    run = prepare(config)
    counts = process_counts(run.config)
    return run.path, {name: counts[name] for name in WORKERS if name in counts}, run.config.compile_farm.rules


def _check_libraries() -> None:
    """:raises MissingTool: the extra is not installed."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingTool(f"{missing[0]} is not installed", "pip install 'kbrl-async[serve]'")
