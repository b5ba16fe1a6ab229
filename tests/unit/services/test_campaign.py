"""The aggregator's campaign: evaluation around training, replay, and what its journal keeps."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kbrl_async.rollouts.buffer.buffer import BufferOptions, rollout_ids
from kbrl_async.rollouts.buffer.events import BatchMade, Scored
from kbrl_async.rollouts.curriculum import CurriculumOptions
from protocols.records import VERIFIER, GroupOutcome, Problem
from services.reward_aggregator.journal import Journal
from services.reward_aggregator.run_state import AFTER, BEFORE, Entry, Evaluated, Plan, RolloutEnded, RunState
from tests.records import sample, stats

GROUP = 2


def problem(name: str) -> Problem:
    return Problem(f"L1/{name}", 1, name, "class Model: ...")


def plan(**book: int) -> Plan:
    options = BufferOptions(**{"groups_per_batch": 2, "max_batches": 2, "max_lag": 1, **book})
    return Plan([problem("a"), problem("b"), problem("c")], [problem("h")], 2, GROUP, 0, options)


class Driver:
    """Plays aggregator: keeps every entry, as the journal would."""

    def __init__(self, campaign: RunState) -> None:
        self.campaign = campaign
        self.entries: list[Entry] = []
        self.now = 0.0

    def evaluate(self, phase: str) -> None:
        for rollout_id in list(self.campaign.awaited(phase)):
            self._apply(Evaluated(phase, rollout_id, stats(problem_id="L1/h"), self.now))

    def admit(self) -> str:
        chosen = self.campaign.next_problem(self.now)
        change = self.campaign.book.admit(chosen.problem_id, 1, GROUP, self.now)
        assert change.event is not None
        self._note(change)
        return change.event.group_id  # type: ignore[union-attr]

    def score(self, group_id: str, version: int = 0) -> None:
        problem_id = self.campaign.book.group_problem(group_id)
        for number, rollout_id in enumerate(rollout_ids(group_id, GROUP)):
            made = sample(rollout_id, float(number), version)
            change = self.campaign.book.scored(group_id, rollout_id, [made], self.now)
            self._apply(RolloutEnded(rollout_id, group_id, stats(float(number), problem_id, policy_version=version)))
            self._note(change)

    def batch(self) -> BatchMade:
        change = self.campaign.book.poll(self.now)
        assert isinstance(change.event, BatchMade), change
        self._note(change)
        return change.event

    def train(self, batch: BatchMade) -> None:
        self._note(self.campaign.book.trained(batch.batch_id, batch.index + 1, self.now))

    def _note(self, change) -> None:  # type: ignore[no-untyped-def]
        self.campaign.note(change.event, change.closed)
        self.entries.append(change.event)
        self.now += 1.0

    def _apply(self, entry: Entry) -> None:
        self.campaign.apply(entry)
        self.entries.append(entry)


def trained_campaign() -> Driver:
    driver = Driver(RunState(plan()))
    driver.evaluate(BEFORE)
    for index in range(2):
        for group in [driver.admit(), driver.admit()]:
            driver.score(group, index)
        driver.train(driver.batch())
    return driver


def test_training_waits_for_the_evaluation_of_the_first_policy() -> None:
    driver = Driver(RunState(plan()))
    assert not driver.campaign.may_train
    driver.evaluate(BEFORE)
    assert driver.campaign.may_train


def test_the_run_ends_after_the_second_evaluation_and_not_before() -> None:
    driver = trained_campaign()
    assert driver.campaign.has_trained
    assert not driver.campaign.has_ended
    driver.evaluate(AFTER)
    assert driver.campaign.has_ended


def test_an_evaluation_rollout_counts_once() -> None:
    campaign = RunState(plan())
    first = next(iter(campaign.awaited(BEFORE)))
    campaign.apply(Evaluated(BEFORE, first, stats(1.0, "L1/h")))
    campaign.apply(Evaluated(BEFORE, first, stats(0.0, "L1/h")))
    assert [s.reward for s in campaign.heldout(BEFORE)] == [1.0]


def test_every_problem_comes_once_before_any_comes_twice() -> None:
    driver = Driver(RunState(plan(groups_per_batch=3, max_batches=9)))
    groups = [driver.admit() for _ in range(6)]
    problems = [driver.campaign.book.group_problem(group) for group in groups]
    assert sorted(problems[:3]) == sorted(problems[3:]) == ["L1/a", "L1/b", "L1/c"]


def test_the_counters_add_up_after_training() -> None:
    counters = trained_campaign().campaign.counters()
    assert (counters.groups_admitted, counters.ended, counters.updates, counters.rollouts) == (4, 4, 2, 8)


def test_replaying_the_entries_gives_the_same_campaign() -> None:
    driver = trained_campaign()
    again = RunState(plan())
    for entry in driver.entries:
        again.apply(entry)
    assert again.counters() == driver.campaign.counters()
    assert again.state() == driver.campaign.state()
    assert (again.clock, again.first_result, again.book.version) == (
        driver.campaign.clock,
        driver.campaign.first_result,
        2,
    )


def test_the_age_of_a_batch_is_counted_from_the_oldest_policy_that_wrote_it() -> None:
    driver = Driver(RunState(plan()))
    driver.evaluate(BEFORE)
    groups = [driver.admit() for _ in range(4)]
    for group in groups:
        driver.score(group, 0)
    driver.train(driver.batch())
    batch = driver.batch()
    assert driver.campaign.max_staleness == 1
    assert {s.staleness for s in driver.campaign.batch_stats(batch)} == {1}


@pytest.fixture
def journal(tmp_path: Path):  # type: ignore[no-untyped-def]
    with Journal(tmp_path / "aggregator.sqlite") as opened:
        yield opened


def test_a_journal_gives_back_what_it_was_given_in_order(journal: Journal) -> None:
    entries = trained_campaign().entries
    journal.append(entries)
    assert list(journal.entries()) == entries


def test_rollouts_of_an_ended_group_keep_their_reward_but_no_tokens(journal: Journal) -> None:
    driver = trained_campaign()
    journal.append(driver.entries)
    journal.append([], ["g000000"])
    kept = [e for e in journal.entries() if isinstance(e, Scored) and e.group_id == "g000000"]
    assert [sample.reward for e in kept for sample in e.samples] == [0.0, 1.0]
    assert all(not sample.token_ids and not sample.logprobs for e in kept for sample in e.samples)


def test_a_campaign_replayed_from_stripped_entries_counts_the_same(journal: Journal) -> None:
    driver = trained_campaign()
    journal.append(driver.entries)
    journal.append([], [f"g{n:06d}" for n in range(4)])
    again = RunState(plan())
    for entry in journal.entries():
        again.apply(entry)
    assert again.counters() == driver.campaign.counters()


def test_entries_of_one_call_are_there_together_or_not_at_all(journal: Journal) -> None:
    class Unwritable(msgspec.Struct):
        value: object

    with pytest.raises(TypeError):
        journal.append([trained_campaign().entries[0], Unwritable(object())])  # type: ignore[list-item]
    assert list(journal.entries()) == []


def test_an_infrastructure_failure_leaves_the_group_without_the_rollout() -> None:
    driver = Driver(RunState(plan()))
    driver.evaluate(BEFORE)
    group = driver.admit()
    for rollout_id in rollout_ids(group, GROUP):
        change = driver.campaign.book.lost(group, rollout_id, "worker_lost", 1.0)
        driver.campaign.note(change.event, change.closed)  # type: ignore[arg-type]
    assert driver.campaign.book.counts[GroupOutcome.FAILED] == 1
    assert not driver.campaign.scored


def test_only_turns_that_wrote_a_kernel_say_how_hard_a_problem_is() -> None:
    driver = Driver(RunState(plan()))
    group = driver.admit()
    problem_id = driver.campaign.book.group_problem(group)
    asked = next(one for one in driver.campaign.plan.training if one.problem_id == problem_id)
    solved = stats(0.0, problem_id, compiled=True, correct=True)
    unknown = driver.campaign.curriculum.success(asked)
    for number, rollout_id in enumerate(rollout_ids(group, GROUP)):
        driver._apply(RolloutEnded(rollout_id, group, msgspec.structs.replace(solved, turn=1, role=VERIFIER)))
        driver._note(driver.campaign.book.scored(group, rollout_id, [sample(rollout_id, float(number))], driver.now))
    assert driver.campaign.curriculum.success(asked) == unknown


def test_how_hard_a_problem_is_does_not_follow_from_the_order_of_scoring() -> None:
    """Failures are scored first: one by one, the estimate would be low while a group is open and high after it."""
    estimates = []
    for order in ((0, 1), (1, 0)):
        driver = Driver(RunState(plan()))
        group = driver.admit()
        problem_id = driver.campaign.book.group_problem(group)
        asked = next(one for one in driver.campaign.plan.training if one.problem_id == problem_id)
        rollouts = rollout_ids(group, GROUP)
        for place in order:
            assert driver.campaign.curriculum.success(asked) == 1 - asked.difficulty, "the group is not complete"
            solved = stats(0.0, problem_id, correct=place % 2 == 0)
            change = driver.campaign.book.scored(
                group, rollouts[place], [sample(rollouts[place], float(place))], driver.now
            )
            driver._apply(RolloutEnded(rollouts[place], group, solved))
            driver._note(change)
        estimates.append(driver.campaign.curriculum.success(asked))
    assert estimates[0] == estimates[1] != 1 - asked.difficulty


def test_a_group_is_paid_by_the_stage_of_its_admission_and_a_replay_agrees() -> None:
    driver = Driver(RunState(msgspec.structs.replace(plan(max_batches=9), curriculum=CurriculumOptions(window=1))))
    driver.evaluate(BEFORE)
    first = [driver.admit(), driver.admit()]
    late = driver.admit()
    for group in first:
        problem_id = driver.campaign.book.group_problem(group)
        for number, rollout_id in enumerate(rollout_ids(group, GROUP)):
            made = sample(rollout_id, float(number))
            change = driver.campaign.book.scored(group, rollout_id, [made], driver.now)
            driver._apply(RolloutEnded(rollout_id, group, stats(0.0, problem_id, compiled=True)))
            driver._note(change)
    driver.train(driver.batch())
    assert driver.campaign.notes == ["stage1 → stage2: compiled 100% over the last 1 batches"]
    assert driver.campaign.stage_of(late) == "stage1"
    assert driver.campaign.stage_of(driver.admit()) == "stage2"
    again = RunState(driver.campaign.plan)
    for entry in driver.entries:
        again.apply(entry)
    assert (again.notes, again.stage_of(late)) == (driver.campaign.notes, "stage1")
