"""Evaluation beside training: bounded, in turn, and nothing that training waits for."""

from __future__ import annotations

import msgspec

from kbrl_async.evaluation.rounds import RoundBegun, Rounds, group_of_round, is_round
from kbrl_async.rollouts.buffer.buffer import BufferOptions
from kbrl_async.rollouts.curriculum import CurriculumOptions
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.rollouts.trajectories import TurnTaken, without_tokens
from kbrl_async.rollouts.turns import TurnScore
from kbrl_async.runs.run_state import AFTER, BEFORE, Evaluated, Plan, RolloutEnded, RunState
from protocols.records import Problem
from tests import records
from tests.records import sample

HELDOUT = [Problem(f"L1/{name}", 1, name, "") for name in ("h", "i")]


def stats(reward: float = 0.0) -> RolloutStats:
    return records.stats(reward, "L1/h")


def rounds(every: int = 2, credit: int = 3) -> Rounds:
    return Rounds(HELDOUT, 2, every, credit)


def test_a_round_is_due_at_every_nth_version_once() -> None:
    made = rounds()
    assert [made.due(version) for version in (0, 1, 2, 3)] == [None, None, 2, None]
    made.begin(RoundBegun(2))
    assert made.due(4) is None, "rounds never pile up"
    for rollout in list(made._ids(2)):
        made.take("eval-v2", rollout, stats())
    assert (made.due(2), made.due(4)) == (None, 4)


def test_no_more_rollouts_are_under_way_than_the_credit() -> None:
    made = rounds()
    made.begin(RoundBegun(2))
    first = list(made.wanted())
    assert len(first) == 3
    made.take("eval-v2", first[0], None)
    assert len(made.wanted()) == 3
    assert set(first[1:]) < set(made.wanted())


def test_a_round_ends_with_its_last_rollout_and_late_ends_are_ignored() -> None:
    made = rounds()
    made.begin(RoundBegun(2))
    ids = list(made._ids(2))
    for rollout in ids[:-1]:
        assert made.take("eval-v2", rollout, stats(1.0)) is None
    assert made.take("eval-v0", ids[-1], stats()) is None
    done = made.take("eval-v2", ids[-1], None)
    assert done is not None
    assert (done.version, len(done.results), done.results[-1]) == (2, 4, None)
    assert made.take("eval-v2", ids[-1], stats()) is None


def test_the_best_version_is_that_of_the_highest_mean_reward() -> None:
    made = rounds(every=1, credit=9)
    for version, reward in ((1, 0.2), (2, 0.6), (3, 0.4)):
        made.begin(RoundBegun(version))
        for rollout in list(made._ids(version)):
            made.take(group_of_round(version), rollout, stats(reward))
    assert made.best() == 2
    assert rounds().best() is None


def test_evaluations_before_and_after_are_no_rounds() -> None:
    assert is_round(group_of_round(3))
    assert not is_round(BEFORE)
    assert not is_round(AFTER)


def campaign(every: int) -> RunState:
    options = BufferOptions(groups_per_batch=1, max_batches=3, max_lag=1)
    training = [Problem("L1/a", 1, "a", "")]
    return RunState(Plan(training, HELDOUT, 2, 2, 0, options, CurriculumOptions(), eval_every=every))


def played(every: int, *, rounds_end: bool) -> tuple[RunState, list[object]]:
    """A whole run: what it was asked and what it did, step by step."""
    made, seen, now = campaign(every), [], 0.0
    for rollout in list(made.awaited(BEFORE)):
        made.apply(Evaluated(BEFORE, rollout, stats(), now))
    for _ in range(3):
        change = made.book.admit("L1/a", 1, 2, now)
        made.note(change.event, change.closed)  # type: ignore[arg-type]
        group = change.event.group_id  # type: ignore[union-attr]
        for number in range(2):
            turn = sample(f"{group}.r{number}", float(number), made.book.version)
            made.apply(RolloutEnded(turn.rollout_id, group, stats()))
            change = made.book.scored(group, turn.rollout_id, [turn], now)
            made.note(change.event, change.closed)  # type: ignore[arg-type]
        batch = made.book.poll(now)
        seen.append((made.may_train, msgspec.to_builtins(batch.event), made.book.room()))
        made.note(batch.event, batch.closed)  # type: ignore[arg-type]
        change = made.book.trained(batch.event.batch_id, batch.event.index + 1, now)  # type: ignore[union-attr]
        made.note(change.event, change.closed)  # type: ignore[arg-type]
        if (version := made.rounds.due(made.book.version)) is not None:
            made.apply(RoundBegun(version, now))
        while rounds_end and (wanted := made.rounds.wanted()):
            made.apply(Evaluated(group_of_round(made.rounds.running or 0), next(iter(wanted)), stats(), now))
        seen.append((made.has_trained, made.has_ended))
        now += 1.0
    return made, seen


def test_training_does_the_same_with_no_rounds_with_rounds_and_with_one_that_never_ends() -> None:
    _, without = played(0, rounds_end=False)
    quick, beside = played(1, rounds_end=True)
    stuck, held_up = played(1, rounds_end=False)
    assert without == beside == held_up
    assert [done.version for done in quick.rounds.ended] == [1, 2, 3]
    assert stuck.rounds.running == 1
    for rollout in list(stuck.awaited(AFTER)):
        stuck.apply(Evaluated(AFTER, rollout, stats(), 9.0))
    assert stuck.has_ended, "the run's end waits for no round either"


def test_rollouts_of_rounds_are_no_training_rollouts() -> None:
    quick, _ = played(1, rounds_end=True)
    plain, _ = played(0, rounds_end=False)
    assert quick.counters() == plain.counters()
    turn = TurnTaken(
        "eval-v3.L1/h.0", group_of_round(3), sample("eval-v3.L1/h.0", 0.0, 3), stats(), TurnScore(0.0), "again"
    )
    quick.apply(without_tokens(turn))
    assert quick.scored == plain.scored
