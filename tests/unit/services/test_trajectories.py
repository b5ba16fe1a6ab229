"""Rollouts of several turns in the campaign: one sample a turn, replayed after a crash, forgotten when they end."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kbrl_async.evaluation.heldout import BEFORE
from kbrl_async.rollouts.buffer.buffer import rollout_ids
from kbrl_async.rollouts.buffer.events import BatchMade
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.rollouts.trajectories import TurnTaken, best_turn, without_tokens
from kbrl_async.rollouts.turns import TurnScore
from kbrl_async.runs.commands import AskTurn, Command
from kbrl_async.runs.run_journal import RunJournal
from kbrl_async.runs.run_state import RunState
from kbrl_async.runs.telemetry import training_metrics
from protocols.records import Problem, TrainSample
from tests import records
from tests.plans import buffer_rules, run_plan, turn_rules


def stats(rollout_id: str, turn: int, reward: float = 0.0, fault: str = "", **more: bool) -> RolloutStats:
    return records.stats(reward, turn=turn, rollout_id=rollout_id, fault=fault, **more)


def sample(rollout_id: str, turn: int, reward: float) -> TrainSample:
    return records.sample(rollout_id, reward, turn=turn)


def taken(rollout_id: str, group: str, turn: int, reward: float = 0.0) -> TurnTaken:
    return TurnTaken(
        rollout_id, group, sample(rollout_id, turn, reward), stats(rollout_id, turn, reward), TurnScore(reward), "next"
    )


def run() -> RunState:
    rules = buffer_rules(batch_size=1, max_steps=1, max_staleness=0)
    return RunState(run_plan([Problem("L1/a", 1, "a", "")], buffer=rules, turns=turn_rules(2, gamma=0.5)))


def play(made: RunState) -> tuple[str, list[Command]]:
    """One group of two rollouts with two turns each, up to the last turn's end."""
    admitted = made.admission(0.0)
    assert admitted is not None
    commands: list[Command] = [admitted]
    group = admitted.group_id
    commands += [taken(rollout_id, group, 0, 0.1 * n) for n, rollout_id in enumerate(rollout_ids(group, 2))]
    for command in commands:
        made.do(command)
    return group, commands


def end(made: RunState, group: str) -> None:
    for number, rollout_id in enumerate(rollout_ids(group, 2)):
        last = sample(rollout_id, 1, float(number))
        for command in made.ended(group, rollout_id, last, stats(rollout_id, 1, float(number)), 1.0):
            made.do(command)


def open_turns(made: RunState) -> int:
    return len(made.snapshot().trajectories.turns)


def test_each_turn_is_a_sample_with_its_own_return_and_advantage() -> None:
    made = run()
    group, _ = play(made)
    end(made, group)
    batch = made.batch_step(2.0)
    assert isinstance(batch, BatchMade)
    made.do(batch)
    (trained,) = made.train_groups(batch.batch_id)
    by_turn = {(s.rollout_id, s.turn): s for s in trained.samples}
    assert by_turn[f"{group}.r1", 0].reward == 0.1 + 0.5 * 1.0
    first_turns = [by_turn[f"{group}.r{i}", 0].advantage for i in (0, 1)]
    assert first_turns[1] > 0 > first_turns[0]
    assert len(made.batch_stats(batch.batch_id)) == 4


def test_a_restart_in_the_middle_of_a_rollout_asks_for_the_same_next_turn(tmp_path: Path) -> None:
    made = run()
    group, commands = play(made)
    with RunJournal(tmp_path / "j") as journal:
        journal.append(commands)
        again = run()
        for entry in journal.entries():
            again.do(entry)
    rollout_id = f"{group}.r1"
    assert [ask.rollout_id for ask in again.open_work() if isinstance(ask, AskTurn)] == rollout_ids(group, 2)
    assert [t.prompt for t in again.turns(rollout_id)] == ["next"]
    assert again.snapshot() == made.snapshot()


def test_a_finished_rollout_leaves_no_turns_behind() -> None:
    made = run()
    group, _ = play(made)
    assert open_turns(made) == 2
    end(made, group)
    assert open_turns(made) == 0


def test_a_group_that_ends_early_takes_its_turns_along() -> None:
    made = run()
    play(made)
    finished = made.finish(3.0)
    assert finished is not None
    made.do(finished)
    assert open_turns(made) == 0


def test_an_ended_group_keeps_no_tokens_and_no_prompts_of_its_turns() -> None:
    bare = without_tokens(taken("r", "g", 0, 0.5))
    assert (bare.sample.token_ids, bare.sample.prompt_ids, bare.prompt) == ([], [], "")
    assert without_tokens(taken("r", "g", 0), keep_prompt=True).prompt == "next"


def test_turns_of_an_evaluation_are_no_training_rollouts() -> None:
    made = run()
    made.do(taken("eval.r", BEFORE, 0))
    assert made.turns_scored == 0
    assert len(made.turns("eval.r")) == 1


def test_the_best_turn_of_an_evaluated_rollout_is_the_fastest_correct_one() -> None:
    slow = msgspec.structs.replace(stats("r", 1, 0.7, correct=True), speedup_lo=0.5)
    fast = msgspec.structs.replace(stats("r", 2, 0.6, correct=True), speedup_lo=2.0)
    assert best_turn([stats("r", 0, 0.9), slow, fast]) == fast
    assert best_turn([stats("r", 0, 0.1), stats("r", 1, 0.2)]).turn == 1


def test_trajectory_numbers_are_those_of_whole_rollouts() -> None:
    turns = [
        stats("a", 0, 0.0, "compile_error"),
        stats("b", 0, 0.0, "compile_error"),
        stats("a", 1, 1.0, "", compiled=True, correct=True),
        stats("b", 1, 0.0, "compile_error"),
        stats("b", 2, 0.0, "incorrect", compiled=True),
    ]
    values = training_metrics.version_scalars(turns, per_level=True)
    assert values["multiturn/success_rate"] == 0.5
    assert values["multiturn/avg_turns"] == 2.5
    assert values["multiturn/compile_fix_rate"] == 0.5
    assert values["turn_2/correct_rate"] == 0.5
    assert training_metrics.compile_fix_rate(turns, turn=1) == 1.0
    assert training_metrics.compile_fix_rate(turns[:1]) is None


def test_a_corrector_gets_the_newest_failure_of_another_rollout_of_the_same_problem() -> None:
    made = run()
    group, _ = play(made)
    mine, other = rollout_ids(group, 2)
    for rollout_id, repair in ((mine, "fix mine"), (other, "fix the other")):
        made.do(msgspec.structs.replace(taken(rollout_id, group, 1), repair=repair))
    assert made.failure_of_another(mine, "L1/a") == "fix the other"
    assert made.failure_of_another(other, "L1/a") == "fix mine"
    assert made.failure_of_another(mine, "L1/b") == ""
