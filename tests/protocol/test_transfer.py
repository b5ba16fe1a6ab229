"""Artifacts between hosts: whole, right, bounded, and on from where they stopped."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbrl_async.kernels.backends.building.store import ArtifactStore
from protocols import messages as msg
from protocols.transfer import CHUNK_BYTES, MAX_BYTES, RETRY_S, WINDOW, Download, Upload
from services.broker.artifact_exchange import MAX_UPLOADS_EACH, ArtifactExchange
from services.broker.server import BrokerServer
from services.runtime import Worker
from services.runtime.transfers import Transfers
from tests.brokers import beside, ends, serving, until, working


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def depot(tmp_path: Path) -> ArtifactExchange:
    return ArtifactExchange(tmp_path / "artifacts", max_bytes=64 << 20)


def content_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def address_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def hand_over(
    depot: ArtifactExchange, content: bytes, owner: str = "compile/a", lose: random.Random | None = None
) -> Upload:
    """Carry an upload through, losing messages both ways where asked to."""
    upload, now = Upload(content), 0.0
    for _ in range(1000):
        for offer, payload in upload.tick(now):
            if lose and lose.random() < 0.3:
                continue
            kept = depot.offer(owner, offer, payload)
            if not (lose and lose.random() < 0.3):
                upload.handle(kept, now)
        if upload.ended or upload.failure:
            break
        now += 0.5
    return upload


def take_out(depot: ArtifactExchange, address: str, lose: random.Random | None = None) -> Download:
    download, now = Download(address), 0.0
    for _ in range(1000):
        for want in download.tick(now):
            chunk, payload = depot.want(want)
            if not (lose and lose.random() < 0.3):
                download.handle(chunk, b"".join(payload))
        if download.ended:
            break
        now += 0.5
    return download


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 7 * CHUNK_BYTES - 3])
def test_what_is_handed_over_comes_out_again(depot: ArtifactExchange, size: int) -> None:
    content = content_of(size)
    assert hand_over(depot, content).ended
    assert take_out(depot, address_of(content)).content == content


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_lost_messages_cost_time_and_nothing_else(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    depot, lose = ArtifactExchange(tmp_path_factory.mktemp("depot"), 64 << 20), random.Random(seed)
    content = content_of(5 * CHUNK_BYTES + 17)
    assert hand_over(depot, content, lose=lose).ended
    assert take_out(depot, address_of(content), lose=lose).content == content


def test_the_depot_is_the_builders_own_store(depot: ArtifactExchange, tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    hand_over(depot, b"from a remote farm")
    assert store.path(address_of(b"from a remote farm")) is not None
    assert take_out(depot, store.put(b"from a local farm")).content == b"from a local farm"


def test_an_upload_goes_on_where_it_stopped(depot: ArtifactExchange) -> None:
    content = content_of(6 * CHUNK_BYTES)
    first = Upload(content)
    (ask, _), = first.tick(0.0)  # fmt: skip
    first.handle(depot.offer("a", ask, []), 0.0)
    for offer, payload in first.tick(0.1)[:3]:
        depot.offer("a", offer, payload)
    again = Upload(content)
    again.handle(depot.offer("a", again.tick(9.0)[0][0], []), 9.0)
    assert next(offer.offset for offer, _ in again.tick(9.1)) == 3 * CHUNK_BYTES


def test_an_upload_goes_on_after_a_restart_of_the_broker(tmp_path: Path) -> None:
    content = content_of(6 * CHUNK_BYTES)
    upload = Upload(content)
    (ask, _), = upload.tick(0.0)  # fmt: skip
    before = ArtifactExchange(tmp_path, 1 << 30)
    upload.handle(before.offer("a", ask, []), 0.0)
    for offer, payload in upload.tick(0.1)[:3]:
        before.offer("a", offer, payload)
    after = ArtifactExchange(tmp_path, 1 << 30)
    sent: list[int] = []
    for _ in range(4):  # it asks, after a silence, and goes on
        for offer, payload in upload.tick(9.0):
            upload.handle(after.offer("a", offer, payload), 9.0)
            sent += [offer.offset // CHUNK_BYTES] * len(payload)
    assert sent == [3, 4, 5]
    assert take_out(after, upload.address).content == content


def test_what_nobody_goes_on_with_after_a_restart_is_not_kept(tmp_path: Path) -> None:
    upload = Upload(content_of(2 * CHUNK_BYTES))
    before = ArtifactExchange(tmp_path, 1 << 30)
    upload.handle(before.offer("a", upload.tick(0.0)[0][0], []), 0.0)
    before.offer("a", *upload.tick(0.1)[0])
    (left,) = (tmp_path / "work").iterdir()
    ArtifactExchange(tmp_path, 1 << 30)
    assert left.exists(), "its farm may go on"
    os.utime(left, (0, 0))
    ArtifactExchange(tmp_path, 1 << 30)
    assert not left.exists()


def test_a_small_artifact_takes_one_message_each_way(depot: ArtifactExchange) -> None:
    upload = Upload(content_of(1000))
    ((offer, payload),) = upload.tick(0.0)
    upload.handle(depot.offer("a", offer, payload), 0.1)
    assert upload.ended


def test_a_lost_small_artifact_is_sent_again(depot: ArtifactExchange) -> None:
    upload = Upload(content_of(1000))
    upload.tick(0.0)
    assert upload.tick(RETRY_S - 0.1) == []
    ((ask, nothing),) = upload.tick(RETRY_S)
    upload.handle(depot.offer("a", ask, nothing), RETRY_S)
    ((offer, payload),) = upload.tick(RETRY_S)
    upload.handle(depot.offer("a", offer, payload), RETRY_S)
    assert upload.ended


def test_at_most_a_window_is_on_its_way() -> None:
    upload = Upload(content_of(20 * CHUNK_BYTES))
    upload.tick(0.0)
    upload.handle(msg.Kept(upload.address, 0), 0.0)
    assert len(upload.tick(0.1)) == WINDOW
    assert upload.tick(0.2) == []


def test_late_pieces_are_asked_for_again_and_not_before() -> None:
    download = Download(address_of(b"x"))
    assert len(download.tick(0.0)) == 1
    assert download.tick(RETRY_S - 0.1) == []
    assert len(download.tick(RETRY_S)) == 1


def test_content_that_does_not_hash_to_its_address_is_kept_by_nobody(depot: ArtifactExchange) -> None:
    address = address_of(b"what it says it is")
    kept = depot.offer("a", msg.Offer(address, 0, 6), [b"poison"])
    assert "does not hash" in kept.reason
    assert take_out(depot, address).failure
    assert not list((depot.root / "work").iterdir())


def test_a_bench_takes_nothing_that_is_not_what_it_asked_for() -> None:
    download = Download(address_of(b"right"))
    download.tick(0.0)
    download.handle(msg.Chunk(download.address, 0, 5), b"wrong")
    assert download.content is None
    assert "not the one" in download.failure


def test_a_piece_of_another_length_or_place_is_ignored() -> None:
    download = Download(address_of(b"right"))
    download.tick(0.0)
    download.handle(msg.Chunk(download.address, 0, 5), b"too long for it")
    download.handle(msg.Chunk(download.address, 77, 5), b"right")
    download.handle(msg.Chunk("0" * 64, 0, 5), b"right")
    assert not download.ended


@pytest.mark.parametrize("address", ["", "../../etc/passwd", "a" * 63, "A" * 64, "a" * 63 + "/", "a" * 64 + "\n"])
def test_an_address_that_is_no_hash_reaches_no_file(depot: ArtifactExchange, address: str) -> None:
    assert depot.want(msg.Want(address, 0, 10))[0].total == -1
    assert depot.offer("a", msg.Offer(address, 0, 1), [b"x"]).reason


@pytest.mark.parametrize(("offset", "length"), [(-1, 10), (0, -1), (0, CHUNK_BYTES + 1), (2**62, 1), (10, 1)])
def test_a_piece_out_of_range_is_not_served(depot: ArtifactExchange, offset: int, length: int) -> None:
    hand_over(depot, b"hello")
    assert depot.want(msg.Want(address_of(b"hello"), offset, length)) == (
        msg.Chunk(address_of(b"hello"), offset, -1), [])  # fmt: skip


@pytest.mark.parametrize("total", [-1, MAX_BYTES + 1, 2**60])
def test_an_artifact_beyond_the_limit_is_refused_before_a_byte_is_written(depot: ArtifactExchange, total: int) -> None:
    assert depot.offer("a", msg.Offer("a" * 64, 0, total), [b"x"]).reason
    assert not list((depot.root / "work").iterdir())


def test_pieces_out_of_order_or_too_long_are_not_kept(depot: ArtifactExchange) -> None:
    address = "a" * 64
    assert depot.offer("a", msg.Offer(address, 5, 100), [b"x"]).offset == 0
    assert depot.offer("a", msg.Offer(address, 0, 100), [b"x" * 101]).offset == 0
    assert depot.offer("a", msg.Offer(address, 0, 100), [b"x" * 10]).offset == 10
    assert depot.offer("a", msg.Offer(address, 0, 100), [b"x" * 10]).offset == 10


def test_one_owner_can_not_spoil_anothers_upload(depot: ArtifactExchange) -> None:
    content = content_of(2 * CHUNK_BYTES)
    address, half = address_of(content), CHUNK_BYTES
    depot.offer("honest", msg.Offer(address, 0, len(content)), [content[:half]])
    depot.offer("thief", msg.Offer(address, 0, len(content)), [b"poison"])
    assert depot.offer("honest", msg.Offer(address, half, len(content)), [content[half:]]).complete
    assert take_out(depot, address).content == content


def test_uploads_at_once_are_bounded_and_idle_ones_make_room(tmp_path: Path) -> None:
    clock = Clock()
    depot = ArtifactExchange(tmp_path, 1 << 20, clock)
    for number in range(MAX_UPLOADS_EACH + 3):
        depot.offer("a", msg.Offer(f"{number:064x}", 0, 100), [b"x"])
    assert len(list((tmp_path / "work").iterdir())) == MAX_UPLOADS_EACH
    clock.now = 1e6
    depot.offer("a", msg.Offer("f" * 64, 0, 100), [b"x"])
    assert len(list((tmp_path / "work").iterdir())) == 1


def test_the_store_stays_within_its_limit(tmp_path: Path) -> None:
    depot = ArtifactExchange(tmp_path, max_bytes=4 * CHUNK_BYTES)
    for number in range(10):
        assert hand_over(depot, content_of(CHUNK_BYTES - number)).ended
    assert sum(path.stat().st_size for path in tmp_path.glob("objects/*/*")) <= 4 * CHUNK_BYTES


def test_an_artifact_passes_through_a_live_broker(tmp_path: Path) -> None:
    async def play() -> bytes:
        options = beside(tmp_path)
        farm = Worker(options.work_address, "farm", ["compile"], 1, ends)
        bench = Worker(options.work_address, "bench", ["bench"], 1, ends)
        async with asyncio.timeout(120), serving(BrokerServer(options)), working(farm, bench):
            await until(lambda: farm.welcomed and bench.welcomed)
            return await bench.transfers.fetch(await farm.transfers.send(content_of(3 * CHUNK_BYTES + 1)))

    assert asyncio.run(play()) == content_of(3 * CHUNK_BYTES + 1)


def test_a_download_goes_on_over_a_new_connection_and_repeats_a_window_at_most(depot: ArtifactExchange) -> None:
    content = content_of(40 * CHUNK_BYTES)
    hand_over(depot, content)
    download = Download(address_of(content))
    asked = broken = 0
    now = 0.0
    while not download.ended:
        wants = download.tick(now)
        asked += len(wants)
        is_cut = asked > 20 and not broken
        broken += is_cut
        for want in wants:
            if not is_cut:  # what was on its way when the line broke never comes
                chunk, payload = depot.want(want)
                download.handle(chunk, b"".join(payload))
        now += RETRY_S
    assert download.content == content
    assert broken == 1
    assert asked <= 40 + WINDOW, "what had come was not asked for again"


def test_a_transfer_that_two_wait_for_goes_on_when_one_is_gone() -> None:
    async def play() -> bytes:
        content, said = content_of(10), list[msg.Message]()
        transfers = Transfers(lambda message, _: said.append(message))
        one, other = (asyncio.create_task(transfers.fetch(address_of(content))) for _ in range(2))
        while not said:
            await asyncio.sleep(0)
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        (wanted,) = said
        assert isinstance(wanted, msg.Want)
        transfers.handle(msg.Chunk(wanted.address, wanted.offset, len(content)), [content])
        return await asyncio.wait_for(other, 120)

    assert asyncio.run(play()) == content_of(10)
