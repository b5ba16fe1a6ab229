"""A run's state: evaluation around training, replay, and what its journal keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kbrl_async.evaluation.heldout import AFTER, BEFORE
from kbrl_async.rollouts.buffer.buffer import rollout_ids
from kbrl_async.rollouts.buffer.events import BatchMade, RolloutScored
from kbrl_async.rollouts.settings import Curriculum
from kbrl_async.runs.commands import AskTurn, Command, Effect, Evaluated
from kbrl_async.runs.run_journal import RunJournal
from kbrl_async.runs.run_memory import RunPlan, RunSnapshot
from kbrl_async.runs.run_state import RunState
from protocols.records import VERIFIER, Problem, Strictness
from tests.plans import buffer_rules, run_plan
from tests.records import sample, stats

GROUP = 2


def problem(name: str) -> Problem:
    return Problem(f"L1/{name}", 1, name, "class Model: ...")


def plan(**buffer: int) -> RunPlan:
    rules = buffer_rules(**{"max_steps": 2, **buffer})
    return run_plan([problem("a"), problem("b"), problem("c")], [problem("h")], buffer=rules)


class Driver:
    """Plays aggregator: keeps every command, as the journal would, and what was to be done."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.commands: list[Command] = []
        self.effects: list[Effect] = []
        self.now = 0.0

    def do(self, *commands: Command | None) -> None:
        for command in commands:
            assert command is not None
            self.effects += self.state.do(command)
            self.commands.append(command)
        self.now += 1.0

    def evaluate(self, phase: str) -> None:
        for ask in self.state.open_work():
            if isinstance(ask, AskTurn) and ask.group_id == phase:
                self.do(Evaluated(phase, ask.rollout_id, stats(problem_id="L1/h"), self.now))

    def admit(self) -> str:
        admitted = self.state.admission(self.now)
        assert admitted is not None
        self.do(admitted)
        return admitted.group_id

    def problem_of(self, group_id: str) -> str:
        return next(e.problem.problem_id for e in self.effects if isinstance(e, AskTurn) and e.group_id == group_id)

    def score(self, group_id: str, version: int = 0, **numbers: Any) -> None:
        problem_id = self.problem_of(group_id)
        for number, rollout_id in enumerate(rollout_ids(group_id, GROUP)):
            made = stats(float(number), problem_id, policy_version=version, **numbers)
            self.do(*self.state.ended(group_id, rollout_id, sample(rollout_id, float(number), version), made, self.now))

    def batch(self) -> BatchMade:
        made = self.state.batch_step(self.now)
        assert isinstance(made, BatchMade), made
        self.do(made)
        return made

    def train(self, batch: BatchMade) -> None:
        self.do(*self.state.trained(batch.batch_id, batch.index + 1, {}, "", self.now))


def trained_run() -> Driver:
    driver = Driver(RunState(plan()))
    driver.evaluate(BEFORE)
    for index in range(2):
        for group in [driver.admit(), driver.admit()]:
            driver.score(group, index)
        driver.train(driver.batch())
    return driver


def test_training_waits_for_the_evaluation_of_the_first_policy() -> None:
    driver = Driver(RunState(plan()))
    assert not driver.state.may_train
    driver.evaluate(BEFORE)
    assert driver.state.may_train


def test_the_run_ends_after_the_second_evaluation_and_not_before() -> None:
    driver = trained_run()
    assert driver.state.has_trained
    assert not driver.state.has_ended
    driver.evaluate(AFTER)
    assert driver.state.has_ended


def test_an_evaluation_rollout_counts_once() -> None:
    state = RunState(plan())
    first = next(ask.rollout_id for ask in state.open_work() if isinstance(ask, AskTurn))
    state.do(Evaluated(BEFORE, first, stats(1.0, "L1/h")))
    state.do(Evaluated(BEFORE, first, stats(0.0, "L1/h")))
    assert [s.reward for s in state.heldout(BEFORE)] == [1.0]


def test_every_problem_comes_once_before_any_comes_twice() -> None:
    driver = Driver(RunState(plan(batch_size=3, max_steps=9)))
    groups = [driver.admit() for _ in range(6)]
    problems = [driver.problem_of(group) for group in groups]
    assert sorted(problems[:3]) == sorted(problems[3:]) == ["L1/a", "L1/b", "L1/c"]


def test_the_counters_add_up_after_training() -> None:
    counters = trained_run().state.counters()
    assert (counters.groups_admitted, counters.ended, counters.updates, counters.rollouts) == (4, 4, 2, 8)


