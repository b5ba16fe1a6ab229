"""The group book: every admitted group ends exactly once, and no batch is older than it may be."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kbrl_async.rollouts.buffer.buffer import RolloutBuffer, rollout_ids
from kbrl_async.rollouts.buffer.events import BatchMade, Change, Event, HoldBegan, StragglersCut
from protocols.records import GroupOutcome, TrainSample
from tests.plans import buffer_rules
from tests.records import sample

RULES = buffer_rules(batch_size=2, max_steps=4, max_staleness=1, hold_s=10.0)


def samples(rollout_id: str, reward: float, version: int, turns: int = 1) -> list[TrainSample]:
    return [sample(rollout_id, reward + t, version, t) for t in range(turns)]


def opened(book: RolloutBuffer, count: int, rollouts: int = 2, problem: str = "p") -> list[str]:
    changes = [book.take(book.admission(problem, 1, rollouts, 0.0)) for _ in range(count)]
    return [c.event.group_id for c in changes if c.event is not None]  # type: ignore[union-attr]


def score_all(book: RolloutBuffer, group_id: str, version: int = 0, same: bool = False) -> list[Change]:
    return [
        book.take(book.scored(group_id, r, samples(r, 0.5 if same else float(i), version), 0.0))
        for i, r in enumerate(rollout_ids(group_id, 2))
    ]


def train_one(book: RolloutBuffer, now: float = 0.0) -> BatchMade:
    event = book.take(book.poll(now)).event
    assert isinstance(event, BatchMade), event
    book.take(book.trained(event.batch_id, event.index + 1, now))
    return event


def test_the_window_admits_s_plus_one_batches_of_groups() -> None:
    book = RolloutBuffer(RULES)
    assert len(opened(book, 10)) == 4
    assert book.room() == 0


def test_admission_never_exceeds_what_the_remaining_batches_need() -> None:
    book = RolloutBuffer(msgspec.structs.replace(RULES, max_steps=1))
    assert len(opened(book, 10)) == 2


def test_a_finished_run_leaves_nothing_behind() -> None:
    book = RolloutBuffer(RULES)
    while not book.is_done:
        for group_id in opened(book, book.room()):
            score_all(book, group_id, book.version)
        train_one(book)
    assert book.counts == {"admitted": 8, GroupOutcome.TRAINED: 8}
    assert book.open_groups == 0


def test_a_filtered_group_frees_its_slot_at_once() -> None:
    book = RolloutBuffer(RULES)
    first, *_ = opened(book, 4)
    (closed,) = score_all(book, first, same=True)[-1].closed
    assert (closed.outcome, closed.reason) == (GroupOutcome.FILTERED, "zero_variance")
    assert book.room() == 1


def test_a_lost_rollout_leaves_its_group_and_the_rest_is_trained() -> None:
    book = RolloutBuffer(RULES)
    group_id, other = opened(book, 2, rollouts=3)
    for g in (group_id, other):
        book.take(book.lost(g, f"{g}.r1", "worker_lost", 0.0))
        book.take(book.scored(g, f"{g}.r0", samples(f"{g}.r0", 0.0, 0), 0.0))
        book.take(book.scored(g, f"{g}.r2", samples(f"{g}.r2", 1.0, 0), 0.0))
    batch = train_one(book)
    assert batch.group_ids == [group_id, other]


@pytest.mark.parametrize(
    ("reason", "outcome"), [("worker_lost", GroupOutcome.FAILED), ("stale", GroupOutcome.DROPPED_STALE)]
)
def test_a_group_with_fewer_than_two_rollouts_left_ends(reason: str, outcome: GroupOutcome) -> None:
    book = RolloutBuffer(RULES)
    (group_id,) = opened(book, 1)
    book.take(book.scored(group_id, f"{group_id}.r0", samples("x", 1.0, 0), 0.0))
    (closed,) = book.take(book.lost(group_id, f"{group_id}.r1", reason, 0.0)).closed
    assert (closed.outcome, closed.reason) == (outcome, reason)


def test_doubled_late_and_unknown_events_change_nothing() -> None:
    book = RolloutBuffer(RULES)
    (group_id,) = opened(book, 1)
    book.take(book.scored(group_id, f"{group_id}.r0", samples("x", 1.0, 0), 0.0))
    assert book.take(book.scored(group_id, f"{group_id}.r0", samples("x", 9.0, 0), 0.0)).event is None
    assert book.take(book.lost(group_id, f"{group_id}.r0", "worker_lost", 0.0)).event is None
    assert book.take(book.scored(group_id, f"{group_id}.r7", samples("x", 9.0, 0), 0.0)).event is None
    assert book.take(book.scored("g999999", "g999999.r0", samples("x", 9.0, 0), 0.0)).event is None
    assert book.take(book.trained("batch-000009", 1, 0.0)).event is None


def test_advantages_are_leave_one_out_within_a_turn_and_scaled_over_the_batch() -> None:
    book = RolloutBuffer(RULES)
    for group_id in opened(book, 2):
        for i, r in enumerate(rollout_ids(group_id, 2)):
            book.take(book.scored(group_id, r, samples(r, float(3 * i), 0, turns=2), 0.0))
    event = book.take(book.poll(0.0)).event
    assert isinstance(event, BatchMade)
    group = book.train_groups(event.batch_id)[0]
    assert [(s.turn, s.advantage) for s in group.samples] == [(0, -1.0), (0, 1.0), (1, -1.0), (1, 1.0)]


def test_a_batch_holds_the_oldest_groups_first() -> None:
    book = RolloutBuffer(RULES)
    first, second, third, _ = opened(book, 4)
    for group_id, version in ((third, 0), (second, 0), (first, 0)):
        score_all(book, group_id, version)
    assert train_one(book, 100.0).group_ids == [first, second]


def test_a_group_older_than_the_lag_is_dropped_and_not_trained() -> None:
    book = RolloutBuffer(msgspec.structs.replace(RULES, max_staleness=0))
    book.version = 3
    group_id, _ = opened(book, 2)
    score_all(book, group_id, version=2)
    (closed,) = book.take(book.poll(0.0)).closed
    assert (closed.group_id, closed.outcome) == (group_id, GroupOutcome.DROPPED_STALE)


def slow_group_at_version_one() -> tuple[RolloutBuffer, str]:
    """Version 1, two ready groups of version 1, and one of version 0 that is still at work."""
    book = RolloutBuffer(RULES)
    slow, *quick = opened(book, 4)
    for group_id in quick[:2]:
        score_all(book, group_id)
    train_one(book)
    score_all(book, quick[2], version=1)
    for group_id in opened(book, 2):
        score_all(book, group_id, version=1)
    return book, slow


def test_a_batch_is_held_back_for_a_group_that_would_become_too_old() -> None:
    book, slow = slow_group_at_version_one()
    assert isinstance(book.take(book.poll(0.0)).event, HoldBegan)
    assert book.take(book.poll(5.0)).event is None
    score_all(book, slow, version=0)
    assert slow in train_one(book, 6.0).group_ids


def test_holding_back_ends_at_its_deadline() -> None:
    book, slow = slow_group_at_version_one()
    book.take(book.poll(0.0))
    assert slow not in train_one(book, 10.0).group_ids


def test_a_group_that_another_batch_can_still_take_is_not_waited_for() -> None:
    book = RolloutBuffer(RULES)
    for group_id in opened(book, 4)[2:]:
        score_all(book, group_id)
    assert isinstance(book.take(book.poll(0.0)).event, BatchMade)


def test_a_batch_without_a_free_place_is_not_held_back() -> None:
    """The sampler lagged: more groups must go now than the batch can take, so waiting for one more saves none."""
    book = RolloutBuffer(RULES)
    book.version = 1
    first, second, third, _ = opened(book, 4)
    score_all(book, first, version=0)
    score_all(book, second, version=0)
    book.take(book.scored(third, f"{third}.r0", samples(f"{third}.r0", 1.0, 0), 0.0))
    assert isinstance(book.take(book.poll(0.0)).event, BatchMade)


def test_with_more_lag_a_batch_waits_before_its_places_run_out() -> None:
    """S = 2: four of six groups of version 0 are slow. Batch 1 must take two of them, or batch 2 has too few places."""
    book = RolloutBuffer(msgspec.structs.replace(RULES, max_staleness=2))
    groups = opened(book, 6)
    score_all(book, groups[0])
    score_all(book, groups[1])
    train_one(book)
    for group_id in opened(book, 2):
        score_all(book, group_id, version=1)
    assert isinstance(book.take(book.poll(0.0)).event, HoldBegan)
    score_all(book, groups[2])
    assert book.take(book.poll(1.0)).event is None
    score_all(book, groups[3])
    assert train_one(book, 2.0).group_ids == groups[2:4]


def test_lag_zero_is_the_synchronous_baseline() -> None:
    book = RolloutBuffer(msgspec.structs.replace(RULES, max_staleness=0))
    for version in range(RULES.max_steps):
        groups = opened(book, 10)
        assert len(groups) == 2
        score_all(book, groups[0], version)
        assert book.take(book.poll(0.0)).event is None
        score_all(book, groups[1], version)
        assert train_one(book).group_ids == groups
    assert book.is_done


def test_one_batch_is_outstanding_at_a_time() -> None:
    book = RolloutBuffer(RULES)
    for group_id in opened(book, 4):
        score_all(book, group_id)
    assert isinstance(book.take(book.poll(0.0)).event, BatchMade)
    assert book.take(book.poll(0.0)).event is None


def test_a_failed_batch_ends_its_groups_and_the_next_has_another_id() -> None:
    book = RolloutBuffer(RULES)
    for group_id in opened(book, 4):
        score_all(book, group_id)
    first = book.take(book.poll(0.0)).event
    assert isinstance(first, BatchMade)
    closed = book.take(book.batch_failed(first.batch_id, "worker_lost", 0.0)).closed
    assert [c.outcome for c in closed] == [GroupOutcome.FAILED] * 2
    second = train_one(book)
    assert (second.index, second.batch_id) == (0, "batch-000001")


def test_a_problem_that_fails_again_and_again_is_benched_for_a_while() -> None:
    book = RolloutBuffer(RULES)
    for _ in range(3):
        (group_id,) = opened(book, 1, problem="bad")
        for r in rollout_ids(group_id, 2):
            book.take(book.lost(group_id, r, "infra_error", 50.0))
    assert book.benched(60.0) == {"bad"}
    assert book.benched(50.0 + RULES.bench_s) == frozenset()


def test_finish_ends_open_groups_and_lets_the_outstanding_batch_be_answered() -> None:
    book = RolloutBuffer(RULES)
    groups = opened(book, 4)
    for group_id in groups[:2]:
        score_all(book, group_id)
    batch = book.take(book.poll(0.0)).event
    assert isinstance(batch, BatchMade)
    closed = book.take(book.finish(1.0)).closed
    assert {(c.group_id, c.reason) for c in closed} == {(g, "run_ended") for g in groups[2:]}
    assert not book.is_done
    book.take(book.trained(batch.batch_id, 1, 2.0))
    assert book.is_done
    assert book.counts == {"admitted": 4, GroupOutcome.TRAINED: 2, GroupOutcome.FAILED: 2}


@given(
    durations=st.lists(st.integers(1, 40), min_size=1, max_size=30), lag=st.integers(0, 3), filtered=st.integers(2, 9)
)
@settings(max_examples=300, deadline=None)
def test_without_a_deadline_no_slow_group_is_ever_dropped_and_the_run_ends(
    durations: list[int], lag: int, filtered: int
) -> None:
    """A small simulation: groups take `durations` ticks and are generated by the policy of their admission."""
    options = buffer_rules(batch_size=2, max_steps=6, max_staleness=lag, hold_s=1e9)
    book, running, learning, admitted = RolloutBuffer(options), dict[str, tuple[int, int]](), (0, ""), 0
    for now in range(2000):
        while book.room():
            (group_id,) = opened(book, 1)
            running[group_id] = (now + durations[admitted % len(durations)], book.version)
            admitted += 1
        for group_id in [g for g, (end, _) in running.items() if end <= now]:
            score_all(book, group_id, running.pop(group_id)[1], same=int(group_id[1:]) % filtered == 0)
        while (event := book.take(book.poll(float(now))).event) is not None:
            if isinstance(event, BatchMade):
                learning = (now + 3, event.batch_id)
        if learning[1] and learning[0] <= now:
            book.take(book.trained(learning[1], book.version + 1, float(now)))
            learning = (0, "")
        if book.is_done:
            break
    assert book.is_done
    assert book.counts[GroupOutcome.DROPPED_STALE] == 0
    assert book.counts[GroupOutcome.TRAINED] == 12


def state(book: RolloutBuffer) -> object:
    return msgspec.to_builtins(book.state())


class BookMachine(RuleBasedStateMachine):
    """Random, doubled, late and lost events, and restarts by replay at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = buffer_rules(batch_size=2, max_steps=6, max_staleness=1, hold_s=5.0)
        self.book = RolloutBuffer(self.rules)
        self.journal: list[Event] = []
        self.now = 0.0
        self.known: list[str] = []
        self.ended: dict[str, GroupOutcome] = {}
        self.trained_rollouts: set[str] = set()

    def keep(self, change: Change) -> None:
        if change.event is not None:
            self.journal.append(change.event)
        for closed in change.closed:
            assert closed.group_id not in self.ended, "a group ended twice (I1)"
            self.ended[closed.group_id] = closed.outcome

    @rule(problem=st.sampled_from(["a", "b"]), rollouts=st.integers(2, 3))
    def admit(self, problem: str, rollouts: int) -> None:
        change = self.book.take(self.book.admission(problem, 1, rollouts, self.now))
        self.keep(change)
        if change.event is not None:
            self.known += rollout_ids(change.event.group_id, rollouts)  # type: ignore[union-attr]

    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]), age=st.integers(0, 2))
    def score(self, data: st.DataObject, reward: float, age: int) -> None:
        if self.known:
            rollout = data.draw(st.sampled_from(self.known))
            made = samples(rollout, reward, max(0, self.book.version - age))
            self.keep(self.book.take(self.book.scored(rollout.split(".")[0], rollout, made, self.now)))

    @rule(data=st.data(), reason=st.sampled_from(["worker_lost", "stale"]))
    def lose(self, data: st.DataObject, reason: str) -> None:
        if self.known:
            rollout = data.draw(st.sampled_from(self.known))
            self.keep(self.book.take(self.book.lost(rollout.split(".")[0], rollout, reason, self.now)))

    @rule(dt=st.floats(0, 10))
    def poll(self, dt: float) -> None:
        self.now += dt
        while True:
            change = self.book.take(self.book.poll(self.now))
            self.keep(change)
            if isinstance(change.event, BatchMade):
                self.look_at(change.event)
            if change.event is None:
                break

    def look_at(self, batch: BatchMade) -> None:
        for group in self.book.train_groups(batch.batch_id):
            for turn in group.samples:
                assert batch.index - turn.policy_version <= self.rules.max_staleness, "too old for its batch (I2)"
                assert turn.rollout_id not in self.trained_rollouts, "trained twice (I1)"
                self.trained_rollouts.add(turn.rollout_id)

    @rule(fails=st.integers(0, 4), doubled=st.booleans())
    def answer(self, fails: int, doubled: bool) -> None:
        for batch in self.book.outstanding()[:1]:
            for _ in range(2 if doubled else 1):
                if fails == 0:
                    self.keep(self.book.take(self.book.batch_failed(batch.batch_id, "worker_lost", self.now)))
                else:
                    self.keep(self.book.take(self.book.trained(batch.batch_id, batch.index + 1, self.now)))

    @rule()
    def restart(self) -> None:
        encoded = msgspec.json.encode(self.journal)
        replayed = RolloutBuffer.replay(self.rules, msgspec.json.decode(encoded, type=list[Event]))
        assert state(replayed) == state(self.book)
        for batch in self.book.outstanding():
            assert replayed.train_groups(batch.batch_id) == self.book.train_groups(batch.batch_id)
        self.book = replayed

    @rule(really=st.integers(0, 15))
    def finish(self, really: int) -> None:
        if really == 0:
            self.keep(self.book.take(self.book.finish(self.now)))

    @invariant()
    def the_counters_add_up(self) -> None:
        self.book.check()
        assert sum(self.book.counts[o] for o in GroupOutcome) == len(self.ended)

    @invariant()
    def the_window_holds(self) -> None:
        assert self.book.open_groups <= (self.rules.max_staleness + 1) * self.rules.batch_size


BookMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBook = BookMachine.TestCase


def test_a_running_mean_compares_with_the_problems_past_and_is_the_same_after_a_replay() -> None:
    options = buffer_rules(batch_size=1, max_steps=3, max_staleness=0, advantage="running_mean", scale_advantages=False)
    book, events = RolloutBuffer(options), []

    def play(rewards: list[float]) -> list[float]:
        admitted = book.take(book.admission("L1/a", 1, 2, 0.0)).event
        group_id = admitted.group_id
        changes = [Change(admitted, [])]
        for rollout_id, reward in zip(rollout_ids(group_id, 2), rewards, strict=True):
            changes.append(
                book.take(book.scored(group_id, rollout_id, [sample(rollout_id, reward, book.version)], 0.0))
            )
        made = book.take(book.poll(0.0))
        advantages = [s.advantage for s in book.train_groups(made.event.batch_id)[0].samples]
        changes += [made, book.take(book.trained(made.event.batch_id, book.version + 1, 0.0))]
        events.extend(change.event for change in changes)
        return advantages

    assert play([0.0, 1.0]) == pytest.approx([-0.5, 0.5])
    assert play([1.0, 0.8]) == pytest.approx([0.5, 0.3])
    assert RolloutBuffer.replay(options, events).state().running == book.state().running
    assert book.state().running == {"L1/a": {0: pytest.approx(0.62)}}


