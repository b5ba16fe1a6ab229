"""Evaluation beside training: bounded, in turn, and nothing that training waits for."""

from __future__ import annotations

import msgspec

from kbrl_async.evaluation.heldout import AFTER, BEFORE
from kbrl_async.evaluation.rounds import Rounds, group_of_round, is_round
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.rollouts.trajectories import TurnTaken, without_tokens
from kbrl_async.rollouts.turns import TurnScore
from kbrl_async.runs.commands import AskTurn, Evaluated
from kbrl_async.runs.run_state import RunState
from protocols.records import Problem
from tests import records
from tests.plans import buffer_rules, run_plan
from tests.records import sample

HELDOUT = [Problem(f"L1/{name}", 1, name, "") for name in ("h", "i")]


def stats(reward: float = 0.0) -> RolloutStats:
    return records.stats(reward, "L1/h")


def rounds(every: int = 2, credit: int = 3) -> Rounds:
    return Rounds(HELDOUT, 2, every, credit)


def test_a_round_is_due_at_every_nth_version_once() -> None:
    made = rounds()
    assert [made.due(version) for version in (0, 1, 2, 3)] == [None, None, 2, None]
    made.begin(2)
    assert made.due(4) is None, "rounds never pile up"
    while opened := made.open():
        made.end("eval-v2", next(iter(opened)), stats())
    assert (made.due(2), made.due(4)) == (None, 4)


def test_no_more_rollouts_are_under_way_than_the_credit() -> None:
    made = rounds()
    first = list(made.begin(2))
    assert len(first) == 3
    new, _ = made.end("eval-v2", first[0], None)
    assert len(new) == 1
    assert set(made.open()) == {*first[1:], *new}


def test_a_round_ends_with_its_last_rollout_and_late_ends_are_ignored() -> None:
    made = rounds()
    ids = [*made.begin(2)]
    ids += made.end("eval-v2", ids[0], stats(1.0))[0]
    for rollout in ids[1:-1]:
        assert made.end("eval-v2", rollout, stats(1.0)) == ({}, None)
    assert made.end("eval-v0", ids[-1], stats()) == ({}, None)
    _, done = made.end("eval-v2", ids[-1], None)
    assert done is not None
    assert (done.version, len(done.results), done.results[-1]) == (2, 4, None)
    assert made.end("eval-v2", ids[-1], stats()) == ({}, None)


def test_the_best_version_is_that_of_the_highest_mean_reward() -> None:
    made = rounds(every=1, credit=9)
    for version, reward in ((1, 0.2), (2, 0.6), (3, 0.4)):
        for rollout in list(made.begin(version)):
            made.end(group_of_round(version), rollout, stats(reward))
    assert made.best() == 2
    assert rounds().best() is None


def test_a_round_that_is_restored_goes_on_where_it_was() -> None:
    made, again = rounds(), rounds()
    made.end("eval-v2", next(iter(made.begin(2))), stats(1.0))
    again.restore(made.state())
    assert (again.running, again.open(), again.state()) == (2, made.open(), made.state())


def test_evaluations_before_and_after_are_no_rounds() -> None:
    assert is_round(group_of_round(3))
    assert not is_round(BEFORE)
    assert not is_round(AFTER)


def played(every: int, *, rounds_end: bool) -> tuple[RunState, list[object]]:
    """A whole run: what it was asked and what it did, step by step."""
    rules = buffer_rules(batch_size=1, max_steps=3)
    made = RunState(run_plan([Problem("L1/a", 1, "a", "")], HELDOUT, buffer=rules, eval_every=every))
    seen: list[object] = []
    now = 0.0
    for ask in asked(made, BEFORE):
        made.do(Evaluated(BEFORE, ask.rollout_id, stats(), now))
    for _ in range(3):
        admitted = made.admission(now)
        assert admitted is not None
        made.do(admitted)
        group = admitted.group_id
        for number in range(2):
            turn = sample(f"{group}.r{number}", float(number), made.version)
            for command in made.ended(group, turn.rollout_id, turn, stats(), now):
                made.do(command)
        batch = made.batch_step(now)
        seen.append((made.may_train, msgspec.to_builtins(batch), made.admission(now) is None))
        assert batch is not None
        made.do(batch)
        for command in made.trained(batch.batch_id, batch.index + 1, {}, "", now):  # type: ignore[union-attr]
            made.do(command)
        if (begun := made.round_due(now)) is not None:
            made.do(begun)
        seen.append((made.has_trained, made.has_ended))
        while rounds_end and (wanted := [ask for ask in asked(made) if is_round(ask.group_id)]):
            made.do(Evaluated(wanted[0].group_id, wanted[0].rollout_id, stats(), now))
        now += 1.0
    return made, seen


def asked(made: RunState, group_id: str | None = None) -> list[AskTurn]:
    found = [effect for effect in made.open_work() if isinstance(effect, AskTurn)]
    return [ask for ask in found if group_id in (None, ask.group_id)]


def test_training_does_the_same_with_no_rounds_with_rounds_and_with_one_that_never_ends() -> None:
    _, without = played(0, rounds_end=False)
    quick, beside = played(1, rounds_end=True)
    stuck, held_up = played(1, rounds_end=False)
    assert without == beside == held_up
    assert [done.version for done in quick.rounds_ended] == [1, 2]
    assert not stuck.rounds_ended
    for ask in asked(stuck, AFTER):
        stuck.do(Evaluated(AFTER, ask.rollout_id, stats(), 9.0))
    assert stuck.has_ended, "the run's end waits for no round either"


def test_rollouts_of_rounds_are_no_training_rollouts() -> None:
    quick, _ = played(1, rounds_end=True)
    plain, _ = played(0, rounds_end=False)
    assert quick.counters() == plain.counters()
    turn = TurnTaken(
        "eval-v3.L1/h.0", group_of_round(3), sample("eval-v3.L1/h.0", 0.0, 3), stats(), TurnScore(0.0), "again"
    )
    quick.do(without_tokens(turn))
    assert quick.turns_scored == plain.turns_scored
