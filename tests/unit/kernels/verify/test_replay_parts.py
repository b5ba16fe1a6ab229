"""What of replays on a GPU needs no GPU: where things lie, whose memory an operator gets, what is loaded."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from kbrl_async.kernels.backends.launch import bundle
from kbrl_async.kernels.verify import compare, values, wire
from kbrl_async.kernels.verify.cuda.arena import BASE
from kbrl_async.kernels.verify.cuda.proof import of_other_slots
from kbrl_async.kernels.verify.cuda.replay.host import Unreplayable
from kbrl_async.kernels.verify.cuda.replay.images import Unloadable, images
from kbrl_async.kernels.verify.cuda.replay.places import Places
from kbrl_async.kernels.verify.cuda.replay.program import Program
from kbrl_async.kernels.verify.cuda.replay.session import ReplaySession
from kbrl_async.kernels.verify.cuda.replay.steps import KernelStep, OperatorStep, Refused
from kbrl_async.kernels.verify.cuda.replay.stretches import place_inputs
from kbrl_async.kernels.verify.hoarding import NoMemory
from kbrl_async.kernels.verify.layouts import is_moved
from kbrl_async.kernels.verify.proof import of_recorded
from kbrl_async.kernels.verify.recording import Forward, Kernel, Memcpy, Memset, Operator, Recording, ways
from kbrl_async.kernels.verify.session import CandidateFault
from kbrl_async.kernels.verify.tolerance import Tolerance
from kbrl_async.kernels.verify.validation import overlap, span
from protocols.records import Fault

# ── places ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_inputs_of_slots_lie_apart_at_distances_that_differ() -> None:
    tensors = [torch.empty(3, 5), torch.empty(7, dtype=torch.float16)]
    placed, end = place_inputs(tensors, 8, random.Random(1))
    spans = [span(meta) for slot in placed for meta in slot]
    assert not overlap(spans)
    assert end >= max(stop for _, stop in spans)
    steps = {later[0].place - earlier[0].place for earlier, later in itertools.pairwise(placed)}
    assert len(steps) > 1, "who knows one distance must not know the next"


def test_an_operator_gets_the_memory_that_it_got_and_other_memory_for_what_was_not_foreseen() -> None:
    fresh = iter(range(1 << 20, 1 << 30, 1 << 20))
    places = Places(lambda size: next(fresh))
    places.follow([(0, 64), (512, 100)])
    assert (places.take(64), places.take(100)) == (BASE, BASE + 512)
    places.follow([(0, 64)])
    other = places.take(65)
    assert other == 1 << 20
    places.give(other)
    assert places.take(65) == other, "a graph holds its address: it is used again, never given back"
    places.give(BASE)
    assert places.held == 512


def test_memory_that_is_not_there_is_noticed() -> None:
    places = Places(lambda size: 0)
    assert places.take(8) == 0
    assert places.has_failed


# ── what is loaded ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_cubin_of_a_bundle_is_named_by_its_content(tmp_path: Path) -> None:
    codes = [b"\x7fELF one", b"\x7fELF two"]
    (tmp_path / "a").write_bytes(bundle.pack({"a.cubin": codes[0], "b.cubin": codes[1], "c.json": b"{}"}))
    found = images([tmp_path / "a"])
    assert {image.digest: image.parts for image in found} == {hashlib.sha256(c).hexdigest(): [c] for c in codes}


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x7fELF\x02\x01 but no more"])
def test_an_artifact_that_is_none_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(Unloadable):
        images([tmp_path / "a"])


def test_a_kernel_gets_as_many_bytes_as_its_code_reads_or_nothing_runs() -> None:
    node = Kernel("a" * 64, "run", (1, 1, 1), (1, 1, 1), 0, [b"12345678", b"1234"])
    driver: Any = SimpleNamespace(parameter_sizes=lambda function: [8, 4])
    KernelStep(driver, node, 7, False)
    for sizes in ([8], [8, 8], [8, 4, 4]):
        with pytest.raises(Refused):
            KernelStep(SimpleNamespace(parameter_sizes=lambda function, sizes=sizes: sizes), node, 7, False)  # type: ignore[arg-type]


def test_an_operator_is_done_again_and_its_result_lies_where_it_lay() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    meta = [wire.TensorMeta("float32", (2, 2), (2, 1), place) for place in (0, 16, 32)]

    def view(one: wire.TensorMeta) -> torch.Tensor:
        return memory[one.place : one.place + 16].view(torch.float32).view(2, 2)

    view(meta[0]).copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    view(meta[1]).copy_(torch.eye(2))
    arguments = ["L", [["L", [["T", 0], ["T", 1]]], ["D", {"alpha": ["V", 2]}]]]
    node = Operator("aten::add.Tensor", arguments, meta[:2], [meta[2]])
    OperatorStep(node, view, Places(lambda size: 0), torch.device("cpu")).launch(0, False)
    assert view(meta[2]).tolist() == [[3.0, 2.0], [3.0, 6.0]]


@pytest.mark.parametrize(("name", "made"), [("aten::minimum", 0.5), ("aten::add.Tensor", 1.5)])
def test_an_operator_gets_a_number_of_the_hosts_as_it_takes_it(name: str, made: float) -> None:
    """`torch.min(x, torch.tensor(0.5))` was recorded with the number, and no replay of it could be done."""
    memory = torch.ones(4)
    meta = wire.TensorMeta("float32", (4,), (1,), 0)
    node = Operator(name, ["L", [["L", [["T", 0], ["V", 0.5]]], ["D", {}]]], [meta], [meta])
    OperatorStep(node, lambda one: memory, Places(lambda size: 0), torch.device("cpu")).launch(0, False)
    assert memory.tolist() == [made] * 4


# ── a session over a host that only pretends ──────────────────────────────────────────────────────────────────────────


class Host:
    """Its memory is the CPU's; what it runs is told by `work`."""

    isolation, is_short = None, False

    def __init__(self, size: int) -> None:
        raw = torch.zeros(size, dtype=torch.uint8)
        self.arena = SimpleNamespace(raw=raw, size=size, view=self._view)
        self.work: Callable[[torch.Tensor, int], object] = lambda raw, slot: None
        self.orders: list[Any] = []

    def _view(self, meta: wire.TensorMeta) -> torch.Tensor:
        return values.view(self.arena.raw, meta)

    def reserve(self, size: int, is_new: bool = False) -> Any:
        return self.arena

    def load(self, images: Any, plan: Any) -> bool:
        return False

    def done(self, order: Any, deadline_s: float) -> None:
        self.work(self.arena.raw, order.slot)

    def timed(self, order: Any, deadline_s: float) -> float:
        self.orders.append(order)
        for slot in order.slots:
            self.work(self.arena.raw, slot)
        return 1000.0

    def unload(self) -> None:
        pass


