"""Memory of the trusted side: what a bench has freed is the system's again, however long it runs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import socket
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import memory
from kbrl_async.kernels.verify import reference as module
from kbrl_async.kernels.verify import references as kept
from kbrl_async.kernels.verify.bench import Bench
from kbrl_async.kernels.verify.cpu import device as cpu_device
from kbrl_async.kernels.verify.device import device_of
from kbrl_async.kernels.verify.memory import as_message, whole
from kbrl_async.kernels.verify.options import bench_options
from kbrl_async.kernels.verify.references import References
from protocols.affinity import KEPT
from protocols.records import Candidate, Fault, Problem
from tests.unit.kernels.verify.conftest import SCALE_AND_SHIFT
from tests.unit.kernels.verify.test_bench import patient

PIECE, PIECES = 100_000, 500
"""Below the size from which glibc maps memory for each piece alone."""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library gives back by its own rules"
)
def test_what_was_freed_between_what_is_in_use_is_given_back() -> None:
    kept = [bytearray(PIECE) for _ in range(PIECES)]
    del kept[::2]
    before = memory.own_bytes()
    memory.give_back()
    assert before - memory.own_bytes() > PIECE * PIECES // 4
    assert len(kept) == PIECES // 2


class Idle:
    """A reference without a child."""

    uses = 0
    host_bytes = device_bytes = 0

    def __init__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    retire = close


@pytest.mark.parametrize(("room", "kept"), [(100.0, 4), (20.0, 2), (1.0, 1)])
def test_references_on_a_gpu_leave_room_for_others(monkeypatch: pytest.MonkeyPatch, room: float, kept: int) -> None:
    class OnDevice(Idle):
        device_bytes = 10

    monkeypatch.setattr(cpu_device, "Reference", OnDevice)
    monkeypatch.setattr(cpu_device.CpuDevice, "room", lambda self, options: options.memory_share * room)
    references = References(cast(Any, None), bench_options(TimingBench()), random.Random(0))
    for name in "abcd":
        references.get(Problem(name, 1, name, name))
    assert len(references) == kept


@pytest.mark.parametrize(("asked", "kept"), [({}, 8), ({"references": 3}, 3)])
def test_a_device_keeps_as_many_references_as_asked_or_its_own_number(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, int], kept: int
) -> None:
    monkeypatch.setattr(cpu_device, "Reference", Idle)
    references = References(cast(Any, None), bench_options(TimingBench(), **asked), random.Random(0))
    for name in "abcdefghij":
        references.get(Problem(name, 1, name, name))
    assert len(references) == kept
    assert device_of("cuda:0").references == KEPT, "what the broker remembers of it"


def test_each_reference_that_goes_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(cpu_device, "Reference", Idle)
    references = References(cast(Any, None), bench_options(TimingBench(), references=2), random.Random(0))
    monkeypatch.setattr(kept, "give_back", lambda: given.append(len(references)))
    for name in "abca":
        references.get(Problem(name, 1, name, name))
    assert given == [2, 2]


@pytest.mark.parametrize("takes", ["all", "what it needs"])
def test_a_reference_whose_memory_others_want_leaves_its_process(monkeypatch: pytest.MonkeyPatch, takes: str) -> None:
    """Which serves the next one: a new process takes most of a second."""
    ended: list[str] = []

    class Wanted(Idle):
        needed = 1

        def close(self) -> None:
            ended.append("closed")

        def retire(self) -> None:
            ended.append("retired")

    monkeypatch.setattr(cpu_device, "Reference", Wanted)
    references = References(cast(Any, None), bench_options(TimingBench()), random.Random(0))
    references.get(Problem("a", 1, "a", "a"))
    if takes == "all":
        monkeypatch.setattr(cpu_device.CpuDevice, "rest", lambda *_: False)
        references.rest()
        assert len(references) == 0
    else:
        monkeypatch.setattr(cpu_device.CpuDevice, "may_use", lambda *_: False)
        references.get(Problem("a", 1, "a", "a"))
    assert ended == ["retired"]


def test_memory_is_given_back_when_there_is_much_more_of_it_than_is_needed() -> None:
    held, given = [100], list[int]()

    def give() -> None:
        given.append(held[0])
        held[0] = 130

    surplus = memory.Surplus(50, lambda: held[0], give)
    for now in (150, 120, 151, 180, 181, 90, 140, 141):
        held[0] = now
        surplus.check()
    assert given == [151, 181, 141]


class Gone:
    """A zygote that does not start."""

    generation = 0

    def start(self) -> None:
        raise InfraError("no zygote")


def test_a_bench_checks_it_before_each_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(memory.Surplus, "check", lambda self: checked.append(1))
    with pytest.raises(InfraError):
        Bench(cast(Any, Gone()), bench_options(TimingBench())).evaluate(
            Problem("p", 1, "p", "p"), Candidate("", "c"), {}
        )
    assert checked == [1]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("return x * 2 + self.shift", Fault.OK),
        ("return x * 3", Fault.INCORRECT),
        ("return x / (1 // 0)", Fault.RUNTIME_ERROR),
        ("x.mul_(2); return x", Fault.CHEATING),
    ],
)
def test_nothing_of_a_reference_waits_for_the_collector(zygote: Zygote, body: str, fault: Fault) -> None:
    source = SCALE_AND_SHIFT.replace("class Model(", "class ModelNew(").replace("return x * 2 + self.shift", body)
    gc.collect()
    gc.disable()
    try:
        with contextlib.closing(Bench(zygote, patient())) as bench:
            report = bench.evaluate(Problem("L1/1", 1, "x", SCALE_AND_SHIFT), Candidate(source, "torch"), {})
            (kept,) = map(weakref.ref, bench.references.kept.values())
        assert report.verdict.fault is fault
        assert kept() is None
    finally:
        gc.enable()


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


class Refusing:
    """A zygote whose host can't start a child."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def spawn(self, *_: object) -> None:
        raise self.error