def test_replaying_the_entries_gives_the_same_run() -> None:
    driver = trained_run()
    again = RunState(plan())
    for entry in driver.commands:
        again.do(entry)
    assert again.counters() == driver.state.counters()
    assert again.snapshot() == driver.state.snapshot()
    assert (again.clock, again.first_result, again.version) == (
        driver.state.clock,
        driver.state.first_result,
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
    assert driver.state.staleness_max == 1
    assert {s.staleness for s in driver.state.batch_stats(batch.batch_id)} == {1}


@pytest.fixture
def journal(tmp_path: Path):  # type: ignore[no-untyped-def]
    with RunJournal(tmp_path / "aggregator.sqlite") as opened:
        yield opened


def test_a_journal_gives_back_what_it_was_given_in_order(journal: RunJournal) -> None:
    entries = trained_run().commands
    journal.append(entries)
    assert list(journal.entries()) == entries


def test_rollouts_of_an_ended_group_keep_their_reward_but_no_tokens(journal: RunJournal) -> None:
    driver = trained_run()
    journal.append(driver.commands)
    journal.append([], ["g000000"])
    kept = [e for e in journal.entries() if isinstance(e, RolloutScored) and e.group_id == "g000000"]
    assert [sample.reward for e in kept for sample in e.samples] == [0.0, 1.0]
    assert all(not sample.token_ids and not sample.logprobs for e in kept for sample in e.samples)


def test_a_run_replayed_from_stripped_entries_counts_the_same(journal: RunJournal) -> None:
    driver = trained_run()
    journal.append(driver.commands)
    journal.append([], [f"g{n:06d}" for n in range(4)])
    again = RunState(plan())
    for entry in journal.entries():
        again.do(entry)
    assert again.counters() == driver.state.counters()


def test_entries_of_one_call_are_there_together_or_not_at_all(journal: RunJournal) -> None:
    class Unwritable(msgspec.Struct):
        value: object

    with pytest.raises(TypeError):
        journal.append([trained_run().commands[0], Unwritable(object())])  # type: ignore[list-item]
    assert list(journal.entries()) == []


def test_an_infrastructure_failure_leaves_the_group_without_the_rollout() -> None:
    driver = Driver(RunState(plan()))
    driver.evaluate(BEFORE)
    group = driver.admit()
    for rollout_id in rollout_ids(group, GROUP):
        driver.do(driver.state.lost(group, rollout_id, "worker_lost", 1.0))
    assert driver.state.counters().groups_failed == 1
    assert not driver.state.turns_scored


def test_the_curriculum_knows_which_problems_were_begun_and_which_of_them_are_under_way() -> None:
    driver = Driver(RunState(plan(max_steps=9)))
    driver.evaluate(BEFORE)
    groups = [driver.admit() for _ in range(3)]
    first, second, lost = (driver.problem_of(group) for group in groups)
    for group in groups[:2]:
        driver.score(group)
    for rollout_id in rollout_ids(groups[2], GROUP):
        driver.do(driver.state.lost(groups[2], rollout_id, "worker_lost", 1.0))
    known = driver.state.snapshot().curriculum
    assert known.visits == {first: 1, second: 1, lost: 1}
    assert known.under_way == {first: 1, second: 1}, "what failed has ended, what waits for its batch has not"
    driver.train(driver.batch())
    assert driver.state.snapshot().curriculum.under_way == {}


def success(driver: Driver, group: str) -> dict[int, float]:
    """Estimated chance by turn of the group's problem; nothing before any group of it was complete."""
    return driver.state.snapshot().curriculum.success.get(driver.problem_of(group), {})


def test_only_turns_that_wrote_a_kernel_say_how_hard_a_problem_is() -> None:
    driver = Driver(RunState(plan()))
    group = driver.admit()
    driver.score(group, compiled=True, correct=True, turn=1, role=VERIFIER)
    assert success(driver, group) == {}


def test_how_hard_a_problem_is_does_not_follow_from_the_order_of_scoring() -> None:
    """Failures are scored first: one by one, the estimate would be low while a group is open and high after it."""
    estimates = []
    for order in ((0, 1), (1, 0)):
        driver = Driver(RunState(plan()))
        group = driver.admit()
        rollouts = rollout_ids(group, GROUP)
        for place in order:
            assert success(driver, group) == {}, "the group is not complete"
            solved = stats(0.0, driver.problem_of(group), correct=place % 2 == 0)
            made = sample(rollouts[place], float(place))
            driver.do(*driver.state.ended(group, rollouts[place], made, solved, driver.now))
        estimates.append(success(driver, group))
    assert estimates[0] == estimates[1] != {}


def test_a_group_is_paid_by_the_stage_of_its_admission_and_a_replay_agrees() -> None:
    driver = Driver(RunState(msgspec.structs.replace(plan(max_steps=9), curriculum=Curriculum(window=1))))
    driver.evaluate(BEFORE)
    first = [driver.admit(), driver.admit()]
    late = driver.admit()
    for group in first:
        driver.score(group, compiled=True)
    driver.train(driver.batch())
    assert driver.state.notes == ["stage1 → stage2: compiled 100% over the last 1 batches"]
    assert driver.state.stage_of(late) == "stage1"
    assert driver.state.stage_of(driver.admit()) == "stage2"
    again = RunState(driver.state.plan)
    for entry in driver.commands:
        again.do(entry)
    assert (again.notes, again.stage_of(late)) == (driver.state.notes, "stage1")


def test_a_group_is_checked_as_at_its_admission_evaluations_fully_and_a_restart_remembers() -> None:
    rising = Curriculum(window=1, strictness="rising", first_sets=2, first_tolerance=4.0, strict_above=0.5)
    driver = Driver(RunState(msgspec.structs.replace(plan(max_steps=9), curriculum=rising)))
    driver.evaluate(BEFORE)
    first = [driver.admit(), driver.admit()]
    late = driver.admit()
    for group in first:
        driver.score(group, correct=True)
    driver.train(driver.batch())
    newest = driver.admit()
    asked = [driver.state.strictness_of(group) for group in (BEFORE, first[0], late, newest)]
    assert asked == [None, None, Strictness(2, 4.0), Strictness(4, 2.0)], "an ended group is forgotten"
    again = RunState(driver.state.plan)
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(driver.state.snapshot()), type=RunSnapshot))
    assert [again.strictness_of(late), again.strictness_of(newest)] == asked[2:]
