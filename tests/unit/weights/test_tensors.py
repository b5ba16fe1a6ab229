"""Weights as a file: the very bytes of safetensors, and their hash, in one pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kbrl_async.durable import file_sha256
from kbrl_async.errors import CheckpointError
from kbrl_async.weights import tensors

ALL = {
    "b.odd": torch.arange(7).to(torch.bfloat16),
    "a": torch.randn(3, 5),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "mask": torch.tensor([True, False, True]),
}


def test_a_file_has_the_bytes_of_safetensors_and_the_hash_that_was_told(tmp_path: Path) -> None:
    digest = tensors.write(tmp_path / "ours", ALL)
    save_file(ALL, str(tmp_path / "theirs"), metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert digest == file_sha256(tmp_path / "ours")


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    save_file(ALL, str(tmp_path / "file"))
    found, expected = tensors.read(tmp_path / "file", file_sha256(tmp_path / "file")), load_file(tmp_path / "file")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_many_pieces_make_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "PIECE_BYTES", 13)
    digest = tensors.write(tmp_path / "file", ALL)
    assert digest == file_sha256(tmp_path / "file")
    assert torch.equal(tensors.read(tmp_path / "file", digest)["a"], ALL["a"])


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: c[:-1] + b"!", lambda c: c + b"."])
def test_a_changed_file_is_refused(tmp_path: Path, damage: object) -> None:
    digest = tensors.write(tmp_path / "file", ALL)
    (tmp_path / "file").write_bytes(damage((tmp_path / "file").read_bytes()))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match="SHA-256"):
        tensors.read(tmp_path / "file", digest)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\x02\0\0\0\0\0\0\0[]",
        b'\x3a\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}  1234',
        b'\x3a\0\0\0\0\0\0\0{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}   1234',
        b'\x3a\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}   1234',
        b'\x3a\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}  1234',
    ],
    ids=["empty", "endless header", "no map", "behind the end", "no dtype", "too few bytes", "before the begin"],
)
def test_what_is_no_safetensors_file_is_refused_whatever_its_hash(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match="no safetensors file"):
        tensors.read(tmp_path / "file", file_sha256(tmp_path / "file"))
