"""`kbrl worker`: join a run's broker from any host, with one service process; see docs/hosts.md.

::

    kbrl worker bench --connect tcp://broker:5756 --keys host7 backend=cuda
       └─▶ asks the broker for the run's settings ─▶ a folder of its own (settings, log, artifact store)
       └─▶ python -m services.timing_bench, in our place

It shares no disk with the broker: problems are in the tasks, artifacts travel by hash. SIGTERM drains.

Invariants
* The run folders of this host, and `runs/latest`, are left alone.
* What all workers must do alike is the run's (`config.agreed`); only facts of this host are ours to set.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import zmq
from msgspec.structs import replace

from kbrl_async.cli.shared import add_settings, gathered
from kbrl_async.durable import write_atomically
from kbrl_async.errors import HostError, UserError
from kbrl_async.keyring import client_keys, peer_of
from kbrl_async.runs.config import Config, to_yaml
from kbrl_async.runs.config.agreed import decode, follow
from kbrl_async.runs.config.loading import CONFIG_FILE
from kbrl_async.runs.config.loading import resolve as resolved
from kbrl_async.runs.folder import FOLDERS, writing
from protocols import framing
from protocols import messages as msg
from protocols.auth import Role
from protocols.names import unresolved
from protocols.sockets import AddressError, ClientKeys, Socket, connect_dealer, needs_keys

REPEAT_S = 1.0
LONELY_S = 20.0
SERVICES = {
    "compile": ("compile_farm", Role.COMPILE),
    "verify": ("verifier", Role.VERIFIER),
    "bench": ("timing_bench", Role.BENCH),
    "sample": ("sampler", Role.SAMPLER),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=tuple(SERVICES))
    parser.add_argument("--connect", required=True, metavar="ADDRESS", help="tcp://HOST:PORT of the broker's workers")
    parser.add_argument(
        "--keys", type=Path, metavar="FOLDER", help="issued/ROLE/NAME of the broker's keys, copied here"
    )
    parser.add_argument("--number", type=int, default=1, help="1, 2, …: which process of its kind on this host (1)")
    parser.add_argument("--folder", type=Path, help="where it keeps log and artifacts; default: below cache_path")
    parser.add_argument("--policies", type=Path, help="sample: RUN/policies on a shared disk; else they travel")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    service, role = SERVICES[args.kind]
    check_keys(args.connect, args.keys, role)
    environment = prepare(args, settings_of_run(args))
    command = [sys.executable, "-m", f"services.{service}"]
    sys.stdout.flush()
    os.execvpe(command[0], command, {**os.environ, **environment})  # noqa: S606 - no shell is wanted


def settings_of_run(args: argparse.Namespace) -> Mapping[str, Any]:
    """The run's settings, as its broker says them; none where it is too old to say any.

    :raises HostError: it refuses us.
    """
    key = client_keys(str(args.keys)) if args.keys else None
    owner = f"{peer_of(args.keys).name}." if args.keys else ""
    found = decode(welcome(args.connect, key, f"{owner}asking.{_name(args)}").settings)
    if not found:
        print("The broker does not say the run's settings: this worker goes by its own.", flush=True)
    return found


def _name(args: argparse.Namespace) -> str:
    host = socket.gethostname().replace("/", "_") or "host"
    return f"{SERVICES[args.kind][0]}.{host}.{args.number}"


def prepare(args: argparse.Namespace, run: Mapping[str, Any] = MappingProxyType({})) -> Mapping[str, str]:
    """Make the worker's folder; the variables that its service needs. `run`: the settings that it must agree with.

    :raises UserError: the address needs keys, they are of another role, or a setting is not what the run's is.
    """
    service, role = SERVICES[args.kind]
    check_keys(args.connect, args.keys, role)
    config = resolved(follow(gathered(args), service, run, args.connect))
    name = _name(args)
    folder = (args.folder or _cache(config) / "workers" / name).absolute()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for part in FOLDERS:
            (folder / part).mkdir(exist_ok=True)
        write_atomically(folder / CONFIG_FILE, to_yaml(_joined(config, args, folder)))
        if args.kind == "sample":
            _share_policies(folder, args.policies)
    variables = {
        "KBRL_RUN_DIR": str(folder),
        "KBRL_WORKER_APART": "1",
        "HONCHO_PROCESS_NAME": name,
    }
    return {**variables, "KBRL_KEYS": str(args.keys.absolute())} if args.keys else variables


def _cache(config: Config) -> Path:
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(config.cache_path) if config.cache_path else users / "kbrl-async"


def check_keys(address: str, keys: Path | None, role: Role) -> None:
    if keys is None:
        if needs_keys(address):
            cure = f"On the broker's host: kbrl keys new {role} --name NAME; copy the folder here and add --keys FOLDER"
            raise UserError(f"{address} is another host, and there are no keys for it", cure)
        return
    found = peer_of(keys).role
    if found is not role:
        raise UserError(f"{keys} holds a key of role {found}, and this worker is a {role}", "Use a key of its role")


def _joined(config: Config, args: argparse.Namespace, folder: Path) -> Config:
    """The settings of the worker's own folder, with the broker's address in it."""
    benches = max(config.processes.timing_bench, args.number if args.kind == "bench" else 1)
    return replace(
        config,
        name=None,
        log_path=str(folder.parent),
        resume=None,
        broker=replace(
            config.broker, work=args.connect, allow_remote=True, keys=str(args.keys.absolute()) if args.keys else None
        ),
        processes=replace(config.processes, timing_bench=benches),
    )


def _share_policies(folder: Path, policies: Path | None) -> None:
    """Without a shared folder the sampler has one of its own, into which it fetches versions."""
    link = folder / "policies"
    if policies is None:
        if link.is_symlink():
            link.unlink()
        return
    if not policies.is_dir():
        raise UserError(f"--policies {policies} is no folder", "Mount RUN/policies here, or leave it out")
    fresh = folder / ".policies.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(policies.absolute())
    fresh.replace(link)


# ── a worker's first question: what must it do like all others of this run? ─────────────────────────────────────────


def welcome(address: str, keys: ClientKeys | None, worker_id: str, say: Callable[[str], object] = print) -> msg.Welcome:
    """The broker's Welcome to somebody who wants no work; waits for a broker that is not there yet, and says so.

    :raises UserError: the address can't be used.
    :raises HostError: the broker refuses this key.
    """
    context: zmq.Context[Socket] = zmq.Context()
    try:
        dealer = connect_dealer(context, address, secrets.token_hex(8).encode(), keys)
    except AddressError as error:
        context.term()
        raise UserError(error.cause, error.cure) from None
    try:
        return _ask(dealer, msg.Hello(worker_id, secrets.token_hex(8), [], 0, credit=0), address, say)
    finally:
        dealer.close()
        context.term()


def _ask(dealer: Socket, hello: msg.Hello, address: str, say: Callable[[str], object]) -> msg.Welcome:
    said_at = time.monotonic()
    while True:
        _send(dealer, hello)
        if dealer.poll(int(REPEAT_S * 1000)) and (answer := _answer(dealer.recv_multipart())) is not None:
            _send(dealer, msg.Bye("asked for the settings"))
            return answer
        if time.monotonic() - said_at >= LONELY_S:
            said_at = time.monotonic()
            why = unresolved(address) or "does it run, and is this key on its allow-list?"
            say(f"no answer from the broker at {address} yet: {why}")


def _send(dealer: Socket, message: msg.Message) -> None:
    with contextlib.suppress(zmq.Again):
        dealer.send_multipart(framing.encode(message), zmq.NOBLOCK)


def _answer(frames: list[bytes]) -> msg.Welcome | None:
    try:
        message, _ = framing.decode(frames)
    except framing.FrameError:
        return None
    if isinstance(message, msg.Drain) and message.reason.startswith("refused"):
        raise HostError(f"the broker has refused this worker: {message.reason}", "See kbrl keys list on its host")
    return message if isinstance(message, msg.Welcome) else None