def session(
    outputs: list[int],
    image: Sequence[tuple[int, int]] = (),
    slots: int = 3,
    size: int = 4096,
    nodes: Sequence[list[Any]] = (),
    **more: bool,
) -> tuple[ReplaySession, Host]:
    host = Host(size)
    inputs = [[wire.TensorMeta("float32", (4,), (1,), 64 * slot)] for slot in range(slots)]
    metas = [wire.TensorMeta("float32", (4,), (1,), place) for place in outputs]
    steps = itertools.chain(nodes, itertools.repeat([]))
    forwards = [Forward(each, ["T", 0], [meta]) for each, meta in zip(steps, metas, strict=False)]
    plan = Recording(forwards, list(image), size)
    made = ReplaySession(host, plan, [], inputs, host.reserve(0), random.Random(3), **more)  # type: ignore[arg-type]
    return made, host


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_before_each_call_all_is_poison_but_inputs_and_what_lasts() -> None:
    made, host = session([1024, 1088, 1152], ((512, 528),))
    seen: list[torch.Tensor] = []
    made.slots[0][0].fill_(2.0)
    host.work = lambda raw, slot: seen.append(raw.clone())
    made.call(wire.OP_RUN, 0, 1.0)
    host.arena.raw[512:4096] = 9
    made.call(wire.OP_RUN, 0, 1.0)
    for raw in seen:
        assert raw[:16].view(torch.float32).tolist() == [2.0] * 4
        assert raw[512:528].eq(0).all()
        assert raw[16:64].eq(0x7F).all()
        assert raw[528:].eq(0x7F).all()


