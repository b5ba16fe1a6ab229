"""`kbrl keys`: make, list and revoke the keys by which processes on other hosts are known; see docs/security.md."""

from __future__ import annotations

import argparse
from pathlib import Path

from kbrl_async.errors import UserError
from kbrl_async.keyring import LOCAL, Keyring
from protocols.auth import Role

FOLDER = "keys"
ALL = "all"

NEXT = """\
Next: start the run with  broker.work=tcp://0.0.0.0:5756 broker.allow_remote=true broker.keys={folder}
and make a key for each worker's host:  kbrl keys new bench --name HOST"""
COPY = """\
Copy this folder to the worker's host over a channel you trust, keep its files at mode 600, and start there:
  kbrl worker {role} --connect tcp://BROKER:5756 --keys {name}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("new", "list", "revoke"))
    roles = ", ".join(Role)
    parser.add_argument("role", nargs="?", help=f"{roles}; 'new all' makes those that the broker's own host needs")
    parser.add_argument("--name", default=LOCAL, help="what the key is called, such as the worker's host")
    parser.add_argument("--folder", type=Path, default=Path(FOLDER), help="folder of the broker's keys (keys)")


def run(args: argparse.Namespace) -> int:
    ring = Keyring(args.folder)
    if args.action == "list":
        return _list(ring)
    if args.role == ALL and args.action == "new":
        return _new_all(ring)
    role = _role(args.role)
    if args.action == "revoke":
        ring.revoke(role, args.name)
        print(f"revoked {role}/{args.name}; a running broker drops it within seconds")
        return 0
    issued = ring.new(role, args.name)
    print(issued)
    if args.name != LOCAL:
        print(COPY.format(role=_command(role), name=issued.name))
    return 0


def _new_all(ring: Keyring) -> int:
    """Keys for every process of the broker's own host; those that are there stay."""
    known, _ = ring.peers()
    there = {(peer.role, peer.name) for peer in known.values()}
    for role in Role:
        if (role, LOCAL) not in there:
            print(ring.new(role, LOCAL))
    print(NEXT.format(folder=ring.folder))
    return 0


def _list(ring: Keyring) -> int:
    peers, wrong = ring.peers()
    for peer in sorted(peers.values(), key=lambda peer: (peer.role, peer.name)):
        print(f"{peer.role:11} {peer.name:20} {peer.public}")
    for reason in wrong:
        print(f"not a key: {reason}")
    if not peers:
        print(f"no key is allowed in {ring.folder}")
    return 0


def _role(text: str | None) -> Role:
    try:
        return Role(text or "")
    except ValueError:
        raise UserError(f"'{text or ''}' is no role", f"Choose among {', '.join(Role)}") from None


def _command(role: Role) -> str:
    return "sample" if role is Role.SAMPLER else role
