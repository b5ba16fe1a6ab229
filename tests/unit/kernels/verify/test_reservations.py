"""Verifiers on one GPU wait for each other's memory, in the order of asking, and not for the dead."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels.verify.cuda.device import CudaDevice
from kbrl_async.kernels.verify.cuda.reference import CudaReference, DoesNotFit
from kbrl_async.kernels.verify.family import Family
from kbrl_async.kernels.verify.hoarding import Crowded, NoMemory
from kbrl_async.kernels.verify.options import no_tick
from kbrl_async.kernels.verify.reservations import Reservations, even_share
from kbrl_async.kernels.verify.session import CandidateFault
from kbrl_async.kernels.verify.sets import Inconstant
from protocols.records import Fault, Problem

GIB = 1 << 30
TOTAL = 80 * GIB
PATIENCE_S = 60.0
Make = Callable[[], Reservations]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Reservations] = []

    def one() -> Reservations:
        made.append(Reservations(tmp_path / "gpu", TOTAL))
        return made[-1]

    yield one
    for each in made:
        each.close()


def test_alone_it_may_have_all(make: Make) -> None:
    only = make()
    assert only.take(2 * TOTAL)
    assert only.others == []


def test_two_have_what_fits_beside_each_other(make: Make) -> None:
    first, second = make(), make()
    assert first.take(40 * GIB)
    assert second.take(30 * GIB)
    assert not second.take(40 * GIB)
    assert second.held == 30 * GIB, "a refusal changes nothing"
    first.hold(20 * GIB)
    assert second.take(40 * GIB)


def test_little_is_nobodys_concern(make: Make) -> None:
    first, second = make(), make()
    assert first.take(75 * GIB)
    assert second.take(GIB // 2)
    assert first.others[0].held == 0


def wait(one: Reservations, size: int, done: list[Reservations]) -> threading.Thread:
    def run() -> None:
        one.wait_for(size, no_tick, PATIENCE_S)
        done.append(one)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def is_waiting(by: Reservations, count: int) -> None:
    until(lambda: sum(other.wanted > 0 for other in by.others) == count)


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_who_waits_goes_on_when_there_is_room_in_the_order_of_asking(make: Make) -> None:
    holder, large, small = make(), make(), make()
    done: list[Reservations] = []
    assert holder.take(70 * GIB)
    threads = [wait(large, 60 * GIB, done)]
    is_waiting(holder, 1)
    threads.append(wait(small, 5 * GIB, done))
    is_waiting(holder, 2)
    assert not holder.take(71 * GIB), "others have asked before"
    threads[1].join(0.3)
    assert done == [], "what fits does not pass those before it, or they would wait for ever"
    holder.hold(6 * GIB)
    threads[0].join(0.3)
    assert done == [], "66 of 75 GiB are planned with then, but two others have contexts beside"
    holder.hold(4 * GIB)
    threads[0].join(PATIENCE_S)
    assert done == [large], "there is not enough for both"
    holder.hold(0)
    threads[1].join(PATIENCE_S)
    assert done == [large, small]
    assert [large.held, small.held] == [60 * GIB, 5 * GIB]


def test_more_than_there_is_waits_for_all_others_only(make: Make) -> None:
    first, second = make(), make()
    assert first.take(2 * GIB)
    done: list[Reservations] = []
    thread = wait(second, 2 * TOTAL, done)
    is_waiting(first, 1)
    first.hold(0)
    thread.join(PATIENCE_S)
    assert done == [second]


def test_waiting_has_an_end_that_names_who_holds_it(make: Make) -> None:
    first, second = make(), make()
    assert first.take(60 * GIB)
    with pytest.raises(InfraError, match=rf"50\.0 GiB .*process {os.getpid()}: 60\.0 GiB"):
        second.wait_for(50 * GIB, no_tick, 0.1)
    assert first.take(70 * GIB), "who gave up is not waited for"


def test_a_tick_that_raises_ends_the_wait(make: Make) -> None:
    first, second = make(), make()
    assert first.take(60 * GIB)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        second.wait_for(50 * GIB, stop, PATIENCE_S)
    assert [other.wanted for other in first.others] == [0]


def hold_until_killed(folder: Path, told: Connection) -> None:
    held = Reservations(folder, TOTAL).take(70 * GIB)
    told.send(held)
    signal.pause()


def test_what_a_killed_one_held_is_free(make: Make, tmp_path: Path) -> None:
    mine = make()
    ours, theirs = mp.Pipe()
    other = mp.get_context("fork").Process(target=hold_until_killed, args=(tmp_path / "gpu", theirs))
    other.start()
    assert ours.recv()
    assert not mine.take(20 * GIB)
    other.kill()
    other.join()
    assert mine.take(20 * GIB)
    assert len(list((tmp_path / "gpu").glob("*-*"))) == 1, "its file is gone"


def test_foreign_files_in_the_folder_are_no_verifiers(make: Make, tmp_path: Path) -> None:
    mine = make()
    (tmp_path / "gpu" / "x-1").write_bytes(b"")
    assert mine.take(TOTAL)


@pytest.fixture
def device(make: Make) -> CudaDevice:
    """A bench's part of a GPU; nothing of it is touched."""
    made = CudaDevice("cuda:0")
    made.reservations = make()
    return made