def imitate(baseline: str, *groups: list[float]) -> tuple[RolloutBuffer, list[list[float]]]:
    """The advantages of one batch of these groups; groups that teach nothing are not in it."""
    book = RolloutBuffer(buffer_rules(batch_size=1, max_steps=9, max_staleness=0, advantage=baseline))
    found = []
    for rewards in groups:
        group_id = book.take(book.admission("L1/a", 1, len(rewards), 0.0)).event.group_id
        for rollout_id, reward in zip(rollout_ids(group_id, len(rewards)), rewards, strict=True):
            book.take(book.scored(group_id, rollout_id, [sample(rollout_id, reward, book.version)], 0.0))
        made = book.take(book.poll(0.0)).event
        if made is not None:
            found.append([s.advantage for s in book.train_groups(made.batch_id)[0].samples])
            book.take(book.trained(made.batch_id, book.version + 1, 0.0))
    return book, found


def test_best_of_n_imitates_the_three_best_that_are_good_enough() -> None:
    _, advantages = imitate("best_of_n", [0.6, 0.9, 0.7, 0.1, 0.8], [0.6, 0.1, 0.2])
    assert [[a > 0 for a in group] for group in advantages] == [[False, True, True, False, True], [True, False, False]]
    assert sum(advantages[0]) / 5 == pytest.approx(1.0)


