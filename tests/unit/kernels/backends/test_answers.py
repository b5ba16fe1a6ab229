"""What a confined child hands back is untrusted: links, pipes, giants and nonsense are nothing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels.backends.building import answers
from kbrl_async.kernels.backends.launch import bundle
from kbrl_async.kernels.sandbox import Isolation

DEEP = b"\x91" * 100_000 + b"\x90"


def leave(folder: Path, kind: str) -> None:
    place = folder / "bundle"
    if kind == "link":
        target = folder.parent / "outside"
        target.write_bytes(bundle.pack({"secret": b"of another"}))
        place.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "nonsense":
        place.write_bytes(b"nonsense")
    elif kind == "giant":
        with place.open("wb") as file:
            file.truncate(bundle.MAX_BYTES + 10)


@pytest.mark.parametrize("kind", ["nothing", "link", "pipe", "folder", "nonsense", "giant"])
def test_what_is_no_bundle_in_a_plain_file_is_nothing(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    leave(folder, kind)
    assert answers.files_of(folder) == {}


def test_a_bundle_is_read(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(bundle.pack({"a": b"1"}))
    assert answers.files_of(tmp_path) == {"a": b"1"}


@pytest.mark.parametrize("body", [DEEP, b"\x91\x92\xa2\xff\xfe\xc4\x00", b"\xdd\xff\xff\xff\xff"])
def test_what_no_bundle_holds_is_nothing(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "bundle").write_bytes(b"KBRLB1\n" + body)
    assert answers.files_of(tmp_path) == {}


class _Said(msgspec.Struct):
    text: str = ""


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xc1", b"\x93\1\2\3", msgspec.msgpack.encode({"text": 7})),
        *(b"\x81\xa1x" + DEEP, b"\x81\xa4text\xa2\xff\xfe"),
    ],
)
def test_a_message_of_another_form_is_none(data: bytes) -> None:
    assert answers.read(data, _Said) is None


class _Ended:
    """A child that closed its channel without a word."""

    def __init__(self, status: int | None) -> None:
        self._status = status

    def receive(self, *_: object) -> bytes:
        return b""

    def result(self, _: float) -> int:
        if self._status is None:
            raise InfraError("the sandbox zygote died under its child", "")
        return self._status

    def close(self) -> None: ...


@pytest.mark.parametrize("status", [None, -9, 1])
def test_a_child_whose_zygote_died_under_it_is_nobody_s_compile_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    monkeypatch.setattr(answers, "isolation_of", lambda _: Isolation("full"))
    with pytest.raises(InfraError) if status is None else contextlib.nullcontext():
        found = answers.collect(_Ended(status), tmp_path, 30.0)  # type: ignore[arg-type]
        assert (found.data, found.is_late) == (b"", False)
