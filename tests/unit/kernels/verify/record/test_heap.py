"""The memory that a recorded candidate allocates: addresses only, so no GPU is needed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kbrl_async.kernels.verify.cuda.record.heap import ALIGNMENT, Heap

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