def test_large_stretches_are_poisoned_too() -> None:
    made, host = session([1024, 1088, 1152], size=1 << 16)
    made.call(wire.OP_RUN, 0, 1.0)
    assert host.arena.raw[2048:].eq(0x7F).all()


def test_only_operators_are_tried_before_they_count() -> None:
    """A kernel has its graph made, which shows what can't be; it may take a second."""
    made, host = session([1024, 1088, 1152])
    ran: list[int] = []
    host.work = lambda raw, slot: ran.append(slot)
    host.done = lambda order, deadline_s: host.work(host.arena.raw, order.slot)  # type: ignore[method-assign]
    made.try_once(1.0)
    assert [(order.slots, order.times) for order in host.orders] == [((0,), 0)]
    ran.clear()
    made.has_operators = True
    made.try_once(1.0)
    assert ran == [0]


@pytest.mark.parametrize(
    "act",
    [
        lambda made: made.call(wire.OP_RUN, 1, 1.0),
        lambda made: made.capture(3, 1.0),
        lambda made: made.muted([], 1.0, lambda: None),
    ],
)
def test_a_recording_that_holds_for_the_first_slot_only_ends_nobody(act: Callable[[ReplaySession], object]) -> None:
    """Whoever wrote it could end the bench with it."""
    made, host = session([1024, 1088, 1152])
    made.has_operators = True
    refused = False

    def work(raw: torch.Tensor, slot: int) -> None:
        if slot or refused:
            raise Unreplayable("aten::mul gives another tensor here than it gave")

    host.work = work
    made.try_once(1.0)
    refused = True
    with pytest.raises(CandidateFault, match="can't be done again") as caught:
        act(made)
    assert (caught.value.kind, caught.value.rule) == (Fault.RUNTIME_ERROR, "")
    fresh, host = session([1024, 1088, 1152])
    host.work, fresh.has_operators = work, True
    with pytest.raises(Unreplayable):
        fresh.try_once(1.0)


def test_a_reference_that_fails_before_own_kernels_are_left_out_shows_nothing_of_them() -> None:
    made, _ = session([1024, 1088, 1152])
    late = CandidateFault(Fault.TIMEOUT, "no result", by="the reference")
    with pytest.raises(CandidateFault) as caught:
        made.muted(["own"], 1.0, Mock(side_effect=late))
    assert caught.value is late


def test_outputs_of_two_calls_in_one_place_are_overwritten() -> None:
    made, _ = session([1024, 1088, 1024])
    with pytest.raises(CandidateFault) as caught:
        made.call(wire.OP_RUN, 0, 1.0)
    assert (caught.value.kind, caught.value.rule) == (Fault.INCORRECT, "output_overwritten")


def test_an_output_in_memory_that_lasts_is_overwritten() -> None:
    made, _ = session([1024, 1088, 1152], ((1024, 1040),))
    with pytest.raises(CandidateFault, match="overwritten"):
        made.call(wire.OP_RUN, 0, 1.0)


@pytest.mark.parametrize(("outputs", "image"), [([1024, 1024, 1024], ()), ([1024, 1088, 1152], ((1024, 1168),))])
def test_where_outputs_may_be_kept_one_buffer_serves_all_calls(
    outputs: list[int], image: Sequence[tuple[int, int]]
) -> None:
    made, host = session(outputs, image, may_keep=True)
    assert made.is_kept

    def work(raw: torch.Tensor, slot: int) -> None:
        raw[outputs[slot] : outputs[slot] + 16].view(torch.float32)[:] = 2 * made.slots[slot][0]

    host.work = work
    for slot, value in enumerate((1.0, 2.0, 3.0)):
        made.slots[slot][0].fill_(value)
        found = made.read(made.call(wire.OP_RUN, slot, 1.0).tensors[0])
        assert found.tolist() == [2 * value] * 4
    host.work = lambda raw, slot: None
    assert made.read(made.call(wire.OP_RUN, 0, 1.0).tensors[0]).tolist() != [2.0] * 4, "an old result is none"
    host.arena.raw[1024:1040] = 9
    made.poison(1)
    assert not host.arena.raw[1024:1040].eq(9).any()


def test_outputs_apart_are_no_kept_ones() -> None:
    made, _ = session([1024, 1088, 1152], may_keep=True)
    assert not made.is_kept


