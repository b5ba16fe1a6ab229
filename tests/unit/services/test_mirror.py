"""A sampler on another host: it shares no folder with the learner, and has the newest version all the same."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import resource
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.keyring import Keyring, client_keys
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import wrap_lora
from kbrl_async.runs.config import Endpoints, load
from kbrl_async.weights import LISTED, MEETING, prove
from protocols.auth import Role
from protocols.messages import Want
from protocols.sockets import ClientKeys
from protocols.transfer import CHUNK_BYTES, POLICY, PolicyListing
from services.broker.artifact_exchange import ArtifactExchange
from services.broker.options import BrokerOptions
from services.broker.server import BrokerServer
from services.sampler import mirror
from services.sampler.mirror import Mirror
from tests.brokers import beside, endpoints, serving, until
from tests.unit.sampling.conftest import CANARY, make_model
from tests.unit.services.log import Log

torch.set_num_threads(1)
PATIENCE_S = 120.0


class Hosts:
    """The broker's host, with the run's folder, and the sampler's, with a folder elsewhere."""

    def __init__(self, broker: BrokerServer, here: Path, there: Path, keys: ClientKeys | None = None) -> None:
        self.broker, self.learner, self.sampler = broker, here / "policies", there / "policies"
        work = endpoints(broker)[1]
        service: Any = SimpleNamespace(
            config=load(), policies=self.sampler, addresses=Endpoints("", work, ""), keys=keys, log=Log()
        )
        self.mirror = Mirror(service)

    def publish(self, version: int, model: torch.nn.Module | None = None) -> Path:
        model = model or make_model(seed=version)
        versions.publish(self.learner, model, version, None, version, CANARY, "base")
        return versions.version_folder(self.learner, version)

    async def fetched(self, version: int) -> Path:
        def is_there() -> bool:
            found = versions.newest(self.sampler)
            return found is not None and found[0].version == version

        await asyncio.wait_for(until(is_there), PATIENCE_S)
        return versions.version_folder(self.sampler, version)


@contextlib.asynccontextmanager
async def hosts(tmp_path: Path, keys: Role | None = None) -> AsyncIterator[Hosts]:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    ring = Keyring(tmp_path / "keys")
    options = beside(here)
    issued = None
    if keys is not None:
        issued = client_keys(str(ring.new(keys, "host7")))
        ring.new(Role.AGGREGATOR, "local")
        options = BrokerOptions(str(here), "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", keys=str(ring.folder))
    async with serving(BrokerServer(options)) as broker:
        pair = Hosts(broker, here, there, issued)
        running = asyncio.create_task(pair.mirror.run())
        try:
            yield pair
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def played(tmp_path: Path, body: Callable[[Hosts], Any], keys: Role | None = None) -> None:
    async def main() -> None:
        async with hosts(tmp_path, keys) as pair:
            await body(pair)

    asyncio.run(main())


def same_files(one: Path, other: Path) -> bool:
    names = {path.relative_to(one) for path in one.rglob("*") if path.is_file() and path.name != LISTED}
    assert names == {path.relative_to(other) for path in other.rglob("*") if path.is_file()}
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("keys", [None, Role.SAMPLER])
def test_versions_travel_through_the_broker(tmp_path: Path, kind: str, keys: Role | None) -> None:
    async def body(pair: Hosts) -> None:
        for version in range(2):
            model = wrap_lora(make_model(), rank=2) if kind == "lora" else None
            source = pair.publish(version, model)
            found = await pair.fetched(version)
            assert same_files(source, found)
            prove(found, versions.load_manifest(found))
        (pair.learner / MEETING).write_text('{"host":"h","port":1,"token":"t"}')
        await asyncio.wait_for(until(lambda: (pair.sampler / MEETING).exists()), PATIENCE_S)
        assert not list(pair.sampler.glob(".*.part"))

    played(tmp_path, body, keys)


