"""Device memory that is moved between a GPU and its host, on a pretended driver: no byte is lost, and no handle."""

from __future__ import annotations

import os
from unittest.mock import Mock

import pytest
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.kernels.verify.cuda.arena import DeviceArena
from kbrl_async.kernels.verify.hoarding import NoMemory
from tests.unit.kernels.verify.pretended_gpu import Memory, pretend_memory

SIZE, CPU = 8192, torch.device("cpu")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return pretend_memory(monkeypatch, SIZE)


def filled() -> DeviceArena:
    made = DeviceArena.new(SIZE, CPU)
    made.raw.copy_(torch.arange(SIZE, dtype=torch.int64).to(torch.uint8))
    return made


def is_whole(one: DeviceArena) -> bool:
    return torch.equal(one.raw, torch.arange(SIZE, dtype=torch.int64).to(torch.uint8))


def test_new_memory_says_nothing_of_what_lay_there(memory: Memory) -> None:
    assert not bool(DeviceArena.new(SIZE, CPU).raw.any())


def test_bytes_and_addresses_stay(memory: Memory) -> None:
    made = filled()
    view, address = made.raw[100:200], made.raw.data_ptr()
    for to_host in (True, True, False, True, False):
        made.move(to_host)
        assert is_whole(made)
        assert made.raw.data_ptr() == address
        assert (made.device_bytes, made.is_on_host) == (0 if to_host else SIZE, to_host)
        assert torch.equal(view, made.raw[100:200])
        assert len(memory.on_host & memory.live.keys()) == 1, "pinned once, and kept"
        assert made.host_bytes == SIZE
    made.close()
    made.close()
    assert not memory.live


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("fails", ["create", "create on the host", "map", "fill_in"])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_move_that_fails_has_changed_nothing(memory: Memory, to_host: bool, fails: str, is_known: bool) -> None:
    """`is_known`: it was on the other side before."""
    made = filled()
    if not to_host or is_known:
        made.move(to_host=True)
    if to_host and is_known:
        made.move(to_host=False)
    before, memory.fails, memory.times = dict(memory.live), fails, 2 if fails.startswith("create") else 1
    is_asked = fails not in (("create",) if to_host else ("create on the host",))
    is_asked &= not (fails == "create on the host" and is_known)
    if is_asked:
        with pytest.raises(NoMemory if fails == "create on the host" else CudaError):
            made.move(to_host)
        assert memory.live == before
        assert made.is_on_host is not to_host
    memory.fails = ""
    assert is_whole(made)
    made.move(to_host)
    assert is_whole(made)
    made.close()
    assert not memory.live


def test_who_does_not_take_it_leaves_it_where_it_was(memory: Memory) -> None:
    made = filled()
    made.move(to_host=True)
    before = dict(memory.live)

    def ended(fd: int) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        made.move(False, ended)
    assert memory.live == before
    assert made.is_on_host
    assert is_whole(made)


def test_the_other_process_follows_and_sees_nothing_until_it_has(memory: Memory) -> None:
    ours = filled()
    theirs = DeviceArena.received(ours.export(), SIZE, CPU)
    seen: list[set[int]] = []

    def hand_over(fd: int) -> None:
        theirs.replace(os.dup(fd))
        seen.append(set(theirs.raw.tolist()))

    for to_host in (True, False):
        ours.move(to_host, hand_over)
        assert is_whole(theirs)
    assert seen == [{0}, {0}]
    theirs.raw.fill_(5)
    assert bool((ours.raw == 5).all()), "one memory"


def test_what_is_the_hosts_alone_nobody_else_can_write_to(memory: Memory) -> None:
    ours = filled()
    theirs = DeviceArena.received(ours.export(), SIZE, CPU)
    ours.move(to_host=True)
    theirs.raw.fill_(9)  # it has its old memory until it lets go of it
    theirs.replace(None)
    assert is_whole(ours)
    ours.move(False, lambda fd: theirs.replace(os.dup(fd)))
    assert is_whole(theirs)
    ours.close()
    theirs.close()
    assert not memory.live


@pytest.mark.parametrize("leaves", [True, False])
def test_a_process_gives_back_all_whether_it_has_any_or_not(memory: Memory, leaves: bool) -> None:
    ours = filled()
    theirs = DeviceArena.received(ours.export(), SIZE, CPU)
    if leaves:
        theirs.replace(None)
    theirs.close()
    ours.close()
    assert not memory.live


def test_what_lay_on_a_gpu_is_gone_when_its_memory_is(memory: Memory) -> None:
    """What an expected answer lay in may be the next one's that a candidate is given."""
    made = filled()
    kept = made.export()
    made.move(to_host=True)
    assert os.pread(kept, SIZE, 0) == bytes(SIZE)
    os.close(kept)


def test_what_goes_wrong_once_the_other_has_followed_is_a_fault_of_the_host(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes over memory in which nothing is: its reference is made anew."""
    made = filled()

    def follow(fd: int) -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=RuntimeError("an error of the device")))

    with pytest.raises(InfraError, match="was lost"):
        made.move(True, follow)


def test_who_has_followed_to_memory_that_is_not_used_is_lost(memory: Memory) -> None:
    made = filled()

    def follow(fd: int) -> None:
        memory.fails = "fill_in"

    with pytest.raises(InfraError, match="was lost"):
        made.move(True, follow)


def test_what_torch_keeps_is_asked_for_before_a_move_fails(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    made, emptied = filled(), Mock()
    made.move(to_host=True)
    monkeypatch.setattr(torch.cuda, "empty_cache", emptied)
    memory.fails = "create"
    made.move(to_host=False)
    emptied.assert_called_once()
    assert is_whole(made)


def test_memory_of_the_host_that_is_not_needed_again_is_given_back(memory: Memory) -> None:
    made = filled()
    made.move(to_host=True)
    made.move(to_host=False)
    made.let_go()
    assert made.host_bytes == 0
    assert not memory.on_host & memory.live.keys()
    made.move(to_host=True)
    assert is_whole(made)


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("name", ["cuMemUnmap", "clear"])
def test_whatever_the_driver_refuses_after_that_is_one(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, name: str, to_host: bool
) -> None:
    """The bench wrote to memory of its own, and its reference answered over what nobody had written."""
    made = filled()
    if not to_host:
        made.move(to_host=True)
    call, clear = memory.call, memory.clear

    def fails(asked: str) -> None:
        if asked == name:
            raise CudaError(name, 1, "CUDA_ERROR_INVALID_VALUE")

    def follow(fd: int) -> None:
        monkeypatch.setattr(memory, "call", lambda asked, *given: (fails(asked), call(asked, *given)))
        monkeypatch.setattr(memory, "clear", lambda *given: (fails("clear"), clear(*given)))

    with pytest.raises(InfraError, match="was lost"):
        made.move(to_host, follow)