def doubled(*slots: int) -> Callable[[torch.Tensor, int], None]:
    """Work of whoever computes these slots whichever is called, besides the one that is."""

    def work(raw: torch.Tensor, slot: int) -> None:
        for one in {slot, *slots}:
            inputs = raw[64 * one : 64 * one + 16].view(torch.float32)
            raw[1024 + 64 * one : 1040 + 64 * one].view(torch.float32)[:] = 2 * inputs

    return work


def test_own_kernels_are_timed_by_themselves_after_a_whole_forward() -> None:
    own = Kernel("a" * 64, "run", (1, 1, 1), (1, 1, 1), 0, [])
    made, host = session(
        [1024], slots=1, nodes=[[Memset(1024, 0, 1, 16, 1, 16, []), own, Memset(1024, 0, 1, 16, 1, 16, [])]]
    )
    assert made.own_alone(0, 1.0) == 0.0, "no more than a run of nothing"
    assert [(order.slots, order.left_out) for order in host.orders] == [((), ()), *[((0,), (0, 2))] * 3]

    def fault(*given: object) -> None:
        raise CandidateFault(Fault.TIMEOUT, "it waits for a counter that nobody sets back")

    made._revive = (revived := Mock())  # type: ignore[method-assign]
    host.work = fault
    assert made.own_alone(0, 1.0) == 0.0
    assert revived.called


def filled(values: Sequence[float] = (1.0, 2.0, 3.0)) -> tuple[ReplaySession, Host]:
    made, host = session([1024, 1088, 1152])
    for slot, value in zip(made.slots, values, strict=True):
        slot[0].fill_(value)
    return made, host


def test_a_call_that_does_the_work_of_others_is_found() -> None:
    made, host = filled()
    host.work = doubled(0, 1, 2)
    with pytest.raises(CandidateFault) as caught:
        made.call(wire.OP_RUN, 0, 1.0)
    assert (caught.value.kind, caught.value.rule) == (Fault.CHEATING, "slot_batched")


@pytest.mark.parametrize("is_work", [True, False])
def test_small_inputs_behind_a_bias_tell_whose_work_it_is(is_work: bool) -> None:
    """About 1 is the answer to all of them; so is a stray 1."""
    made, host = filled()
    for number, slot in enumerate(made.slots):
        slot[0].view(torch.float32)[:] = 0.01 * torch.randn(4, generator=torch.Generator().manual_seed(number))

    def work(raw: torch.Tensor, slot: int) -> None:
        for one in range(3):
            out = raw[1024 + 64 * one : 1040 + 64 * one].view(torch.float32)
            out[:] = 1 + raw[64 * one : 64 * one + 16].view(torch.float32) if is_work or one == slot else 1.0

    host.work = work
    with pytest.raises(CandidateFault) as caught:
        made.call(wire.OP_RUN, 0, 1.0)
    assert caught.value.rule == ("slot_batched" if is_work else "stray_write")


def test_a_call_that_writes_elsewhere_is_wrong_and_accused_of_nothing() -> None:
    """Whatever it writes there; and its own result, where the inputs are the same, says nothing either."""
    made, host = filled()
    host.work = lambda raw, slot: raw[1024:1168].fill_(1)
    with pytest.raises(CandidateFault) as caught:
        made.call(wire.OP_RUN, 0, 1.0)
    assert (caught.value.kind, caught.value.rule) == (Fault.ILLEGAL_ACCESS, "stray_write")
    made, host = filled((2.0, 2.0, 2.0))
    host.work = doubled(0, 1, 2)
    with pytest.raises(CandidateFault, match="neither its output"):
        made.call(wire.OP_RUN, 0, 1.0)


def test_a_replay_tells_that_an_operator_found_too_little_memory() -> None:
    made, host = filled()
    assert not made.is_short
    host.is_short = True
    assert made.is_short


def test_a_slot_that_is_left_out_of_a_timed_run_stays_poison() -> None:
    made, host = filled()
    made.capture(3, 1.0)
    host.work = doubled()
    made.leaves_out(1.0)
    assert len(host.orders[-1].slots) == 2
    host.work = doubled(0, 1, 2)
    with pytest.raises(CandidateFault, match="the work of several"):
        made.leaves_out(1.0)


