"""The evaluator's course: every sample ends once, few are under way, deadlines, and replay."""

from __future__ import annotations

from pathlib import Path

from kbrl_async.evaluation.course import AskAnswer, Begun, Command, Course, Ended, Expired, Tried
from kbrl_async.kernels.funnel.result import Result
from kbrl_async.rollouts.trajectories import TurnTaken, without_tokens
from kbrl_async.rollouts.turns import TurnScore
from kbrl_async.runs.archive.journal import EntryJournal
from protocols.records import Fault, Problem, StageReport, Verdict
from tests.records import sample, stats, timing

PROBLEMS = [Problem(f"L1/{n}_p{n}", 1, f"{n}_p{n}", "class Model: ...") for n in (1, 2, 3)]
COMPILED = (StageReport("compile", Fault.OK, 0.1),)


def course(samples: int = 2, in_flight: int = 4, deadline_s: float = 100.0) -> Course:
    return Course(PROBLEMS, samples, in_flight, deadline_s)


def tried(rollout_id: str, speedup: float | None = None, at: float = 1.0, source: str = "kernel") -> Tried:
    fault = Fault.INCORRECT if speedup is None else Fault.OK
    result = Result("", "c", "cpu", Verdict(fault), COMPILED, None if speedup is None else timing(speedup))
    found = stats(speedup or 0.0, "", correct=speedup is not None, speedup_lo=speedup, compiled=True)
    return Tried(rollout_id, found, result, source, at)


def taken(rollout_id: str) -> TurnTaken:
    turn = TurnTaken(rollout_id, "g", sample(rollout_id), stats(problem_id=""), TurnScore(0.0), "again")
    return without_tokens(turn)


def begin_all(made: Course, now: float = 0.0) -> list[Command]:
    begun = made.due(now)
    assert isinstance(begun, Begun)
    made.do(begun)
    assert made.due(now) is None
    return [begun]


def test_no_more_samples_are_under_way_than_allowed() -> None:
    made = course()
    begin_all(made)
    assert len(made.open) == 4
    made.do(tried("eval.L1/1_p1.0", 2.0))
    assert made.do(Ended("eval.L1/1_p1.0", 1.0)) == [], "a problem begins whole"
    asked = made.do(Ended("eval.L1/1_p1.1", 1.0, "worker_lost"))
    assert asked == [AskAnswer(f"eval.L1/3_p3.{sample}", PROBLEMS[2]) for sample in range(2)]


def test_a_journal_that_says_of_every_problem_when_it_began_is_read_on() -> None:
    """As older evaluators wrote it."""
    made = course()
    for problem in PROBLEMS[:2]:
        made.do(Begun(problem.problem_id, 1.0))
    for rollout in list(made.open)[:2]:
        made.do(Ended(rollout, 2.0, "lost"))
    assert made.do(Begun(PROBLEMS[2].problem_id, 2.1)) == []
    assert {p.problem_id for p in made.open.values()} == {"L1/2_p2", "L1/3_p3"}


def test_a_problem_with_more_samples_than_are_allowed_begins_all_the_same() -> None:
    made = course(samples=9, in_flight=4)
    begin_all(made)
    assert len(made.open) == 9


def test_lost_samples_are_in_no_figure_and_expired_ones_are_wrong() -> None:
    made = course()
    begin_all(made)
    made.do(Ended("eval.L1/1_p1.0", 1.0, "worker_lost"))
    made.do(Expired("L1/1_p1", 101.0))
    assert made.lost == {"eval.L1/1_p1.0": "worker_lost"}
    kept = made.kept["eval.L1/1_p1.1"]
    assert (kept.sample.correct, kept.sample.expired, kept.sample.fault) == (False, True, "expired")
    assert kept.outcome.result is not None
    assert kept.outcome.result.fault is Fault.TIMEOUT


def test_only_what_is_late_and_open_expires() -> None:
    made = course(deadline_s=10.0)
    begin_all(made, now=0.0)
    assert made.due(9.9) is None
    for rollout in [key for key in made.open if "1_p1" in key]:
        made.do(Ended(rollout, 5.0, "lost"))
    assert made.due(10.0) == Expired("L1/2_p2", 10.0)


def test_the_best_turn_counts_with_its_own_kernel() -> None:
    made = course()
    begin_all(made)
    rollout = "eval.L1/1_p1.0"
    for speedup, source in ((1.5, "fine"), (3.0, "best"), (None, "broken")):
        made.do(tried(rollout, speedup, source=source))
        made.do(taken(rollout))
    assert len(made.turns(rollout)) == 3
    made.do(Ended(rollout, 2.0, "worker_lost"))
    kept = made.kept[rollout]
    assert (kept.source, kept.sample.speedup(), kept.sample.turns) == ("best", 3.0, 3)
    assert rollout not in made.lost, "the turns before the loss count"


def test_a_late_copy_of_an_end_changes_nothing() -> None:
    made = course()
    begin_all(made)
    rollout = "eval.L1/1_p1.0"
    made.do(tried(rollout, 2.0))
    made.do(Ended(rollout, 1.0))
    for late in (tried(rollout, 9.0), taken(rollout), Ended(rollout, 2.0, "lost"), Expired("L1/1_p1", 3.0)):
        made.do(late)
    assert made.kept[rollout].sample.speedup() == 2.0
    assert made.done == 2, "the deadline ended the other sample"


def test_the_journal_gives_the_same_course_again(tmp_path: Path) -> None:
    made = course()
    entries = begin_all(made)
    more: list[Command] = [
        tried("eval.L1/1_p1.0", 2.0),
        Ended("eval.L1/1_p1.0", 4.0),
        tried("eval.L1/1_p1.1"),
        taken("eval.L1/1_p1.1"),
        Expired("L1/2_p2", 50.0),
    ]
    for entry in more:
        made.do(entry)
    with EntryJournal[Command](tmp_path / "j.sqlite", Command) as journal:
        journal.append([*entries, *more])
    again = course()
    with EntryJournal[Command](tmp_path / "j.sqlite", Command) as journal:
        for entry in journal.entries():
            again.do(entry)
    assert again.kept == made.kept
    assert again.open == made.open
    assert (again.clock, len(again.turns("eval.L1/1_p1.1"))) == (50.0, 1)


def test_it_ends_when_every_sample_has() -> None:
    made = course(in_flight=99)
    begin_all(made)
    for problem in PROBLEMS:
        assert not made.has_ended
        made.do(Expired(problem.problem_id, 1.0))
    assert made.has_ended
    assert made.done == made.total == 6
