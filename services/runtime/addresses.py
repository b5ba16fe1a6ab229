"""Where the broker of a run listens: two sockets in the run directory, or in a private temporary one if it is too deep.

A Unix socket path has at most 107 bytes. A run directory that is too long gets a directory of its own, named by its
hash, under the system's temporary directory; it belongs to the user alone, so nobody else can put a socket there.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

import msgspec

from kbrl_async.errors import HostError
from protocols.sockets import MAX_IPC_PATH_BYTES


class Addresses(msgspec.Struct, frozen=True):
    submit: str
    work: str


def addresses(run_dir: str | os.PathLike[str]) -> Addresses:
    """The default addresses of a run; their directory exists afterwards. Raises `HostError`."""
    folder = Path(run_dir).absolute() / "sockets"
    if len(os.fsencode(folder / "submit")) > MAX_IPC_PATH_BYTES:
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        root = Path(tempfile.gettempdir()) / f"kbrl-{os.getuid()}"
        _make_private(root)
        folder = root / digest
    _make_private(folder)
    return Addresses(f"ipc://{folder / 'submit'}", f"ipc://{folder / 'work'}")


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        raise HostError(f"can't create {folder}: {error.strerror}", "Choose a writable run directory") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        cause = f"{folder} belongs to somebody else or is open to others"
        raise HostError(cause, "Remove it, or run chmod 700 on it, or choose another run directory")