def test_timed_slots_come_in_an_order_that_changes() -> None:
    made, host = session([256 * (4 + slot) for slot in range(12)], slots=12)
    made.capture(12, 1.0)
    for _ in range(20):
        made.replay(1, 1.0)
    timed = [order for order in host.orders if order.times]
    assert len({order.slots for order in timed}) > 1
    assert all(sorted(order.slots) == list(range(12)) for order in timed)


def test_graphs_of_timed_runs_are_made_when_they_are_captured_and_once() -> None:
    made, host = session([256 * (4 + slot) for slot in range(12)], slots=12)
    for _ in range(2):
        made.capture(12, 1.0)
    prepared = {order.slots for order in host.orders if not order.times}
    assert len(prepared) == len(host.orders)
    for _ in range(9):
        made.replay(1, 1.0)
        made.leaves_out(1.0)
    assert {order.slots for order in host.orders} == prepared


def test_before_a_timed_run_outputs_of_slots_that_are_not_in_it_stay() -> None:
    made, host = session([1024, 1088, 1152], ((512, 528),))
    host.arena.raw.fill_(9)
    made.poison(2)
    raw = host.arena.raw
    assert raw[1152:1168].eq(9).all()
    assert raw[:16].eq(9).all()
    assert raw[512:528].eq(0).all()
    assert raw[528:1152].eq(0x7F).all()
    assert raw[1168:].eq(0x7F).all()


# ── forwards that know their inputs by place ──────────────────────────────────────────────────────────────────────────

OWN = Kernel("a" * 64, "run", (1, 1, 1), (32, 1, 1), 0, [b"12345678"])


def library(*places: int, name: str = "aten::mm") -> Operator:
    metas = [wire.TensorMeta("float32", (4,), (1,), place) for place in places]
    return Operator(name, ["L", [["L", [["T", 0]]], ["D", {}]]], metas[:1], metas[1:])


@pytest.mark.parametrize(
    ("nodes", "is_so"),
    [
        ([library(64, 256), msgspec.structs.replace(OWN, arguments=[b"87654321"])], True),
        ([library(64, 256)], False),
        ([library(64, 256), msgspec.structs.replace(OWN, grid=(2, 1, 1))], False),
        ([library(64, 256), msgspec.structs.replace(OWN, name="another")], False),
        ([library(64, 256, name="aten::relu"), OWN], False),
        ([OWN, library(64, 256)], False),
    ],
)
def test_forwards_are_alike_where_they_are_the_same_steps_at_other_places(nodes: list[Any], is_so: bool) -> None:
    forwards = [Forward(each, ["T", 0], []) for each in ([library(0, 128), OWN], nodes)]
    assert ways(forwards) == ([[0, 1]] if is_so else [[0], [1]])


def test_each_way_that_forward_goes_is_looked_at_in_a_secret_slot() -> None:
    each = [[OWN], *[[library(0, 128), OWN]] * 14, [library(0, 256), library(0, 128), OWN]]
    made, _ = session([1024 + 64 * slot for slot in range(16)], slots=16, nodes=each)
    seen = [made.secret_slots(16, 4) for _ in range(200)]
    assert all({0, 15} < set(slots) and len(set(slots)) == 4 for slots in seen)
    assert {slot for slots in seen for slot in slots} == set(range(16))
    assert len({slots[0] for slots in seen}) > 4, "which comes first, and is timed, is secret"
    assert all(0 in slots and len(slots) == 2 for slots in (made.secret_slots(15, 1) for _ in range(20)))
    assert made.bare_trace is None
    assert set(made.kernels) == {"run", "aten::mm"}


def test_a_forward_that_has_no_own_kernel_over_some_inputs_is_found() -> None:
    made, _ = session([1024, 1088, 1152], nodes=[[OWN], [OWN], [library(0, 256)]])
    assert made.bare_trace is not None
    found = of_recorded(made.bare_trace, has_times=False)
    assert found is not None
    assert (found.rule, found.fault) == ("no_own_kernel", Fault.CHEATING)


