"""Rollouts of several turns in the campaign: one sample a turn, replayed after a crash, forgotten when they end."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kbrl_async.rollouts.buffer.buffer import BufferOptions, rollout_ids
from kbrl_async.rollouts.turns import TurnOptions, TurnScore, with_returns
from kbrl_async.runs.telemetry import training_metrics
from kbrl_async.runs.telemetry.training_metrics import RolloutStats
from protocols.records import Problem, TrainSample
from services.reward_aggregator.journal import Journal
from services.reward_aggregator.run_state import BEFORE, Entry, Plan, RolloutEnded, RunState
from services.rollouts.trajectories import TurnTaken, best_turn, without_tokens
from tests import records


def stats(rollout_id: str, turn: int, reward: float = 0.0, fault: str = "", **more: bool) -> RolloutStats:
    return records.stats(reward, turn=turn, rollout_id=rollout_id, fault=fault, **more)


def sample(rollout_id: str, turn: int, reward: float) -> TrainSample:
    return records.sample(rollout_id, reward, turn=turn)


def taken(rollout_id: str, group: str, turn: int, reward: float = 0.0) -> TurnTaken:
    return TurnTaken(
        rollout_id, group, sample(rollout_id, turn, reward), stats(rollout_id, turn, reward), TurnScore(reward), "next"
    )


def campaign() -> RunState:
    book = BufferOptions(groups_per_batch=1, max_batches=1, max_lag=0)
    return RunState(Plan([Problem("L1/a", 1, "a", "")], [], 0, 2, 0, book))


def play(made: RunState) -> tuple[str, list[Entry]]:
    """One group of two rollouts with two turns each, up to the last turn's end."""
    admitted = made.book.admit("L1/a", 1, 2, 0.0)
    made.note(admitted.event, admitted.closed)  # type: ignore[arg-type]
    group = admitted.event.group_id  # type: ignore[union-attr]
    entries: list[Entry] = [admitted.event]  # type: ignore[list-item]
    for number, rollout_id in enumerate(rollout_ids(group, 2)):
        first = taken(rollout_id, group, 0, 0.1 * number)
        made.apply(first)
        entries.append(first)
    return group, entries


def end(made: RunState, group: str) -> list[Entry]:
    entries: list[Entry] = []
    for number, rollout_id in enumerate(rollout_ids(group, 2)):
        turns = [*(t.sample for t in made.dialogues.turns(rollout_id)), sample(rollout_id, 1, float(number))]
        change = made.book.scored(group, rollout_id, with_returns(turns, TurnOptions(2, gamma=0.5)), 1.0)
        ended = RolloutEnded(rollout_id, group, stats(rollout_id, 1, float(number)))
        made.apply(ended)
        made.note(change.event, change.closed)  # type: ignore[arg-type]
        entries += [ended, change.event]  # type: ignore[list-item]
    return entries


def test_each_turn_is_a_sample_with_its_own_return_and_advantage() -> None:
    made = campaign()
    group, _ = play(made)
    end(made, group)
    batch = made.book.poll(2.0).event
    (trained,) = made.book.train_groups(batch.batch_id)  # type: ignore[union-attr]
    by_turn = {(s.rollout_id, s.turn): s for s in trained.samples}
    assert by_turn[f"{group}.r1", 0].reward == 0.1 + 0.5 * 1.0
    first_turns = [by_turn[f"{group}.r{i}", 0].advantage for i in (0, 1)]
    assert first_turns[1] > 0 > first_turns[0]
    assert len(made.batch_stats(batch)) == 4  # type: ignore[arg-type]


def test_a_restart_in_the_middle_of_a_rollout_asks_for_the_same_next_turn(tmp_path: Path) -> None:
    made = campaign()
    group, entries = play(made)
    with Journal(tmp_path / "j") as journal:
        journal.append(entries)
        again = campaign()
        for entry in journal.entries():
            again.apply(entry)
    rollout_id = f"{group}.r1"
    assert again.book.open_rollouts() == {group: rollout_ids(group, 2)}
    assert [t.prompt for t in again.dialogues.turns(rollout_id)] == ["next"]
    assert again.state() == made.state()


def test_a_finished_rollout_leaves_no_dialogue_behind() -> None:
    made = campaign()
    group, _ = play(made)
    assert len(made.dialogues) == 2
    end(made, group)
    assert len(made.dialogues) == 0


def test_a_group_that_ends_early_takes_its_dialogues_along() -> None:
    made = campaign()
    play(made)
    change = made.book.finish(3.0)
    made.note(change.event, change.closed)  # type: ignore[arg-type]
    assert len(made.dialogues) == 0


def test_an_ended_group_keeps_no_tokens_and_no_prompts_of_its_turns() -> None:
    bare = without_tokens(taken("r", "g", 0, 0.5))
    assert (bare.sample.token_ids, bare.sample.prompt_ids, bare.prompt) == ([], [], "")
    assert without_tokens(taken("r", "g", 0), keep_prompt=True).prompt == "next"


def test_turns_of_an_evaluation_are_no_training_rollouts() -> None:
    made = campaign()
    made.apply(taken("eval.r", BEFORE, 0))
    assert made.scored == 0
    assert len(made.dialogues.turns("eval.r")) == 1


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
    values = training_metrics.scalars(turns)
    assert values["trajectory/success_rate"] == 0.5
    assert values["trajectory/avg_turns"] == 2.5
    assert values["trajectory/compile_fix_rate"] == 0.5
    assert values["turn_2/correct_rate"] == 0.5
    assert training_metrics.compile_fix_rate(turns, turn=1) == 1.0
    assert training_metrics.compile_fix_rate(turns[:1]) is None


def test_a_corrector_gets_the_newest_failure_of_another_rollout_of_the_same_problem() -> None:
    made = campaign()
    group, _ = play(made)
    mine, other = rollout_ids(group, 2)
    for rollout_id, repair in ((mine, "fix mine"), (other, "fix the other")):
        made.apply(msgspec.structs.replace(taken(rollout_id, group, 1), repair=repair))
    assert made.dialogues.failure_of_another(mine, "L1/a") == "fix the other"
    assert made.dialogues.failure_of_another(other, "L1/a") == "fix mine"
    assert made.dialogues.failure_of_another(mine, "L1/b") == ""