@pytest.mark.parametrize("error", [InfraError("no zygote"), OSError("its channel is closed"), KeyboardInterrupt()])
def test_a_reference_that_can_not_begin_leaves_no_file_open(error: BaseException) -> None:
    memory.may_read_children()
    before = open_files()
    with pytest.raises(type(error)):
        module.Reference(
            cast(Any, Refusing(error)), Problem("p", 1, "p", "p"), bench_options(TimingBench()), random.Random(0)
        )
    assert open_files() == before


@pytest.mark.parametrize("broken", ["memory_file", "seal"])
def test_nor_does_one_whose_files_can_not_be_made(zygote: Zygote, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    calls = [getattr(module, broken)] if broken == "memory_file" else []  # the second file can't be made

    def fails(*args: Any) -> Any:
        if calls:
            return calls.pop()(*args)
        raise OSError("too many open files")

    memory.may_read_children()
    zygote.start()
    monkeypatch.setattr(module, broken, fails)
    before = open_files()
    with pytest.raises(OSError, match="too many"):
        module.Reference(zygote, Problem("p", 1, "p", SCALE_AND_SHIFT), patient(), random.Random(0))
    assert open_files() == before


@pytest.mark.parametrize("size", [3, 1 << 16, 1 << 20])
def test_a_message_of_any_length_arrives(size: int) -> None:
    """A candidate with the files beside it may be longer than a socket takes at once."""
    data = bytes(range(256)) * (size // 256) + b"end"
    with contextlib.ExitStack() as stack:
        here, there = (stack.enter_context(one) for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        with open(os.devnull, "rb") as other:
            message, more = as_message(data)
            socket.send_fds(here, [message], [*more, other.fileno()])
            for fd in more:
                os.close(fd)
        got, fds, _, _ = socket.recv_fds(there, 1 << 20, 4)
        found, left = whole(got, fds)
        assert found == data
        assert len(left) == 1
        os.close(left[0])


def test_more_than_one_call_can_move_is_moved_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux moves less than 2 GiB at once: inputs of 3 GiB were an input outside of its file, outputs a forgery."""
    data, most, real = bytes(range(256)) * 64, 5_000, os.preadv
    fd = memory.memory_file("test")
    os.write(fd, data)
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: real(file, [buffers[0][:most]], at))
    assert bytes(memory.content_of(fd)) == data
    os.close(fd)

    calls: list[int] = []

    def moves(pid: int, local: Any, _: int, remote: Any, *__: int) -> int:
        mine, theirs = (ctypes.cast(one, ctypes.POINTER(memory._IoVec)).contents for one in (local, remote))
        size = min(most, theirs.length)
        ctypes.memmove(mine.base, theirs.base, size)
        calls.append(size)
        return size

    monkeypatch.setattr(memory, "_libc", SimpleNamespace(process_vm_readv=moves))
    source, target = ctypes.create_string_buffer(data, len(data)), ctypes.create_string_buffer(len(data))
    assert memory.read_memory(0, ctypes.addressof(source), ctypes.addressof(target), len(data))
    assert target.raw == data
    assert calls == [5_000, 5_000, 5_000, 1_384]


def test_a_file_that_became_shorter_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = memory.memory_file("test")
    os.write(fd, b"content")
    monkeypatch.setattr(os, "preadv", lambda *given: 0)
    with pytest.raises(ValueError, match="shorter"):
        memory.content_of(fd)
    os.close(fd)