@pytest.mark.parametrize(("lazy", "rule"), [((), ""), ((1, 2), "decoy_kernel")])
def test_own_kernels_are_needed_over_every_slot_that_is_looked_at(lazy: tuple[int, ...], rule: str) -> None:
    """Over some, the operator makes the answer from inputs that it has there alone."""
    each = [[library(64 * slot, 2048 + 64 * slot), OWN] for slot in range(3)]
    made, host = session([1024, 1088, 1152], nodes=each)

    def drawn(slot: int) -> list[torch.Tensor]:
        made.slots[slot][0].fill_(slot + 1.0)
        return [2 * made.slots[slot][0]]

    def done(order: Any, deadline_s: float) -> None:
        place = 2048 + 64 * order.slot
        if order.slot in lazy:
            host.arena.raw[place : place + 16].view(torch.float32)[:] = 2 * made.slots[order.slot][0]

    def found(expected: list[torch.Tensor], slot: int) -> tuple[bool, str]:
        return False, made.answered(lambda got: torch.equal(got, expected[0]), slot)

    host.done = done  # type: ignore[method-assign]
    finding = of_other_slots(made, [0, 2], 1.0, drawn, found)
    assert (finding.rule if finding is not None else "") == rule


@pytest.mark.parametrize("way", ["muted", "is_whole_without_own", "without"])
def test_a_replay_without_own_kernels_that_finds_no_memory_shows_nothing(way: str) -> None:
    made, host = session([1024, 1088, 1152], nodes=[[library(0, 2048), OWN]] * 3)

    def short(order: Any, deadline_s: float) -> Any:
        if getattr(order, "is_muted", False) or getattr(order, "left_out", ()):
            raise CandidateFault(Fault.OUT_OF_MEMORY, "an operator asks for more memory than the GPU has")
        return 1.0

    pretended: Any = host
    pretended.done = pretended.timed = short
    ask: dict[str, Callable[[], object]] = {
        "muted": lambda: made.muted(["own"], 1.0, lambda: None),
        "is_whole_without_own": lambda: made.is_whole_without_own(0, 1.0),
        "without": lambda: made.without((1,), 0, 1.0),
    }
    with pytest.raises(NoMemory):
        ask[way]()


@pytest.mark.parametrize(("second", "found"), [(5.0, "aten::mm"), (4.0, "")])
def test_an_operators_results_that_are_parts_of_the_answer_are_found_wherever_they_lie(
    second: float, found: str
) -> None:
    nodes = [library(0, 2048), library(0, 2560, name="aten::relu"), library(0, 3072)]
    half = [msgspec.structs.replace(n, results=[msgspec.structs.replace(n.results[0], shape=(2,))]) for n in nodes]
    made, host = session([1024, 1088, 1152], nodes=[[*half, OWN]] * 3)
    for place, value in ((2048, 3.0), (2560, 9.0), (3072, second)):
        host.arena.raw[place : place + 8].view(torch.float32).fill_(value)
    wanted = torch.tensor([3.0, 3.0, 5.0, 5.0])
    assert made.answered(lambda got: torch.equal(got.flatten().sort()[0], wanted)) == found


@pytest.mark.parametrize(("inputs", "found"), [([1.0, 3.0, 2.0, 4.0], "aten::clone"), ([1.0, 2.0, 3.0, 4.0], "")])
def test_a_copy_that_is_the_answer_is_found_unless_an_input_lies_so(inputs: list[float], found: str) -> None:
    made, host = session([1024, 1088, 1152], nodes=[[library(0, 2048, name="aten::clone"), OWN]] * 3)
    wanted = torch.tensor([1.0, 2.0, 3.0, 4.0])
    host.arena.raw[2048 : 2048 + 16].view(torch.float32)[:] = wanted
    assert made.answered(lambda got: False, 0, lambda got: is_moved(got, wanted, [torch.tensor(inputs)])) == found


# ── comparing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_quick_yes_is_a_yes() -> None:
    rng = torch.Generator().manual_seed(1)
    allowed = Tolerance(1e-3, 1e-5, 0.0, False, False)
    for _ in range(200):
        expected = torch.randn(64, generator=rng)
        got = expected + torch.randn(64, generator=rng) * 10 ** float(torch.rand((), generator=rng) * 4 - 6)
        if compare.agrees(got, expected, allowed):
            assert compare.difference(got, expected, allowed).wrong == 0
    assert compare.agrees(expected, expected.clone(), allowed)
    assert not compare.agrees(torch.full((4,), torch.nan), torch.zeros(4), allowed)