def test_a_group_without_a_good_sample_is_filtered_and_one_of_equally_good_ones_is_not() -> None:
    book, advantages = imitate("best_of_n", [0.1, 0.2], [0.9, 0.9])
    assert len(advantages) == 1
    assert book.counts[GroupOutcome.FILTERED] == 1


def test_reward_weights_have_mean_one_and_are_never_negative() -> None:
    _, advantages = imitate("reward_weight", [0.5, -1.0, 1.5])
    assert advantages[0] == pytest.approx([0.75, 0.0, 2.25])


def test_after_the_hold_a_group_goes_on_without_its_stragglers_instead_of_being_lost() -> None:
    """Its two answers that came are trained on; the one that is waited for is nobody's any more."""
    book = RolloutBuffer(RULES)
    slow = book.take(book.admission("L1/slow", 1, 3, 0.0)).event.group_id
    quick = opened(book, 3)
    for group_id in quick[:2]:
        score_all(book, group_id)
    train_one(book)
    for place in (0, 1):
        name = f"{slow}.r{place}"
        book.take(book.scored(slow, name, samples(name, float(place), 0), 0.0))
    score_all(book, quick[2], version=1)
    for group_id in opened(book, 2):
        score_all(book, group_id, version=1)
    assert isinstance(book.take(book.poll(0.0)).event, HoldBegan)
    assert book.take(book.poll(9.0)).event is None
    assert book.take(book.poll(10.0)).event == StragglersCut([slow], 10.0)
    assert slow in train_one(book, 10.0).group_ids
    assert book.counts[GroupOutcome.DROPPED_STALE] == 0
    assert book.scored(slow, f"{slow}.r2", samples(f"{slow}.r2", 1.0, 0), 11.0) is None
    book.check()


