"""A GPU's reference and its child over shared arenas, on pretended device memory: what is mapped, and is it right."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch

from kbrl_async.errors import ProblemError
from kbrl_async.kernels import settings as sections
from kbrl_async.kernels.verify import bench_options, values, wire
from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.cuda import reference, runner, session
from kbrl_async.kernels.verify.cuda.record import child
from kbrl_async.kernels.verify.cuda.reference import CudaReference
from kbrl_async.kernels.verify.cuda.replay.candidates import Replays
from kbrl_async.kernels.verify.cuda.replay.host import Unreplayable
from kbrl_async.kernels.verify.cuda.session import CudaSession, TimedCall
from kbrl_async.kernels.verify.cuda.sides import Sides
from kbrl_async.kernels.verify.cuda.stopwatch import CudaStopwatch
from kbrl_async.kernels.verify.hoarding import Crowded
from kbrl_async.kernels.verify.input_set import place
from kbrl_async.kernels.verify.known import Offloaded, Sizes
from kbrl_async.kernels.verify.session import CandidateFault, Submission
from protocols.records import Fault, Problem

SOURCE = """
import torch
class Model(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
    def forward(self, x, y):
        return torch.relu(self.linear(x)) + y
def get_inputs():
    return [torch.randn(16, 8), torch.randn(16, 8)]
def get_init_inputs():
    return [8]
"""


libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_size_t]
FIXED, SHARED, PRIVATE, ANONYMOUS = 16, 1, 2, 32


def mapped(address: int | None, size: int, flags: int, fd: int) -> int:
    found = libc.mmap(address, size, 3, flags, fd, 0)
    assert found not in (None, ctypes.c_void_p(-1).value)
    return int(found)


class Arena:
    """A file in memory that two threads map, each at addresses of its own, which stay mapped."""

    made = 0

    def __init__(self, fd: int, size: int, is_on_host: bool = False) -> None:
        self.is_on_host, self.size, self._fd = is_on_host, size, fd
        self._address = mapped(None, size, SHARED, fd)
        self.raw: Any = torch.frombuffer((ctypes.c_uint8 * size).from_address(self._address), dtype=torch.uint8)

    @classmethod
    def new(cls, size: int, where: torch.device, is_on_host: bool = False) -> Arena:
        cls.made += 1
        size = -(-max(1, size) // 4096) * 4096
        return cls(cls.memory(size), size, is_on_host)

    @staticmethod
    def memory(size: int) -> int:
        fd = os.memfd_create("arena")
        os.ftruncate(fd, size)
        return fd

    @classmethod
    def received(cls, fd: int, size: int, where: torch.device, *_: Any) -> Arena:
        return cls(fd, size)

    def export(self) -> int:
        return os.dup(self._fd)

    @property
    def device_bytes(self) -> int:
        return 0 if self.is_on_host else self.size

    @property
    def host_bytes(self) -> int:
        return self.size - self.device_bytes

    def move(self, to_host: bool, hand_over: Callable[[int], None] | None = None) -> None:
        if self.is_on_host is to_host:
            return
        fd = self.memory(self.size)
        if hand_over is not None:
            hand_over(fd)
        os.pwrite(fd, self.raw.numpy().tobytes(), 0)
        mapped(self._address, self.size, SHARED | FIXED, fd)
        os.close(self._fd)
        self._fd, self.is_on_host = fd, to_host

    def replace(self, fd: int | None) -> None:
        if fd is None:
            mapped(self._address, self.size, PRIVATE | ANONYMOUS | FIXED, -1)
            return
        mapped(self._address, self.size, SHARED | FIXED, fd)
        os.close(fd)

    def view(self, meta: wire.TensorMeta) -> torch.Tensor:
        return values.view(self.raw, meta)

    def close(self) -> None:
        if self.raw is not None:
            self.raw = None
            os.close(self._fd)


class Child:
    """A reference's process that is a thread."""

    host_pid = os.getpid()

    def __init__(self) -> None:
        self.channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._theirs:
            self._theirs.send(wire.encode(wire.Confined("full", ())))
            setup, fds = runner.await_orders(self._theirs)
            runner.CudaRunner(self._theirs, setup, fds, torch.device("cpu")).serve()

    def freeze(self) -> bool:
        return False

    def has_ended(self, within_s: float = 0.0) -> bool:
        return False


class Homes:
    dying = SimpleNamespace(add=lambda child: child.channel.close())

    def __init__(self) -> None:
        self.given = 0

    def give(self, child: Child) -> None:
        """Nobody takes it again."""
        self.given += 1
        child.channel.close()

    def take(self) -> Child:
        return Child()


class Driver:
    """Nothing is timed."""

    def event(self) -> int:
        return 1

    def call(self, *_: Any) -> None:
        """It is done already."""

    def record_everywhere(self, *_: Any) -> None:
        """There is no stream."""

    def elapsed_ns(self, *_: Any) -> float:
        return 1e5


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 0))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (reference, runner, session):
        monkeypatch.setattr(module, "DeviceArena", Arena)
    monkeypatch.setattr(runner, "driver", Driver)
    monkeypatch.setattr(runner, "Flush", lambda *_: SimpleNamespace(now=lambda stream: None))
    monkeypatch.setattr(reference, "memory_of", lambda options: 8 << 30)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(reference, "driver", lambda: SimpleNamespace(has_host_memory=lambda index: True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(os, "_exit", lambda code: None)
    Arena.made = 0
    with torch.no_grad():
        yield


def made(
    source: str = SOURCE, claim: Callable[[int], None] = lambda size: None, homes: Homes | None = None
) -> CudaReference:
    options = bench_options(sections.TimingBench(), "cpu")
    problem = Problem("one", 1, "one", source)
    known = cast(Any, homes or Homes())
    return CudaReference(cast(Any, None), problem, options, random.Random(1), known, known, claim=claim)


@pytest.mark.usefixtures("pretended")
def test_a_library_that_was_refused_memory_may_fail_in_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN said CUDNN_STATUS_BAD_PARAM, and torch spoke of data that is not allocated yet."""
    fails = "        if x[0, 0] == 7:\n            raise RuntimeError('cuDNN error: CUDNN_STATUS_BAD_PARAM')\n"
    found = made(SOURCE.replace("        return torch.relu", f"{fails}        return torch.relu"))
    refusals = iter((3, 3, 3, 4, 4, 5, 5, 5))  # before and after each call
    used = {"allocated_bytes": {"all": {"current": 1 << 20, "peak": 5 << 20}}}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: used | {"num_ooms": next(refusals)})

    def told() -> tuple[int, bool]:
        outcome = found.session.call(wire.OP_RUN, 0, 5.0)
        return outcome.inside, outcome.is_short

    assert (told(), found.session.is_short) == ((4 << 20, False), False)
    assert (told(), found.session.is_short) == ((4 << 20, True), True)
    found.session.slots[0][0].fill_(7.0)
    for kind in (Fault.OUT_OF_MEMORY, Fault.RUNTIME_ERROR):
        with pytest.raises(CandidateFault, match="BAD_PARAM") as fault:
            told()
        assert fault.value.kind is kind
    found.close()


@pytest.mark.usefixtures("pretended")
def test_where_memory_is_scarce_no_more_is_poisoned_than_the_next_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    found, filled = made(), list[tuple[int, ...]]()
    monkeypatch.setattr(runner.values, "fill_bytes", lambda tensor, byte: filled.append(tuple(tensor.shape)))
    for is_lean, expected in ((1, [(16, 8)]), (0, [])):  # what is left after a call is poisoned on a GPU only
        filled.clear()
        found.session.call(wire.OP_POISON_ON, is_lean, 5.0)
        assert filled == []
        found.session.call(wire.OP_RUN, 0, 5.0)
        assert filled == expected
    found.session.call(wire.OP_POISON_OFF, 0, 5.0)
    found.close()


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(("is_short", "given"), [(False, 1), (True, 0)])
def test_a_process_whose_library_found_too_little_memory_serves_nobody_else(is_short: bool, given: int) -> None:
    """It keeps the way that it took, and is refused nothing any more."""
    homes = Homes()
    found = made(homes=homes)
    found.session.is_short = is_short
    found.retire()
    assert homes.given == given


LARGE = """
import functools
import torch
KEPT = {}
@functools.lru_cache
def frequencies():
    return torch.arange(4.0)
class Model(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear, self.hidden = torch.nn.Linear(4, size), torch.zeros(1)
    def forward(self, x, y):
        self.hidden = x.sum()
        KEPT.setdefault("mask", torch.ones(1))
        return self.linear(x + y)
def get_inputs():
    return [torch.rand(ROWS, 4) * frequencies(), torch.rand(ROWS, 4)]
def get_init_inputs():
    return [2]
"""


ROWS, VALUES = "ROWS", "torch.rand(ROWS, 4)]"


@pytest.mark.parametrize(
    ("change", "rows", "found"),
    [
        (("", ""), "1 << 28", (2 << 32, 1 << 31)),
        (("", ""), "16", (512, 0)),  # nobody waits for so little
        ((VALUES, "torch.rand(ROWS, 4)[: int(torch.rand(1))]]"), "1 << 28", (0, 0)),
        (("return [2]", "return [int(torch.rand(1))]"), "1 << 28", (2 << 32, 0)),
        (("KEPT = {}", "KEPT = {}\ntorch.set_default_dtype(torch.float32)"), "1 << 28", (0, 0)),
    ],
)
def test_sizes_are_told_without_memory(change: tuple[str, str], rows: str, found: tuple[int, int]) -> None:
    """As far as no value is needed for them."""
    assert runner.outlined(LARGE.replace(*change).replace(ROWS, rows)) == found


@pytest.mark.usefixtures("pretended")
def test_what_a_problem_keeps_is_nothing_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequencies that its inputs share, a mask of its forward: drawn so, they failed in every call that followed."""
    monkeypatch.setattr(runner, "LARGE_BYTES", 1)
    found = made(LARGE.replace(ROWS, "64"))
    assert len(found.sets) == 10
    found.close()


@pytest.mark.usefixtures("pretended")
def test_what_is_drawn_first_has_its_place_among_plans_already() -> None:
    """Beside a verifier that planned with most of a GPU others drew inputs of 6 GiB, of which nobody knew."""
    asked: list[int] = []

    def refuse(size: int) -> None:
        asked.append(size)
        raise Crowded(size)

    large = SOURCE.replace("randn(16, 8)", "randn(1 << 23, 8)")
    nothing = patch.object(CudaSession, "drawn", Mock(side_effect=AssertionError("nothing is drawn")))
    with nothing, pytest.raises(Crowded):
        made(large, refuse)
    inputs, outputs = 2 << 28, 1 << 28
    assert 2 * inputs + 6 * outputs <= asked[0] <= 4 * inputs + 7 * outputs + (1 << 12)


@pytest.mark.usefixtures("pretended")
def test_a_reference_is_made_over_few_arenas() -> None:
    found = made()
    assert Arena.made == 4, "weights, the first draw, the others, inputs and outputs of all calls"
    assert len(found.sets) == 10
    draws = cast(Any, found.pool).draws
    assert len(draws) == 4
    assert all(len(draw) == 2 for draw in draws)
    assert len({float(draw[number][0]) for draw in draws for number in (0, 1)}) == 8
    module: dict[str, Any] = {}
    exec(SOURCE, module)
    model = module["Model"](8)
    assert found._weights is not None
    own = [found._weights.view(meta) for _, meta in found.ready.weights]
    model.load_state_dict(dict(zip(model.state_dict(), own, strict=True)))
    for one in found.sets:
        x, y = (block.view(16, 8) for block in one.blocks)
        assert torch.allclose(model(x, y), one.expected[0], atol=1e-5)
    found.close()


class Recorders:
    """A recorder that builds its candidate on what lies in its arena."""

    def __init__(self, size: int) -> None:
        self.arena, self.weights = Arena.new(size, torch.device("cpu")), list[torch.Tensor]()
        self.descriptors: list[int] = []

    def record(self, order: wire.RecordForward, fds: tuple[int, ...], deadline_s: float, fill: Any) -> bytes:
        fill(self.arena)
        given = self.arena.raw[order.weights :] if order.weights else None
        candidate = child._Candidate(cast(Any, None), order.setup, list(map(os.dup, fds)), torch.device("cpu"), given)
        self.weights, self.descriptors = [tensor.clone() for tensor in candidate.model.parameters()], list(fds)
        self.arena.raw[order.weights :].fill_(0)
        assert all(map(torch.equal, self.weights, candidate.model.parameters())), "they are copies"
        return b""


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("most", [256 << 20, 0])
def test_a_recorder_finds_the_weights_in_its_arena_or_beside_it(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(reference, "MOST_INSIDE", most)
    found, recorders = made(), Recorders(8 << 20)
    assert found._weights is not None
    code = Submission(SOURCE.replace("class Model", "class ModelNew"), "cuda-nvrtc")
    no_statistics = Mock(side_effect=RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats"))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "memory_stats_as_nested_dict", no_statistics)  # of a recorder's allocator
        found.record(cast(Any, recorders), code, [], 0, 1.0)
    wanted = [found._weights.view(meta) for _, meta in found.ready.weights]
    assert all(map(torch.equal, recorders.weights, wanted))
    assert len(wanted) == 2
    assert len(recorders.descriptors) == (not most)
    assert found.inside_bytes == (found.weights_bytes if most else 0)
    found.close()


@pytest.mark.usefixtures("pretended")
def test_an_arena_that_is_too_small_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "ARENA_BYTES", 4096)
    found = made()
    assert Arena.made > 4
    assert len(found.sets) == 10
    found.close()


# ── what lies on the host ───────────────────────────────────────────────────────────────────────────────────────────


def idle() -> Any:
    spares: Any = Homes()
    spares.refill = lambda: None
    return spares


def far(monkeypatch: pytest.MonkeyPatch, at: Offloaded) -> CudaReference:
    """With memory for just this, by its own prediction."""
    sizes = Sizes(2 * 512, 512, 288, frees=True, offloaded=at)
    monkeypatch.setattr(reference, "memory_of", lambda options: sizes.asked + 100)
    return made()


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    "at", [Offloaded(), Offloaded(weights=True), Offloaded(inputs=True), Offloaded(inputs=True, weights=True)]
)
def test_what_does_not_fit_beside_the_rest_lies_on_the_host(monkeypatch: pytest.MonkeyPatch, at: Offloaded) -> None:
    found = far(monkeypatch, at)
    session = cast(Any, found.session)
    assert found.offloaded == at
    assert found._weights is not None
    assert (session.shared.is_on_host, found._weights.is_on_host) == at
    assert not found.keeps_sets
    assert len(found.sets) == 10
    assert found.needed <= reference.memory_of(cast(Any, None))
    on_host = session.shared.size * at[0] + found._weights.size * at[1]
    assert found.host_bytes >= on_host
    assert found.device_bytes == session.shared.size + found._weights.size - on_host
    found.close()


@pytest.mark.usefixtures("pretended")
def test_a_candidate_has_its_arena_on_the_gpu_and_weights_that_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    found = far(monkeypatch, Offloaded(inputs=True, weights=True))
    found.spares = idle()
    ours = cast(Any, found.session)
    ours.move(to_host=False)  # as a timed call of the candidate before left it
    session = cast(Any, found.open(cast(Any, None), Submission(SOURCE.replace("Model", "ModelNew"), "torch"), 5.0))
    found.attach(session)
    assert (ours.shared.is_on_host, session.shared.is_on_host) == (True, False)
    for one in found.sets:
        place(session, 0, one)
        outcome = session.call(wire.OP_RUN, 0, 5.0)
        assert torch.allclose(session.read(outcome.tensors[0]), one.expected[0], atol=1e-5), one.name
        session.move(to_host=True)
        session.move(to_host=False)
    session.close()
    found.close()


@pytest.mark.usefixtures("pretended")
def test_with_more_memory_new_secrets_lie_on_the_gpu_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = far(monkeypatch, Offloaded(inputs=True, weights=True))
    monkeypatch.setattr(reference, "memory_of", lambda options: 8 << 30)
    found.refresh()
    assert found._weights is not None
    assert found.offloaded == Offloaded()
    assert not cast(Any, found.session).shared.is_on_host
    assert not found._weights.is_on_host
    found.close()


@pytest.mark.usefixtures("pretended")
def test_a_host_without_memory_holds_nothing_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "psutil", Mock(virtual_memory=lambda: Mock(available=1000)))
    with pytest.raises(ProblemError, match="does not fit"):
        far(monkeypatch, Offloaded(inputs=True))


@pytest.mark.usefixtures("pretended")
def test_who_lies_on_the_host_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A player can't move, and a reference that is timed from the host seems slow."""
    found = far(monkeypatch, Offloaded(inputs=True))
    replays = Replays(cast(Any, None), bench_options(sections.TimingBench(), "cpu").limits, "cpu", 1.0)
    with pytest.raises(Unreplayable, match="too much memory"):
        replays.open(found, Submission(SOURCE, "torch"), 1.0, random.Random(1), False)
    found.close()


class Moving(CudaSession):
    """One that stands still, and no process."""

    def __init__(self, is_far: bool = False) -> None:
        self.shared: Any = Arena.new(4096, torch.device("cpu"))
        self.process, self.given, self.orders = Mock(**{"freeze.return_value": True}), list[bytes](), list[wire.Order]()
        self._where, self._child, self._frozen, self.is_far = torch.device("cpu"), self.process, True, is_far
        self.shared.is_on_host = is_far

    @property
    def stands_still(self) -> bool:
        return self._frozen

    def _send(self, order: bytes, *fds: int) -> None:
        self.orders.append(wire.decode_order(order))
        self.given += [os.pread(fd, 4096, 0) for fd in fds]

    def _expect(self, kind: Any, deadline_s: float) -> Any:
        return wire.Ready()


def test_who_stood_still_does_so_after_a_move() -> None:
    """Else a candidate's process would run beside a timed call of its reference."""
    session = Moving()
    session.move(to_host=False)
    assert session.process.mock_calls == [], "it lies there"
    session.move(to_host=True)
    assert [call[0] for call in session.process.mock_calls] == ["thaw", "freeze"]
    assert session.stands_still
    assert session.orders == [wire.Move()]
    assert not session.given, "no memory of the host's"


def test_what_a_candidate_gets_of_the_gpu_holds_nothing_while_it_is_awake() -> None:
    session = Moving()
    session.shared.raw.fill_(7)
    session.move(to_host=True)
    session.move(to_host=False)
    assert not any(session.given[0])
    assert os.pread(session.shared.export(), 4096, 0) == bytes([7]) * 4096
    assert bool((session.shared.raw == 7).all())


@pytest.mark.parametrize(("gives_back", "others", "is_fault"), [(0, 0, True), (0, 1, False), (4096, 0, False)])
def test_who_gives_no_memory_back_is_at_fault_where_nobody_else_takes_any(
    monkeypatch: pytest.MonkeyPatch, gives_back: int, others: int, is_fault: bool
) -> None:
    free = iter(range(0, 1000 * max(1, gives_back), max(1, gives_back)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (next(free), 0))
    sides = cast(Any, Sides.__new__(Sides))
    sides.reference, sides.candidate, sides.takes_turns = Moving(is_far=True), Moving(), True
    sides.has_neighbours = lambda: bool(others)
    sides.bring(sides.reference)
    sides.bring(sides.candidate)
    with pytest.raises(CandidateFault, match="told to give back") if is_fault else contextlib.nullcontext():
        sides.bring(sides.reference)


def test_one_of_both_is_on_the_gpu() -> None:
    sides, moves = cast(Any, Sides.__new__(Sides)), list[tuple[str, bool]]()

    def side(name: str) -> Any:
        made = cast(Any, CudaSession.__new__(CudaSession))
        made.move = lambda to_host: moves.append((name, to_host))
        return made

    sides.reference, sides.candidate = side("reference"), side("candidate")
    sides.bring(sides.reference)
    assert moves == [], "there is room for both"
    sides.takes_turns = True
    sides.bring(sides.reference)
    sides.bring(sides.candidate)
    assert moves == [("candidate", True), ("reference", False), ("reference", True), ("candidate", False)]


runners: list[Ahead] = []


class Ahead(runner.CudaRunner):
    """A candidate that works when it is moved, and never when it is timed."""

    is_hostile = False
    made: torch.Tensor | None = None

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        runners.append(self)

    def _order(self, order: wire.Order, fds: list[int]) -> None:
        super()._order(order, fds)
        if self.is_hostile and isinstance(order, wire.Move):
            self._compute()

    def _compute(self) -> None:
        self.made = self.model(*self.slots[0]).clone()
        self._answer()

    def _answer(self) -> None:
        assert self._shared is not None
        assert self.made is not None
        self._shared.view(self._outs[0][0]).copy_(self.made)

    def _event(self, slot: int, nonce: int) -> wire.Timed:
        if not self.is_hostile:
            return super()._event(slot, nonce)
        if self.made is None:
            self._compute()
        self._answer()
        return wire.Timed(nonce, 2000.0, 1000.0, 2000.0)


class Pairs(CudaStopwatch):
    """Of ordinary forwards of two that take turns, and where both lay after each call: who was called comes first."""

    def take(self, count: int) -> None:
        assert self._sides.takes_turns
        self._sides.refused, self._empty, self.seen = "events", 0.0, set[tuple[bool, bool]]()
        self._sides.has_neighbours = lambda: True
        for _ in range(count):
            self._pair()

    def _sample(self, session: Any) -> TimedCall:
        told, both = super()._sample(session), [self._sides.reference, self._sides.candidate]
        other: Any = both[session is both[0]]
        self.seen.add((session.shared.is_on_host, other.shared.is_on_host))
        return told


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("is_hostile", [True, False])
def test_who_works_when_it_is_moved_has_no_inputs_to_work_on(monkeypatch: pytest.MonkeyPatch, is_hostile: bool) -> None:
    """20 pairs of 20 passed, at fifty times its reference's speed, while it was awake with the inputs."""
    monkeypatch.setattr(runner, "CudaRunner", Ahead)
    found = far(monkeypatch, Offloaded(inputs=True))
    found.spares = idle()
    session = cast(Any, found.open(cast(Any, None), Submission(SOURCE.replace("Model", "ModelNew"), "torch"), 5.0))
    found.attach(session)
    options = bench_options(sections.TimingBench(), "cpu")
    checker = Checker(cast(Any, None), found, options, random.Random(3), cast(Any, None))
    checker.session = session
    watch = Pairs(checker, found.session, options, random.Random(5), lambda: None)
    runners[-1].is_hostile = is_hostile
    with pytest.raises(CandidateFault, match="of a timed call are wrong") if is_hostile else contextlib.nullcontext():
        watch.take(20)
    ours, seen = cast(Any, found.session), watch.seen
    assert seen == {(False, True)}, "whose call is timed lies on the GPU, the other does not"
    watch.close()
    assert ours.shared.is_on_host
    session.close()
    found.close()
