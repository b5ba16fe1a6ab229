"""Key files: who may reach a broker from other hosts, and as what.

::

    FOLDER/broker.key            the broker's pair, mode 600, on its host only
    FOLDER/allowed/ROLE/NAME.pub the allow-list: public keys, read again whenever it changes; delete one to revoke it
    FOLDER/issued/ROLE/NAME/     what a worker's host gets: peer.key (mode 600, the pair) and broker.pub

A key's pair never leaves `issued`, and nothing of a secret is printed, logged or part of an error.

Invariants
* A file with a secret is created with mode 600 and appears whole; one that others can read is refused.
* The allow-list is what the files say: a file that is no key allows nobody and is reported.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from kbrl_async.errors import UserError
from protocols.auth import NAME, Peer, Role
from protocols.sockets import ClientKeys, ServerKeys

BROKER = "broker.key"
BROKER_PUBLIC = "broker.pub"
PEER = "peer.key"
LOCAL = "local"
"""Name of the keys that the processes on the broker's own host use."""
Z85_LENGTH = 40
MAX_FILE_BYTES = 4096


class KeyFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """One key or pair, as JSON."""

    public: str
    secret: str = ""
    role: str = ""
    name: str = ""

    def __repr__(self) -> str:
        return f"KeyFile({self.role}/{self.name}, {self.public})"


class Keyring:
    """The folder of a broker's keys. Raises `UserError` with a cure; never shows a secret."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def new(self, role: Role, name: str) -> Path:
        """Make a pair, allow it, return the folder for the worker's host. The broker's pair is made with the first."""
        if not NAME.fullmatch(name):
            cure = "Use lower-case letters, digits and '-', up to 32, such as host7"
            raise UserError(f"'{name}' can't name a key", cure)
        allowed = self._allowed(role, name)
        if allowed.exists():
            raise UserError(f"there is a key {role}/{name} already", f"Revoke it first: kbrl keys revoke {role} {name}")
        server = self._broker()
        issued = self.folder / "issued" / role / name
        shutil.rmtree(issued, ignore_errors=True)
        _private(issued)
        public, secret = _pair()
        _write(issued / PEER, KeyFile(public, secret, role, name), 0o600)
        _write(issued / BROKER_PUBLIC, KeyFile(server.public.decode()), 0o644)
        allowed.parent.mkdir(parents=True, exist_ok=True)
        _write(allowed, KeyFile(public, "", role, name), 0o644)
        return issued

    def revoke(self, role: Role, name: str) -> None:
        """Take a key off the allow-list; a running broker drops it at once."""
        path = self._allowed(role, name)
        if not path.exists():
            raise UserError(f"there is no key {role}/{name}", "See them with: kbrl keys list")
        path.unlink()
        shutil.rmtree(self.folder / "issued" / role / name, ignore_errors=True)

    def peers(self) -> tuple[dict[str, Peer], list[str]]:
        """The allow-list by public key, and what in its folder is no key, in words."""
        found: dict[str, Peer] = {}
        wrong: list[str] = []
        for path, role in self._files():
            try:
                key = _read(path)
            except UserError as error:
                wrong.append(str(error))
                continue
            if key.public in found or not NAME.fullmatch(path.stem):
                wrong.append(f"{path} repeats another key or has no name for one")
                continue
            found[key.public] = Peer(role, path.stem, key.public)
        return found, wrong

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        """Changes whenever the allow-list may have changed."""
        stamps = []
        for path, _ in self._files():
            try:
                status = path.stat()
            except OSError:
                continue
            stamps.append((str(path), status.st_mtime_ns, status.st_ino))
        return tuple(stamps)

    def server(self) -> ServerKeys:
        """The broker's pair.

        :raises UserError: there is none, or others can read it.
        """
        path = self.folder / BROKER
        if not path.exists():
            cure = f"Make them with: kbrl keys new all --folder {self.folder}"
            raise UserError(f"{self.folder} has no keys of a broker", cure)
        key = _read_secret(path)
        return ServerKeys(key.public.encode(), key.secret.encode())

    def local(self, role: Role) -> ClientKeys:
        """The pair of a process on the broker's own host."""
        return client_keys(self.folder / "issued" / role / LOCAL)

    def _broker(self) -> ServerKeys:
        path = self.folder / BROKER
        if not path.exists():
            _private(self.folder)
            public, secret = _pair()
            _write(path, KeyFile(public, secret, "broker"), 0o600)
        return self.server()

    def _files(self) -> Iterator[tuple[Path, Role]]:
        for role in Role:
            for path in sorted((self.folder / "allowed" / role).glob("*.pub")):
                yield path, role

    def _allowed(self, role: Role, name: str) -> Path:
        return self.folder / "allowed" / role / f"{name}.pub"


def client_keys(folder: Path | str) -> ClientKeys:
    """What `issued/ROLE/NAME` holds, wherever it was copied to. Raises `UserError`."""
    own, server = _read_secret(Path(folder) / PEER), _read(Path(folder) / BROKER_PUBLIC)
    return ClientKeys(own.public.encode(), own.secret.encode(), server.public.encode())


def peer_of(folder: Path | str) -> Peer:
    """The role and name that the key in an issued folder was made for."""
    key = _read_secret(Path(folder) / PEER)
    try:
        return Peer(Role(key.role), key.name, key.public)
    except ValueError:
        raise UserError(f"{folder} holds no key of a worker", "Copy issued/ROLE/NAME of the broker's keys") from None


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _write(path: Path, key: KeyFile, mode: int) -> None:
    """Whole or not at all, and never readable by others for a moment."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(msgspec.json.encode(key) + b"\n")
        fresh.replace(path)
    except OSError as error:
        raise UserError(f"can't write {path}: {error.strerror}", "Choose a folder that you may write") from None


def _read_secret(path: Path) -> KeyFile:
    key = _read(path)
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(f"{path} holds a secret and others may read it", f"Run: chmod 600 {path}")
    if len(key.secret) != Z85_LENGTH:
        raise UserError(f"{path} holds no secret key", "Copy the whole folder issued/ROLE/NAME of the broker's keys")
    return key


def _read(path: Path) -> KeyFile:
    cure = "Copy it again, or make a new one with: kbrl keys new"
    try:
        with path.open("rb") as file:
            key = msgspec.json.decode(file.read(MAX_FILE_BYTES), type=KeyFile)
        z85.decode(key.public)
    except OSError as error:
        raise UserError(f"can't read the key {path}: {error.strerror}", cure) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, KeyError, struct.error):
        # Without the cause: it could quote a part of the file.
        raise UserError(f"{path} is no key file", cure) from None
    if len(key.public) != Z85_LENGTH:
        raise UserError(f"{path} is no key file", cure)
    return key