def test_a_group_with_too_few_answers_is_not_cut() -> None:
    book, slow = slow_group_at_version_one()
    book.take(book.poll(0.0))
    assert not isinstance(book.poll(10.0), StragglersCut)
    assert book.awaits_more(slow)


def test_the_hold_follows_what_95_percent_of_the_runs_rollouts_take() -> None:
    """A thinking model writes for minutes: a wait of 20 s would teach it short answers."""
    book = RolloutBuffer(msgspec.structs.replace(RULES, hold_s=None, batch_size=100, max_steps=9))
    assert book.hold_s == 20.0
    for number in range(100):
        group_id = book.take(book.admission("L1/a", 1, 2, 0.0)).event.group_id
        name = f"{group_id}.r0"
        book.take(book.scored(group_id, name, samples(name, 1.0, 0), 3.0 * number))
    assert book.hold_s == 3.0 * 94
    restored = RolloutBuffer(book.rules)
    restored.restore(book.state())
    assert restored.hold_s == book.hold_s
    assert RolloutBuffer(msgspec.structs.replace(RULES, hold_s=7.0)).hold_s == 7.0


@pytest.mark.parametrize("advantage", ["running_mean", "none"])
def test_without_a_baseline_of_the_group_equal_rewards_teach_and_one_rollout_is_enough(advantage: str) -> None:
    book = RolloutBuffer(buffer_rules(batch_size=1, max_steps=9, max_staleness=0, advantage=advantage))
    alone = book.take(book.admission("L1/a", 1, 1, 0.0)).event.group_id
    name = f"{alone}.r0"
    book.take(book.scored(alone, name, samples(name, 0.5, 0), 0.0))
    assert train_one(book).group_ids == [alone]
    alike = opened(book, 1)[0]
    score_all(book, alike, version=1, same=True)
    assert train_one(book).group_ids == [alike]
    compared = RolloutBuffer(RULES)
    assert compared.admission("L1/a", 1, 1, 0.0) is None