def families(*gib: int) -> OrderedDict[str, Family]:
    return OrderedDict((str(number), cast(Any, Mock(device_bytes=one * GIB))) for number, one in enumerate(gib))


def test_alone_a_bench_keeps_its_references(device: CudaDevice) -> None:
    assert device.may_use(60 * GIB)
    assert device.rest(20 * GIB)
    assert device.reservations is not None
    assert device.reservations.held == 20 * GIB


def test_beside_others_it_keeps_little(device: CudaDevice, make: Make) -> None:
    other = make()
    assert device.may_use(60 * GIB)
    assert not device.rest(20 * GIB), "they are to be closed"
    assert device.rest(0)
    assert other.take(70 * GIB)


def test_one_of_several_keeps_what_is_within_its_share(device: CudaDevice, make: Make) -> None:
    make()
    device.kept_share = 0.25
    assert device.may_use(20 * GIB)
    assert device.rest(20 * GIB), "a quarter of the GPU, not of what may be planned with"
    assert device.rest(0)
    assert device.may_use(15 * GIB)
    assert device.rest(12 * GIB)
    assert device.may_use(30 * GIB)
    assert not device.rest(12 * GIB)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("gib", [40, 80, 141])
def test_who_keeps_to_an_even_share_never_waits(tmp_path: Path, count: int, gib: int) -> None:
    each = [Reservations(tmp_path / "gpu", gib * GIB) for _ in range(count)]
    share = int(even_share(gib * GIB, count) * gib * GIB)
    assert all(one.take(share) for one in each)
    most = gib * GIB // count
    assert count == 5 or not all(one.take(most) for one in each), "an equal part of all is more than there is"
    for one in each:
        one.close()


def test_one_of_several_keeps_to_its_share_where_it_can(make: Make) -> None:
    """It took what the others had not yet asked for, and they waited."""
    device = CudaDevice("cuda:0")
    device.reservations, device.homes, device.memory_share = make(), cast(Any, Mock()), 0.25
    make()
    kept = families(8, 6)
    assert device.may_use(20 * GIB)
    assert not device.may_use(21 * GIB)
    assert not device.may_grow(GIB)
    device.claim_beside(kept)(5 * GIB)
    assert len(kept) == 2
    device.claim_beside(kept)(12 * GIB)
    assert not kept, "before it takes more than its share"
    device.claim_beside(kept)(25 * GIB)
    assert device.reservations.held == 25 * GIB, "what has no room in it is planned with all the same"


def test_arenas_are_a_part_of_what_is_held(device: CudaDevice, make: Make) -> None:
    device.replays, device.kept_share = cast(Any, SimpleNamespace(device_bytes=8 * GIB)), 0.5
    assert make().take(40 * GIB)
    assert device.rest(2 * GIB)
    assert device.reservations is not None
    assert device.reservations.held == 0, "what nobody took is not held"
    assert device.may_use(10 * GIB)
    assert device.rest(2 * GIB)
    assert device.reservations.held == 10 * GIB
    assert not device.may_use(40 * GIB)
    assert not device.may_grow(30 * GIB)


