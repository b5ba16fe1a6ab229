"""Bundles: the same bytes for the same files, and nothing that untrusted code could slip in."""

from __future__ import annotations

import msgspec
import pytest

from kbrl_async.kernels.backends.launch import bundle


def test_what_is_packed_is_unpacked() -> None:
    files = {"b.cubin": b"\0\1", "a.json": b"{}"}
    assert bundle.unpack(bundle.pack(files)) == files


def test_the_order_of_files_does_not_matter() -> None:
    assert bundle.pack({"a": b"1", "b": b"2"}) == bundle.pack({"b": b"2", "a": b"1"})


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", ".hidden", "", "a" * 300, "a\n", "-"])
def test_a_name_is_one_plain_path_component(name: str) -> None:
    data = b"KBRLB1\n" + msgspec.msgpack.encode([(name, b"")])
    with pytest.raises(ValueError, match="forbidden names"):
        bundle.unpack(data)
    with pytest.raises(ValueError, match="forbidden names"):
        bundle.pack({name: b""})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\3\4",
        b"KBRLB1\n",
        b"KBRLB1\n\xc1",
        b"KBRLB1\n" + msgspec.msgpack.encode({"a": b""}),
        b"KBRLB1\n" + msgspec.msgpack.encode([("a", b""), ("a", b"")]),
        b"KBRLB1\n" + msgspec.msgpack.encode([("b", b""), ("a", b"")]),
        b"KBRLB1\n" + msgspec.msgpack.encode([(f"{i:04}", b"") for i in range(bundle.MAX_FILES + 1)]),
    ],
)
def test_what_is_no_bundle_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="bundle"):
        bundle.unpack(data)


def test_a_bundle_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="too large"):
        bundle.pack({"a": bytes(200)})
