"""Quiet windows: one at a time, bounded, fair, and nobody stands still for ever whatever is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocols import messages as msg
from protocols.messages import SHARES
from protocols.quiet import Pauses, QuietDesk, QuietOptions, Sends

OPTIONS = QuietOptions(answer_s=2.0, max_length_s=4.0, max_share=0.5)
GPU = "host/gpu0"


@pytest.fixture
def desk() -> QuietDesk:
    made = QuietDesk(OPTIONS)
    made.hello("learner", {SHARES: GPU}, 0.0)
    made.hello("sampler", {SHARES: f"{GPU},host/gpu1"}, 0.0)
    made.hello("farm", {}, 0.0)
    return made


def ask(desk: QuietDesk, bench: str, request_id: str, now: float, length_s: float = 3.0) -> Sends:
    return desk.request(bench, msg.QuietRequest(request_id, GPU, length_s), now)


def grants(sends: Sends) -> list[tuple[str, str]]:
    return [(to, message.request_id) for to, message in sends if isinstance(message, msg.QuietGrant)]


def test_holders_are_asked_and_the_window_is_granted_when_all_have_answered(desk: QuietDesk) -> None:
    asked = ask(desk, "bench", "q1", 1.0)
    assert asked == [("learner", msg.Pause("q1", GPU, 5.0)), ("sampler", msg.Pause("q1", GPU, 5.0))]
    assert desk.paused("learner", msg.Paused("q1"), 1.2) == []
    assert desk.paused("sampler", msg.Paused("q1"), 1.5) == [("bench", msg.QuietGrant("q1", GPU, 3.0, 0.5, []))]


def test_a_holder_that_does_not_answer_is_named_in_the_grant(desk: QuietDesk) -> None:
    ask(desk, "bench", "q1", 1.0)
    desk.paused("learner", msg.Paused("q1"), 1.2)
    assert desk.tick(2.9) == []
    assert desk.tick(3.0) == [("bench", msg.QuietGrant("q1", GPU, 3.0, 2.0, ["sampler"]))]
    assert desk.costs()[GPU].incomplete == 1


def test_it_says_when_it_has_something_to_do_next(desk: QuietDesk) -> None:
    assert desk.due() is None
    ask(desk, "bench", "q1", 1.0)
    assert desk.due() == 3.0, "who has not answered by then is missing"
    desk.tick(3.0)
    assert desk.due() == 6.0, "the window's end"
    desk.done("bench", msg.QuietDone("q1"), 4.0)
    assert desk.due() is None, "nobody waits for the end of the rest"
    assert ask(desk, "other", "q2", 4.5) == []
    assert desk.due() == 7.0
    assert desk.tick(7.0)
    assert desk.due() == 9.0


def test_holders_go_on_when_the_bench_is_done(desk: QuietDesk) -> None:
    ask(desk, "bench", "q1", 1.0)
    desk.tick(3.0)
    resumed = desk.done("bench", msg.QuietDone("q1"), 4.0)
    assert resumed == [("learner", msg.Resume("q1")), ("sampler", msg.Resume("q1"))]
    assert desk.costs()[GPU].held_s_by_bench == {"bench": 3.0}


def test_a_window_ends_by_its_length_and_no_bench_may_ask_for_more_than_the_limit(desk: QuietDesk) -> None:
    ask(desk, "bench", "q1", 0.0, length_s=1000.0)
    desk.tick(2.0)
    assert desk.tick(5.9) == []
    assert [message for _, message in desk.tick(6.0)] == [msg.Resume("q1"), msg.Resume("q1")]
    assert desk.costs()[GPU].expired == 1


def test_holders_get_their_share_before_the_next_window(desk: QuietDesk) -> None:
    ask(desk, "bench", "q1", 0.0)
    desk.tick(2.0)
    desk.done("bench", msg.QuietDone("q1"), 3.0)
    assert ask(desk, "bench", "q2", 3.0) == []
    assert desk.tick(5.9) == []
    assert [to for to, _ in desk.tick(6.0)] == ["learner", "sampler"]


def window(desk: QuietDesk, request_id: str, begin: float, end: float, at_work: tuple[str, ...] = ()) -> None:
    """One that opens at once, and is answered at once."""
    assert ask(desk, "bench", request_id, begin), "it has to wait"
    for holder in HOLDERS:
        desk.paused(holder, msg.Paused(request_id, holder not in at_work), begin)
    desk.done("bench", msg.QuietDone(request_id), end)


def test_holders_without_work_are_owed_nothing(desk: QuietDesk) -> None:
    for number in range(10):
        window(desk, f"q{number}", float(number), number + 1.0)
    assert desk.costs()[GPU].held_s == 0.0


def test_who_has_work_by_the_next_window_is_owed_both(desk: QuietDesk) -> None:
    window(desk, "q1", 0.0, 1.0)
    window(desk, "q2", 1.0, 2.0)
    window(desk, "q3", 2.0, 4.0, at_work=("learner",))
    cost = desk.costs()[GPU]
    assert (cost.held_s, cost.held_s_by_bench) == (3.0, {"bench": 3.0})
    assert ask(desk, "bench", "q4", 4.0) == []
    assert desk.tick(6.9) == []
    assert desk.tick(7.0)
    desk.paused("learner", msg.Paused("q4"), 7.0)
    desk.done("bench", msg.QuietDone("q4"), 7.5)
    assert desk.costs()[GPU].held_s == 3.5


def test_a_holder_that_does_not_answer_is_taken_to_work(desk: QuietDesk) -> None:
    ask(desk, "bench", "q1", 0.0)
    desk.paused("sampler", msg.Paused("q1", True), 0.0)
    desk.tick(2.0)
    desk.done("bench", msg.QuietDone("q1"), 3.0)
    assert desk.costs()[GPU].held_s == 3.0


def test_a_bench_that_asks_again_stands_behind_one_that_waits(desk: QuietDesk) -> None:
    desk.gone("learner", 0.0)
    desk.gone("sampler", 0.0)
    assert grants(ask(desk, "b1", "q1", 0.0)) == [("b1", "q1")]
    ask(desk, "b2", "q2", 0.1)
    assert grants(desk.done("b1", msg.QuietDone("q1"), 0.2)) == [("b2", "q2")]
    assert grants(ask(desk, "b1", "q3", 0.3)) == []
    assert grants(desk.done("b2", msg.QuietDone("q2"), 0.4)) == [("b1", "q3")]


def test_without_holders_a_window_costs_nothing(desk: QuietDesk) -> None:
    sends = desk.request("bench", msg.QuietRequest("q1", "other/gpu0", 3.0), 0.0)
    assert grants(sends) == [("bench", "q1")]
    desk.done("bench", msg.QuietDone("q1"), 3.0)
    assert desk.stats(6.0)["other/gpu0"]["share"] == 0.0


@pytest.fixture
def benches() -> QuietDesk:
    """Two on one GPU that nobody else uses."""
    made = QuietDesk(OPTIONS)
    made.hello("bench", {SHARES: GPU}, 0.0)
    made.hello("other", {SHARES: GPU}, 0.0)
    return made


def test_benches_of_one_gpu_stand_still_for_each_other(benches: QuietDesk) -> None:
    assert ask(benches, "bench", "q1", 1.0) == [("other", msg.Pause("q1", GPU, 5.0))]
    assert grants(benches.paused("other", msg.Paused("q1"), 1.1)) == [("bench", "q1")]


def test_a_bench_that_waits_for_its_own_window_is_not_waited_for(benches: QuietDesk) -> None:
    ask(benches, "bench", "q1", 1.0)
    assert grants(ask(benches, "other", "q2", 1.1)) == [("bench", "q1")]
    ask(benches, "third", "q3", 1.2)
    ended = benches.done("bench", msg.QuietDone("q1"), 1.3)
    assert [(to, message.window_id) for to, message in ended if isinstance(message, msg.Pause)] == [("bench", "q2")]
    benches.paused("bench", msg.Paused("q2"), 1.4)
    ended = benches.done("other", msg.QuietDone("q2"), 1.5)
    assert grants(ended) == [], "the first bench may be checking a candidate again"
    assert grants(benches.tick(3.5)) == [("third", "q3")]


def test_benches_among_themselves_need_no_rest(benches: QuietDesk) -> None:
    ask(benches, "bench", "q1", 0.0)
    assert grants(ask(benches, "other", "q2", 0.1)) == [("bench", "q1")]
    benches.done("bench", msg.QuietDone("q1"), 3.0)
    assert grants(benches.paused("bench", msg.Paused("q2"), 3.1)) == [("other", "q2")]


def test_a_repeated_request_gets_its_grant_again(desk: QuietDesk) -> None:
    ask(desk, "bench", "q1", 0.0)
    desk.tick(2.0)
    assert grants(ask(desk, "bench", "q1", 2.5)) == [("bench", "q1")]


def test_a_bench_that_dies_lets_everybody_go_on(desk: QuietDesk) -> None:
    ask(desk, "bench", "q1", 0.0)
    assert [message for _, message in desk.gone("bench", 1.0)] == [msg.Resume("q1")] * 2


def test_a_holder_that_dies_is_not_waited_for_and_one_that_comes_stands_still_too(desk: QuietDesk) -> None:
    ask(desk, "bench", "q1", 0.0)
    desk.paused("learner", msg.Paused("q1"), 0.1)
    assert grants(desk.gone("sampler", 0.2)) == [("bench", "q1")]
    assert desk.hello("sampler", {SHARES: GPU}, 1.0) == [("sampler", msg.Pause("q1", GPU, 2.2))]


def test_a_holder_goes_on_by_itself_where_the_broker_is_silent() -> None:
    pauses = Pauses()
    pauses.pause(msg.Pause("q1", GPU, 3.0), 10.0)
    assert (pauses.is_open(12.9), pauses.is_open(13.0)) == (False, True)


def test_a_holder_answers_each_window_once() -> None:
    pauses = Pauses()
    pauses.pause(msg.Pause("q1", GPU, 3.0), 10.0)
    assert pauses.to_answer() == [msg.Paused("q1")]
    assert pauses.to_answer() == []


BENCHES, HOLDERS = ("b1", "b2", "b3"), ("learner", "sampler")


class Floor(RuleBasedStateMachine):
    """Benches and holders around one desk; any message may be lost, anybody may die."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.desk = QuietDesk(OPTIONS)
        self.pauses = {name: Pauses() for name in HOLDERS}
        self.asked: dict[str, str] = {}
        self.granted: dict[str, tuple[str, float]] = {}
        self.served: dict[str, int] = dict.fromkeys(BENCHES, 0)
        self.passed_by: dict[str, int] = dict.fromkeys(BENCHES, 0)
        self.requests = 0
        self.held_since: float | None = None
        for name in HOLDERS:
            self._perform(self.desk.hello(name, {SHARES: GPU}, self.now))

    def _perform(self, sends: Sends, lose: bool = False) -> None:
        for to, message in sends:
            if isinstance(message, msg.QuietGrant):
                self._granted(to, message, lose)
            elif lose:
                continue
            elif isinstance(message, msg.Pause):
                assert message.length_s <= OPTIONS.answer_s + OPTIONS.max_length_s + 1e-6
                self.pauses[to].pause(message, self.now)
            elif isinstance(message, msg.Resume):
                self.pauses[to].resume(message.window_id)

    def _granted(self, bench: str, grant: msg.QuietGrant, lose: bool) -> None:
        first = self.granted.get(bench, ("", 0.0))[0] != grant.request_id
        self.granted[bench] = (grant.request_id, self.now + grant.length_s)
        alone = [name for name, (_, until) in self.granted.items() if until > self.now and name != bench]
        assert alone == [], "two windows at a time"
        if not first:
            return
        for name in self.asked:
            self.passed_by[name] = 0 if name == bench else self.passed_by[name] + 1
            assert self.passed_by[name] <= len(BENCHES), "others were served again and again"

    @rule(bench=st.sampled_from(BENCHES), length=st.sampled_from([0.5, 3.0, 50.0]), lose=st.booleans())
    def ask(self, bench: str, length: float, lose: bool) -> None:
        if bench not in self.asked:
            self.requests += 1
            self.asked[bench] = f"q{self.requests}"
            self.passed_by[bench] = 0
        request = msg.QuietRequest(self.asked[bench], GPU, length)
        if bench in self.granted and self.granted[bench][0] != request.request_id:
            del self.granted[bench]
        self._perform(self.desk.request(bench, request, self.now), lose)

    @rule(bench=st.sampled_from(BENCHES), lose=st.booleans())
    def finish(self, bench: str, lose: bool) -> None:
        request_id = self.asked.pop(bench, None)
        if request_id is not None:
            self.granted.pop(bench, None)
            if not lose:
                self._perform(self.desk.done(bench, msg.QuietDone(request_id), self.now))

    @rule(holder=st.sampled_from(HOLDERS), is_idle=st.booleans(), lose=st.booleans())
    def answer(self, holder: str, is_idle: bool, lose: bool) -> None:
        for paused in self.pauses[holder].to_answer(is_idle):
            if not lose:
                self._perform(self.desk.paused(holder, paused, self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]), lose=st.booleans())
    def time_passes(self, seconds: float, lose: bool) -> None:
        self.now += seconds
        self._perform(self.desk.tick(self.now), lose)

    @rule(bench=st.sampled_from(BENCHES))
    def a_bench_dies(self, bench: str) -> None:
        self.asked.pop(bench, None)
        self.granted.pop(bench, None)
        self._perform(self.desk.gone(bench, self.now))

    @rule(holder=st.sampled_from(HOLDERS))
    def a_holder_starts_again(self, holder: str) -> None:
        self._perform(self.desk.gone(holder, self.now))
        self.pauses[holder] = Pauses()
        self._perform(self.desk.hello(holder, {SHARES: GPU}, self.now))

    @rule()
    def the_broker_starts_again(self) -> None:
        """Its memory of windows is gone; benches give up theirs when they notice the new epoch."""
        self.desk = QuietDesk(OPTIONS)
        self.asked.clear()
        self.granted.clear()
        for name in HOLDERS:
            self._perform(self.desk.hello(name, {SHARES: GPU}, self.now))

    @invariant()
    def windows_take_at_most_their_share(self) -> None:
        for cost in self.desk.costs().values():
            longest = OPTIONS.answer_s + OPTIONS.max_length_s + 3.0  # ticks are at most three seconds apart
            owed_at_most = 2 * longest  # a window while nobody had work, and the one after it
            assert cost.held_s <= OPTIONS.max_share * (self.now - cost.first_at) + owed_at_most

    def teardown(self) -> None:
        if not hasattr(self, "desk"):
            return
        for _ in range(100):
            self.now += 1.0
            self._perform(self.desk.tick(self.now))
        assert all(pauses.is_open(self.now) for pauses in self.pauses.values())
        waiting = self.desk.stats(self.now).get(GPU, {"waiting": 0})["waiting"]
        assert waiting == 0, "everybody is served in the end, answered or not"


TestFloor = Floor.TestCase
TestFloor.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