def test_what_somebody_waits_for_is_given_back_however_little(device: CudaDevice, make: Make) -> None:
    other = make()
    assert device.may_use(3 * GIB)
    assert device.rest(3 * GIB)
    done: list[Reservations] = []
    thread = wait(other, TOTAL, done)
    assert device.reservations is not None
    is_waiting(device.reservations, 1)
    assert not device.rest(3 * GIB)
    assert device.rest(0)
    thread.join(PATIENCE_S)
    assert done == [other]


def test_what_is_planned_with_is_asked_for_beside_what_is_kept(device: CudaDevice, make: Make) -> None:
    assert make().take(40 * GIB)
    device.homes, kept = cast(Any, Mock()), families(5, 10)
    claim = device.claim_beside(kept)
    claim(10 * GIB)
    assert len(kept) == 2
    with pytest.raises(Crowded):
        claim(40 * GIB)
    assert not kept


def test_before_a_claim_waits_what_is_kept_goes_and_then_what_was_recorded_in(device: CudaDevice, make: Make) -> None:
    assert make().take(30 * GIB)
    device.homes, kept = cast(Any, Mock()), families(20, 10)
    replays = SimpleNamespace(device_bytes=4 * GIB, shrink=lambda: setattr(replays, "device_bytes", 0))
    device.replays = cast(Any, replays)
    claim, gone = device.claim_beside(kept), list(kept.values())
    claim(30 * GIB)
    assert not kept
    assert all(cast(Any, one).retire.called for one in gone), "their processes serve others"
    assert replays.device_bytes == 4 * GIB, "nobody asked for that yet"
    claim(38 * GIB)
    assert replays.device_bytes == 0
    with pytest.raises(Crowded):
        claim(45 * GIB)


def test_a_bench_waits_its_turn_and_then_has_it(device: CudaDevice, make: Make) -> None:
    other = make()
    assert other.take(60 * GIB)
    threading.Timer(0.2, other.hold, (0,)).start()
    device.wait_for(50 * GIB, no_tick)
    assert device.reservations is not None
    assert device.reservations.held == 50 * GIB


def test_who_is_granted_all_that_there_is_has_it(device: CudaDevice, make: Make) -> None:
    other = make()
    device.wait_for(2 * TOTAL, no_tick)
    assert device.may_use(2 * TOTAL)
    assert not other.take(2 * GIB)