def test_an_answer_that_was_cut_counts_for_the_baseline_and_is_not_learned_from() -> None:
    book = RolloutBuffer(
        buffer_rules(batch_size=1, max_steps=9, max_staleness=0, truncated="mask", scale_advantages=False)
    )
    group_id = book.take(book.admission("L1/a", 1, 3, 0.0)).event.group_id
    for place, reward in enumerate((1.0, 0.0, 0.5)):
        name = f"{group_id}.r{place}"
        (one,) = samples(name, reward, 0)
        book.take(book.scored(group_id, name, [msgspec.structs.replace(one, truncated=place == 1)], 0.0))
    made = book.take(book.poll(0.0)).event
    (trained,) = book.train_groups(made.batch_id)
    assert {s.rollout_id[-2:]: s.advantage for s in trained.samples} == pytest.approx({"r0": 0.75, "r2": 0.0})


def test_a_group_of_cut_answers_alone_teaches_nothing_under_a_mask() -> None:
    book = RolloutBuffer(buffer_rules(batch_size=1, max_steps=9, max_staleness=0, truncated="mask"))
    group_id = opened(book, 1)[0]
    for place in (0, 1):
        name = f"{group_id}.r{place}"
        cut = [msgspec.structs.replace(one, truncated=True) for one in samples(name, float(place), 0)]
        book.take(book.scored(group_id, name, cut, 0.0))
    assert book.counts[GroupOutcome.FILTERED] == 1
