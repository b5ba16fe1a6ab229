"""Where the broker of a run listens, with the private folder that its sockets need.

Nobody but the user can put a socket there: the folder is theirs alone, or we refuse it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from msgspec.structs import replace

from kbrl_async.errors import HostError
from kbrl_async.runs.config import Config, Endpoints, endpoints
from protocols.sockets import WILDCARDS

BROKER_HOST = "KBRL_BROKER_HOST"
"""Variable for services that have the run's folder but not the broker's network: its host, as reached from here."""


def addresses(run_dir: str | os.PathLike[str], config: Config | None = None) -> Endpoints:
    """The addresses of a run; the folders of their socket files exist afterwards. Raises `HostError`."""
    found = endpoints(config or Config(), Path(run_dir))
    if host := os.environ.get(BROKER_HOST):
        found = replace(found, submit=_at(host, found.submit), work=_at(host, found.work))
    for address in (found.submit, found.work, found.status):
        if address.startswith("ipc://"):
            _make_private(Path(address.removeprefix("ipc://")).parent, Path(run_dir).absolute())
    return found


def _at(host: str, address: str) -> str:
    """An address that is bound to every interface, as it is reached from another host."""
    for wildcard in WILDCARDS:
        if address.startswith(f"tcp://{wildcard}:"):
            return address.replace(wildcard, host, 1)
    return address


def _make_private(folder: Path, run_dir: Path) -> None:
    """`folder`, and its parent where that lies outside of the run in a place that others share."""
    if not folder.is_relative_to(run_dir):
        _own(folder.parent)
    _own(folder)


def _own(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        raise HostError(f"can't create {folder}: {error.strerror}", "Choose a writable run directory") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        cause = f"{folder} belongs to somebody else or is open to others"
        raise HostError(cause, "Remove it, or run chmod 700 on it, or choose another run directory")