def test_a_key_of_another_role_gets_no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "ANSWER_S", 0.2)

    async def body(pair: Hosts) -> None:
        pair.publish(0)
        await asyncio.sleep(1.0)
        assert versions.newest(pair.sampler) is None

    played(tmp_path, body, Role.COMPILE)


def large(folder: Path, size: int) -> Path:
    """A version whose weights are `size` bytes of anything."""
    content = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))

    def fill(place: Path) -> dict[str, str]:
        digest = versions.tensors.write(place / "model.safetensors", {"w": content})
        (place / "config.json").write_text("{}")
        return {"": digest}

    made = versions.prepare_as(folder, "full", fill, lambda ids: [-1.0] * (len(ids) - 1), 0, None, 0,
                               versions.Canaries(CANARY, []), "base")  # fmt: skip
    made.write()
    return versions.version_folder(folder, 0)


def test_a_file_goes_on_where_it_stopped_and_is_never_all_in_memory(tmp_path: Path) -> None:
    size = 96 << 20

    async def body(pair: Hosts) -> None:
        source = large(pair.learner, size)
        weights = source / "model.safetensors"
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        pair.sampler.mkdir(parents=True, exist_ok=True)
        kept = pair.sampler / f".{digest}.part"
        with weights.open("rb") as file:
            kept.write_bytes(file.read(size - 5 * CHUNK_BYTES + 17))  # of a process before this one
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert same_files(source, await pair.fetched(0))
        assert pair.broker.depot is not None
        assert pair.broker.depot.served < 8 * CHUNK_BYTES
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 2 * (size >> 10), "the comparison above holds both files"

    # before the mirror begins: it would fetch all of it
    async def main() -> None:
        async with serving(BrokerServer(beside(tmp_path / "here"))) as broker:
            pair = Hosts(broker, tmp_path / "here", tmp_path / "there")
            run = asyncio.create_task(_later(pair))
            try:
                await body(pair)
            finally:
                run.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await run

    (tmp_path / "here").mkdir()
    asyncio.run(main())


async def _later(pair: Hosts) -> None:
    await until(lambda: any(pair.sampler.glob(".*.part")) if pair.sampler.exists() else False)
    await pair.mirror.run()


def test_a_spoilt_beginning_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "ANSWER_S", 0.2)

    async def body(pair: Hosts) -> None:
        pair.sampler.mkdir(parents=True, exist_ok=True)
        model = make_model(seed=3)
        scratch = versions.publish(tmp_path / "scratch", model, 0, None, 0, CANARY, "base")
        (pair.sampler / f".{scratch.weights_sha256}.part").write_bytes(b"other bytes")
        source = pair.publish(0, model)
        assert same_files(source, await pair.fetched(0))

    played(tmp_path, body)


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", ""])
def test_a_listing_that_names_files_outside_is_refused(path: str) -> None:
    assert not mirror.is_inside(path)


def test_the_broker_serves_nothing_beside_the_newest_versions(tmp_path: Path) -> None:
    exchange = ArtifactExchange(tmp_path / "artifacts", 1 << 20, policies=tmp_path / "policies")
    assert exchange.want(Want(POLICY, 0, 1))[0].total == -1
    versions.publish(tmp_path / "policies", make_model(), 0, None, 0, CANARY, "base")
    secret = tmp_path / "policies" / "secret"
    secret.write_text("not listed")
    digest = hashlib.sha256(secret.read_bytes()).hexdigest()
    listing = exchange.want(Want(POLICY, 0, CHUNK_BYTES))[1][0]
    names = {file.path for file in msgspec.json.decode(listing, type=PolicyListing).files}
    assert names >= {"config.json", "manifest.json", "model.safetensors"}
    assert "secret" not in str(names)
    assert exchange.want(Want(digest, 0, 10))[0].total == -1
    assert exchange.want(Want("../secret", 0, 10))[0].total == -1
