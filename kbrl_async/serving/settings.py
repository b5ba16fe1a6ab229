"""What can be set of a service. No torch here."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import stat
from pathlib import Path

import msgspec

from kbrl_async.durable import write_atomically
from kbrl_async.errors import UserError
from kbrl_async.kernels.settings import Rules
from kbrl_async.rollouts.settings import Reward

FILE = "serve.json"
PORT = 8470


class Serve(msgspec.Struct, frozen=True, kw_only=True):
    """`serve.json` in the folder of a service, written by `kbrl serve`."""

    host: str = "127.0.0.1"
    port: int = PORT
    """0: any that is free."""
    keys: str = ""
    """File of `NAME KEY` lines; empty: whoever reaches the port."""
    problems: str = ""
    """Where ids are looked up; empty: our suite."""
    device: str = "auto"
    workers: int = 1
    """Candidates at once, of a service in one process."""
    over_broker: bool = False
    """The work is done by farms and benches of the folder's run."""
    preset: str = Reward().preset
    """For clients that can't say one (slime, OpenRLHF)."""
    wait_s: float = 60.0
    """How long an answer is waited for, before the job's id is given instead."""
    per_minute: float = 0.0
    """Questions of one client; 0: no limit."""
    max_waiting: int = 10_000
    """Jobs in the queue; beyond it clients are asked to come back."""
    max_waiting_each: int = 2_000
    """Of one client."""
    max_candidate: int = 256 * 1024
    """Bytes of a candidate, and of a reference."""
    max_body: int = 8 * 1024 * 1024
    """Bytes of a request: a batch has many candidates."""
    keep: int = 20_000
    """Ended jobs that are remembered."""
    timing: bool = True
    """False: nothing is ever timed."""
    rules: Rules = "open"
    """By which every candidate is judged; over a broker those of its farms."""

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check(settings: Serve) -> Serve:
    """:raises UserError: others could reach it without a key, or a value is out of range."""
    if not settings.is_loopback and not settings.keys:
        cure = "Add --keys FILE with a line 'NAME KEY' for each client, or leave --host at 127.0.0.1"
        raise UserError(f"{settings.host} can be reached by others, who could run code here", cure)
    if not 0 <= settings.port < 1 << 16 or settings.workers < 1:
        raise UserError("--port is 0 to 65535, and --workers 1 or more", "See 'kbrl serve --help'")
    if settings.keys:
        Keys.read(Path(settings.keys))
    return settings


def write(folder: Path, settings: Serve) -> None:
    write_atomically(folder / FILE, msgspec.json.format(msgspec.json.encode(settings)).decode() + "\n")


def read(folder: Path) -> Serve:
    """:raises UserError: there is no service in that folder."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Serve)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{folder / FILE} can't be read: {error}", "Start the service with 'kbrl serve'") from None


class Keys:
    """Names of clients by what they send; only digests are held."""

    SHORTEST = 16

    def __init__(self, names: dict[bytes, str]) -> None:
        self._names = names

    @classmethod
    def read(cls, path: Path) -> Keys:
        """The keys of a file.

        :raises UserError: no such file, others can read it, or a line holds no key that is long enough.
        """
        try:
            text, mode = path.read_text(), path.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the keys {path} can't be read: {error}", "Give a file of 'NAME KEY' lines") from None
        if stat.S_IMODE(mode) & 0o077:
            raise UserError(f"others can read {path}", f"chmod 600 {path}")
        names: dict[bytes, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2 or len(words[1]) < cls.SHORTEST:
                cure = f"A line is 'NAME KEY', with a key of {cls.SHORTEST} characters or more"
                raise UserError(f"{path}:{number} holds no key", cure)
            names[_digest(words[1])] = words[0]
        if not names:
            raise UserError(f"{path} holds no key", "Write one line 'NAME KEY' for each client")
        return cls(names)

    def name(self, authorization: str) -> str:
        """Of the client that sends this header; empty for a key that is not known."""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return ""
        asked, found = _digest(key.strip()), ""
        for digest, name in self._names.items():  # all of them: how long it takes tells nothing
            if hmac.compare_digest(digest, asked):
                found = name
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