def made_after(errors: list[Exception], device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """What `reference` gives where making one meets these first, and the bytes that were waited for."""
    waited: list[int] = []

    def make_reference(*_: object) -> str:
        if errors:
            raise errors.pop(0)
        return "made"

    monkeypatch.setattr("kbrl_async.kernels.verify.cuda.device.CudaReference", make_reference)
    monkeypatch.setattr(device, "give_back", lambda keeps_processes: None)
    monkeypatch.setattr(device, "wait_for", lambda size, tick: waited.append(size))
    if device.reservations is not None:
        monkeypatch.setattr(device.reservations, "wait_for", lambda size, tick, limit_s: waited.append(size))
    device.spares = device.homes = cast(Any, object())
    given = cast(Any, (None, None, None, None, OrderedDict(), no_tick))
    return device._made(*given), waited


def test_memory_is_waited_for_as_often_as_more_of_it_is_asked_for(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs out before anything is planned; then inputs are known; then outputs."""
    errors = [DoesNotFit("no memory"), Crowded(10 * GIB), Crowded(30 * GIB)]
    assert made_after(errors, device, monkeypatch) == ("made", [0, 10 * GIB, 30 * GIB])


def test_a_large_reference_that_answers_in_two_ways_is_made_once_more_without_others(
    device: CudaDevice, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that finds too little memory in one of two calls goes another way there."""

    def found(is_short: bool, times: int) -> list[Exception]:
        error = Inconstant("it is random", "take that out")
        error.is_short = is_short
        return [error] * times

    with pytest.raises(Inconstant):
        made_after(found(True, 1), device, monkeypatch)
    other = make()
    with pytest.raises(Inconstant):
        made_after(found(True, 1), device, monkeypatch)
    assert other.take(2 * GIB)
    assert made_after(found(True, 1), device, monkeypatch) == ("made", [TOTAL * 15 // 16])
    for is_short, times in ((True, 2), (False, 1)):
        with pytest.raises(Inconstant):
            made_after(found(is_short, times), device, monkeypatch)


def test_processes_that_wait_end_where_somebody_wants_nearly_all(device: CudaDevice, make: Make) -> None:
    first, second, third = make(), make(), make()
    known = device.reservations
    assert known is not None
    assert known.is_room_beside(60 * GIB)
    assert not known.is_room_beside(61 * GIB), "four have contexts of 20 GiB"
    assert first.take(60 * GIB)
    assert known.is_room_beside(0)
    first.hold(0)
    done: list[Reservations] = []
    thread = wait(second, 64 * GIB, done)
    thread.join(PATIENCE_S)
    assert not known.is_room_beside(0)
    assert not third.is_room_beside(0)
    assert second.is_room_beside(0)
    ended = device.homes = device.spares = device.replays = cast(Any, Mock(device_bytes=0))
    device.rest(0)
    assert not ended.close.called, "what it keeps is nobody's concern"
    second.hold(0)
    assert device.may_use(5 * GIB)
    thread = wait(second, 72 * GIB, done)
    is_waiting(known, 1)
    device.rest(0)
    assert ended.close.call_count == 3
    thread.join(PATIENCE_S)


def test_a_new_zygote_leaves_a_bench_among_the_others(device: CudaDevice, make: Make) -> None:
    """It was a stranger to them from then on: neither side waited for the other."""
    other = make()
    device.homes = device.spares = device.replays = cast(Any, Mock(device_bytes=0))
    assert device.may_use(60 * GIB)
    device.restart()
    assert other.take(60 * GIB)
    assert not device.may_use(20 * GIB)
    assert len(other.others) == 1


def test_memory_that_runs_out_twice_is_told_by_whoever_has_it(
    device: CudaDevice, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DoesNotFit):
        made_after([DoesNotFit("no memory")] * 2, device, monkeypatch)
    make()
    with pytest.raises(NoMemory):
        made_after([DoesNotFit("no memory")] * 2, device, monkeypatch)


@pytest.mark.parametrize(
    ("share", "free", "told"),
    [(1.0, 30, NoMemory), (1.0, 76, DoesNotFit), (0.25, 10, NoMemory), (0.25, 30, DoesNotFit)],
)
def test_a_problem_is_too_large_only_where_others_do_not_hold_the_memory(
    device: CudaDevice, make: Make, monkeypatch: pytest.MonkeyPatch, share: float, free: int, told: type[Exception]
) -> None:
    """Though everybody has given way already: others may hold what nobody plans with. What lies beyond its own share
    is nobody's fault.
    """
    make()
    device.memory_share = share
    for name in ("give_back", "wait_for"):
        monkeypatch.setattr(device, name, lambda *_, **__: None)
    device.give_way(no_tick)
    monkeypatch.setattr(device, "free", lambda: free * GIB)
    with pytest.raises(told) as found:
        made_after([DoesNotFit("no memory")] * 2, device, monkeypatch)
    assert ("others hold" in str(found.value)) == (told is NoMemory)


def test_a_reference_that_finds_no_memory_may_find_it_later() -> None:
    reference = cast(Any, CudaReference.__new__(CudaReference))
    reference.problem = Problem("L1/01_add", 1, "add", "")
    assert isinstance(reference._failed(CandidateFault(Fault.OUT_OF_MEMORY, "none left")), DoesNotFit)
    assert not isinstance(reference._failed(CandidateFault(Fault.RUNTIME_ERROR, "wrong")), DoesNotFit)
