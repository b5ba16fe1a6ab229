"""The memory that a recorded candidate allocates: addresses only, so no GPU is needed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kbrl_async.kernels.verify.cuda.record.child import room_lacked
from kbrl_async.kernels.verify.cuda.record.heap import ALIGNMENT, Heap
from kbrl_async.kernels.verify.recording import NO_ROOM

START, END = 0x1000, 0x1000 + 64 * ALIGNMENT


def heap() -> Heap:
    made = Heap()
    made.begin(START, END)
    return made


class Books(RuleBasedStateMachine):
    """Whatever is taken and given: live blocks never overlap, and all that was given can be had again."""

    def __init__(self) -> None:
        super().__init__()
        self.heap, self.taken = heap(), dict[int, int]()

    @rule(size=st.integers(1, 6 * ALIGNMENT), stream=st.integers(0, 2))
    def take(self, size: int, stream: int) -> None:
        address = self.heap.take(size, stream)
        if address:
            assert START <= address <= END - size
            self.taken[address] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.taken)))
        del self.taken[address]
        self.heap.give(address)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        self.heap.hold(data.draw(st.sampled_from(sorted(self.taken))))

    @rule()
    def settle(self) -> None:
        self.heap.settle()

    @invariant()
    def blocks_are_apart_and_are_what_is_live(self) -> None:
        last = START
        for address in sorted(self.taken):
            assert address >= last
            last = address + self.taken[address]
        covered = {at for begin, end in self.heap.live() for at in range(begin, end, ALIGNMENT)}
        assert covered == {
            at for address, size in self.taken.items() for at in range(address, address + size, ALIGNMENT)
        }

    def teardown(self) -> None:
        for address in self.taken:
            self.heap.give(address)
        self.heap.settle()
        assert self.heap.take(END - START, 7) == START


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_one_stream_gave_back_another_gets_only_when_the_device_is_idle() -> None:
    made = heap()
    address = made.take(END - START, stream=1)
    made.give(address)
    assert made.take(ALIGNMENT, stream=2) == 0
    made.settle()
    assert made.take(ALIGNMENT, stream=2) == address


def test_a_stream_gets_its_own_memory_back_at_once() -> None:
    made = heap()
    address = made.take(ALIGNMENT, stream=1)
    made.give(address)
    assert made.take(ALIGNMENT, stream=1) == address


def test_a_block_that_another_stream_uses_is_not_given_out_again_before_the_device_is_idle() -> None:
    made = heap()
    address = made.take(END - START, stream=1)
    made.hold(address)
    made.give(address)
    assert made.take(ALIGNMENT, stream=1) == 0
    made.settle()
    assert made.take(ALIGNMENT, stream=1) == address


def test_what_lasts_is_told_in_stretches_and_without_what_is_ours() -> None:
    made = heap()
    first, ours, second, third = (made.take(ALIGNMENT, 0) for _ in range(4))
    assert made.live(but=frozenset({ours})) == [(first, ours), (second, third + ALIGNMENT)]


def test_what_an_earlier_candidate_left_is_kept_out_of_the_next_ones_way_and_is_none_of_its_own() -> None:
    made = heap()
    left = made.take(ALIGNMENT, 0)
    made.begin(START, END)
    assert made.left_bytes == ALIGNMENT
    assert made.live() == []
    assert made.take(ALIGNMENT, 0) != left


def test_memory_that_is_left_where_the_next_inputs_go_is_an_error() -> None:
    made = heap()
    made.take(ALIGNMENT, 0)
    with pytest.raises(ValueError, match="inputs go"):
        made.begin(START + 4 * ALIGNMENT, END)


def test_the_log_tells_what_was_asked_for_in_order() -> None:
    made = heap()
    made.log = []
    addresses = [made.take(size, 0) for size in (10, 2000)]
    assert made.log == [(addresses[0], 10), (addresses[1], 2000)]


def test_nothing_is_given_for_nothing() -> None:
    assert heap().take(0, 0) == 0


def test_what_one_forward_used_for_a_while_is_no_place_for_the_output_of_another() -> None:
    heap = Heap()
    heap.begin(4096, 1 << 20)
    heap.part()
    between, first = heap.take(4096, 7), heap.take(4096, 7)
    heap.give(between)
    assert heap.take(4096, 7) == between, "within one forward it is taken again"
    heap.give(between)
    heap.part()
    second = heap.take(4096, 7)
    assert second not in (between, first)
    heap.give(second)
    heap.settle()
    assert heap.take(4096, 7) == between


def test_what_is_used_for_a_while_lies_where_it_lay_before_where_outputs_are_known() -> None:
    heap = Heap()
    heap.begin(4096, 1 << 20)
    seen = []
    for _ in range(3):
        heap.part({1: 4096})
        between, output = heap.take(4096, 7), heap.take(4096, 7)
        heap.give(between)
        seen.append((between, output))
    assert len({between for between, _ in seen}) == 1
    assert len({place for pair in seen for place in pair}) == 4


def test_a_large_block_begins_with_a_page_whatever_lies_before() -> None:
    heap = Heap()
    heap.begin(4096, 1 << 26)
    small, large, next_small = heap.take(100, 7), heap.take(3 << 20, 7), heap.take(100, 7)
    assert large % (2 << 20) == 0
    assert (small, next_small) == (4096, 4608), "small ones lie side by side"
    heap.give(large)
    assert heap.take(3 << 20, 7) == large


def test_memory_of_a_pool_is_nobody_elses_whoever_gave_it_back_and_whatever_was_waited_for() -> None:
    made = heap()
    made.enter(1)
    between, lasting = made.take(ALIGNMENT, 7), made.take(ALIGNMENT, 7)
    made.give(between)
    assert made.take(ALIGNMENT, 7) == between, "the same graph takes it again"
    made.give(between)
    made.enter(None)
    for _ in range(2):
        others = [made.take(ALIGNMENT, stream) for stream in (7, 8)]
        assert between not in others
        made.settle()
    made.give(lasting)
    made.settle()
    assert made.take(62 * ALIGNMENT, 7) == 0
    made.enter(2)
    assert made.take(2 * ALIGNMENT, 7) not in (between, lasting), "another pool"
    made.enter(1)
    assert made.take(2 * ALIGNMENT, 7) == between


def test_memory_of_a_pool_lasts_while_it_is_alive_and_is_poisoned_while_it_is_not() -> None:
    made = heap()
    made.enter(1)
    between, lasting = made.take(ALIGNMENT, 7), made.take(ALIGNMENT, 7)
    made.give(between)
    made.enter(None)
    made.settle()
    assert made.live() == [(lasting, lasting + ALIGNMENT)]
    assert (between, between + ALIGNMENT) in made.free


def test_a_pool_ends_with_its_candidate() -> None:
    made = heap()
    made.enter(1)
    made.give(made.take(ALIGNMENT, 7))
    made.begin(START, END)
    assert not made.is_pooled
    assert made.take(END - START, 3) == START


def test_a_pools_memory_is_given_to_one_of_its_streams_at_a_time() -> None:
    made = heap()
    made.enter(1)
    address = made.take(ALIGNMENT, 7)
    made.give(address)
    assert made.take(ALIGNMENT, 8) != address


def test_what_an_operator_keeps_beside_its_results_is_a_librarys() -> None:
    made = heap()
    result, workspace, passing = (made.take(ALIGNMENT, 0) for _ in range(3))
    made.give(passing)
    log = [(result, 10), (workspace, 20), (passing, 30)]
    assert made.passing(log, {result}) == [(result, 10), (passing, 30)]


def recorded(calls: int, temporaries: tuple[int, ...]) -> tuple[list[tuple[int, int]], int]:
    """What a forward takes when it is captured, and the end of all, as a recorder calls it before: the first call keeps
    something that lasts, each has temporaries of its own and an output.
    """
    made = heap()
    made.take(3 * ALIGNMENT, 0)  # the bench's copies of the inputs

    def forward(is_first: bool = False) -> int:
        held = [made.take(size, 0) for size in temporaries]
        if is_first:
            made.take(2 * ALIGNMENT, 0)
        output = made.take(4 * ALIGNMENT, 0)
        for address in held:
            made.give(address)
        return output

    output = forward(is_first=True)
    made.take(4 * ALIGNMENT, 0)  # the bench's copy of the output, which lasts until the end
    made.give(output)
    made.settle()
    for _ in range(calls - 1):
        made.give(forward())
        made.settle()
    made.part()
    forward()
    return made.trail, made.used


@pytest.mark.parametrize("temporaries", [(), (ALIGNMENT,), (8 * ALIGNMENT, ALIGNMENT), (2 * ALIGNMENT, 6 * ALIGNMENT)])
def test_a_forward_that_was_called_once_is_captured_where_one_is_that_was_called_twice(
    temporaries: tuple[int, ...],
) -> None:
    """Two recorders, one of which is brief, write the same bytes of a wrong candidate."""
    assert recorded(1, temporaries) == recorded(2, temporaries)


def test_that_there_was_no_room_is_told_until_the_next_candidate() -> None:
    heap = Heap()
    heap.begin(0x1000, 0x2000)
    assert room_lacked(heap) == ""
    heap.lacked = 3 << 29
    assert room_lacked(heap) == f"{NO_ROOM} (a block of 1.50 GiB): "
    heap.begin(0x1000, 0x2000)
    assert room_lacked(heap) == ""
