"""Policy versions at a URL: complete or not there, what they say they are, and collected by who holds them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from kbrl_async.errors import CheckpointError, ConfigError
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import wrap_lora
from kbrl_async.learning.policies.remote import RemotePolicies

CANARY = [1, 2, 3, 4]


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    # the memory file system is one for the whole process
    return f"memory://{secrets.token_hex(8)}/p" if request.param == "memory" else f"file://{tmp_path}/remote"


@pytest.fixture
def published(tmp_path: Path, model: torch.nn.Module) -> Callable[[int], Path]:
    lora = wrap_lora(model, rank=2)

    def publish(version: int) -> Path:
        versions.publish(tmp_path / "local", lora, version, None, version, CANARY)
        return versions.version_folder(tmp_path / "local", version)

    return publish


def test_a_version_is_fetched_as_it_was_published(url: str, tmp_path: Path, published: Callable[[int], Path]) -> None:
    remote = RemotePolicies(url)
    assert remote.versions() == []
    folder = published(3)
    remote.publish(folder)
    assert remote.versions() == [3]
    fetched = remote.fetch(3, tmp_path / "other")
    assert versions.load_manifest(fetched) == versions.load_manifest(folder)
    for path in folder.iterdir():
        assert (fetched / path.name).read_bytes() == path.read_bytes()


def test_a_version_whose_upload_broke_off_is_none(
    url: str, published: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemotePolicies(url)
    remote.publish(published(1))
    folder = published(2)
    kind = type(fsspec.core.url_to_fs(url)[0])
    put = kind.put_file

    def cut(self: Any, source: str, target: str, **more: object) -> None:
        if source.endswith("adapter_model.safetensors"):
            raise KeyboardInterrupt
        put(self, source, target, **more)

    monkeypatch.setattr(kind, "put_file", cut)
    with pytest.raises(KeyboardInterrupt):
        remote.publish(folder)
    assert RemotePolicies(url).versions() == [1]


def test_changed_weights_are_not_fetched(url: str, tmp_path: Path, published: Callable[[int], Path]) -> None:
    remote = RemotePolicies(url)
    remote.publish(published(1))
    fs, root = fsspec.core.url_to_fs(url)
    with fs.open(f"{root}/policy-v1/adapter_model.safetensors", "wb") as file:
        file.write(b"other")
    with pytest.raises(CheckpointError, match="SHA-256"):
        remote.fetch(1, tmp_path / "other")
    assert versions.newest(tmp_path / "other") is None


def test_collection_keeps_the_newest_and_what_is_held(url: str, published: Callable[[int], Path]) -> None:
    remote = RemotePolicies(url)
    for version in range(5):
        remote.publish(published(version))
    assert remote.collect_garbage(keep=2, protected=[1]) == [0, 2]
    assert remote.versions() == [1, 3, 4]


def test_publishing_again_replaces(url: str, published: Callable[[int], Path]) -> None:
    remote = RemotePolicies(url)
    remote.publish(published(1))
    remote.publish(published(1))
    assert remote.versions() == [1]


def test_an_unknown_scheme_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="policy_url=nonsense"):
        RemotePolicies("nonsense://x")


def test_a_version_that_is_not_there_says_which_are(url: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no version 7"):
        RemotePolicies(url).fetch(7, tmp_path)