# ── own kernels of a backward ─────────────────────────────────────────────────────────────────────────────────────────

UPSTREAM, OTHER = 1024, 2048


def launched(*places: int, offset: int = 0) -> Kernel:
    """With these places of the arena among its arguments; `offset`: bytes before the first, as in a structure."""
    pointers = b"\0" * offset + b"".join((BASE + place).to_bytes(8, "little") for place in places)
    return Kernel("0" * 64, "own", (1, 1, 1), (1, 1, 1), 0, [pointers, b"\x05\0\0\0"])


def with_gradients(*nodes: Any) -> tuple[ReplaySession, Host]:
    """The second input is the gradient of the output."""
    host = Host(4096)
    inputs = [[wire.TensorMeta("float32", (4,), (1,), 0), wire.TensorMeta("float32", (4,), (1,), UPSTREAM)]]
    forwards = [Forward(list(nodes), ["T", 0], [wire.TensorMeta("float32", (4,), (1,), OTHER)])]
    made = ReplaySession(host, Recording(forwards, [], 4096), [], inputs, host.reserve(0), random.Random(3))  # type: ignore[arg-type]
    return made, host


def operator(*places: int) -> Operator:
    metas = [wire.TensorMeta("float32", (4,), (1,), place) for place in places]
    return Operator("aten::mul.Tensor", ["L", []], metas, [])


@pytest.mark.parametrize(
    ("nodes", "behind"),
    [
        ([launched(0, OTHER), launched(UPSTREAM, OTHER)], (1,)),
        ([launched(0, OTHER), launched(64, UPSTREAM + 12, offset=16), launched(OTHER)], (1, 2)),
        ([launched(0, OTHER), operator(OTHER, UPSTREAM), launched(OTHER, 512)], (2,)),
        ([launched(0, OTHER), Memcpy(512, UPSTREAM, 16), launched(512)], (2,)),
        ([launched(0, OTHER), operator(UPSTREAM)], ()),
        ([launched(0, OTHER), launched(UPSTREAM + 16), operator(OTHER)], None),
    ],
)
def test_own_kernels_of_a_backward_are_those_from_the_first_that_reads_upstream_gradients_on(
    nodes: list[Any], behind: tuple[int, ...] | None
) -> None:
    assert with_gradients(*nodes)[0].own_behind([1], 0) == behind


def test_a_forward_without_some_nodes_is_poison_first_and_where_it_faults_it_needs_them() -> None:
    made, host = with_gradients(launched(0, OTHER), launched(UPSTREAM, OTHER))
    asked: list[Any] = []
    host.done = lambda order, deadline_s: asked.append(order)  # type: ignore[method-assign]
    host.arena.raw[OTHER:] = 9
    made.without((1,), 0, 1.0)
    assert (asked[-1].slot, asked[-1].is_muted, asked[-1].left_out) == (0, False, (1,))
    assert host.arena.raw[OTHER : OTHER + 16].eq(0x7F).all()

    def faults(order: Any, deadline_s: float) -> None:
        raise CandidateFault(Fault.ILLEGAL_ACCESS, "an operator met poison")

    host.done, host.revive = faults, lambda: host.arena  # type: ignore[method-assign, attr-defined]
    host.arena.raw[OTHER:] = 9
    made.without((1,), 0, 1.0)
    assert host.arena.raw[OTHER : OTHER + 16].eq(0x7F).all()


def test_a_capture_leaves_out_what_it_is_told_to_and_keeps_the_order_of_the_rest() -> None:
    program = Program.__new__(Program)
    program._driver, program._stream = Mock(), Mock()
    launched_: list[str] = []
    waits: list[list[int]] = []
    program._driver.set_dependencies = lambda stream, nodes: waits.append(nodes)
    program._driver.dependencies = lambda stream: [len(launched_)]
    steps: list[Any] = [
        SimpleNamespace(after=after, is_own=True, launch=lambda stream, in_graph, name=name: launched_.append(name))
        for name, after in (("a", []), ("b", [0]), ("c", [1]))
    ]
    list(program._captured(steps, {1}))
    assert (launched_, waits) == (["a", "c"], [[], [1]])
