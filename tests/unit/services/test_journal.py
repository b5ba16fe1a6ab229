"""The aggregator's journal stays small and loses nothing: compacted, killed in the middle, opened again."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kbrl_async.errors import DiskFull
from kbrl_async.rollouts.buffer.buffer import rollout_ids
from kbrl_async.rollouts.buffer.events import BatchMade
from kbrl_async.rollouts.settings import Curriculum
from kbrl_async.rollouts.trajectories import TurnTaken
from kbrl_async.rollouts.turns import TurnScore
from kbrl_async.runs.archive.history import history_of
from kbrl_async.runs.commands import (
    AskTurn,
    Command,
    Effect,
    Evaluated,
    RolloutEnded,
    SendBatch,
    Watched,
    closed_in,
    without_tokens,
)
from kbrl_async.runs.run_journal import RunJournal
from kbrl_async.runs.run_memory import RunPlan
from kbrl_async.runs.run_state import RunState
from protocols.records import Problem, Purpose, TrainSample
from tests.databases import connections, pages
from tests.plans import alarms, buffer_rules, run_plan
from tests.records import stats

GROUP = 3
TINY = 1500
"""Bytes of entries from which on a compaction is due here."""


def plan() -> RunPlan:
    problems = [Problem(f"L1/{name}", 1, name, "") for name in "abcd"]
    return run_plan(
        problems,
        [Problem("L1/h", 1, "h", "")],
        group_size=GROUP,
        eval_samples=1,
        eval_every=2,
        buffer=buffer_rules(max_steps=10_000, max_staleness=2, bench_after=1, advantage="running_mean"),
        curriculum=Curriculum(kind="learnable", window=1),
        alarms=alarms(ess_below=0.5),
    )


class Life:
    """A run that does at random what runs do; each step is journaled as the aggregator would."""

    def __init__(self, journal: RunJournal, seed: int, state: RunState | None = None) -> None:
        self.state = state or RunState(plan())
        self.journal, self.rng = journal, random.Random(seed)
        self.told: list[Command] = []
        self.now = self.state.clock

    def step(self) -> None:
        self.now += 1.0
        self.rng.choice(
            [self._admit, self._rollout, self._rollout, self._rollout, self._poll, self._answer, self._round]
        )()

    def _do(self, *commands: Command | None) -> None:
        done = [command for command in commands if command is not None]
        effects: list[Effect] = [effect for command in done for effect in self.state.do(command)]
        self.journal.append(done, [group.group_id for group in closed_in(effects)])
        self.told += done

    def _admit(self) -> None:
        self._do(self.state.admission(self.now))

    def asked(self, purpose: Purpose) -> list[AskTurn]:
        return [e for e in self.state.open_work() if isinstance(e, AskTurn) and e.purpose is purpose]

    def _rollout(self) -> None:
        waiting = self.asked(Purpose.TRAIN)
        if not waiting:
            return self._admit()
        rollout, group, problem, _ = self.rng.choice(waiting)
        turn = len(self.state.turns(rollout))
        sample = TrainSample(rollout, [1, 2], [3] * 20, [-0.1] * 20, 0.0, self.rng.random(), self._version(), turn)
        kept = "kernels/k.py" if self.rng.random() < 0.1 else ""
        lo = self.rng.random()
        ended = stats(sample.reward, problem.problem_id, file=kept, speedup_lo=lo, turn=turn, rollout_id=rollout)
        if self.rng.random() < 0.1:
            return self._do(self.state.lost(group, rollout, "worker_lost", self.now))
        if turn == 0 and self.rng.random() < 0.3:
            return self._do(TurnTaken(rollout, group, sample, ended, TurnScore(0.0), "next", self.now, repair="mend"))
        return self._do(*self.state.ended(group, rollout, sample, ended, self.now))

    def _version(self) -> int:
        return max(0, self.state.version - self.rng.randint(0, 1))

    def _poll(self) -> None:
        self._do(self.state.batch_step(self.now))

    def _answer(self) -> None:
        for batch in outstanding(self.state)[:1]:
            failure = "nan" if self.rng.random() < 0.2 else ""
            metrics = {"ess": self.rng.random()}
            self._do(*self.state.trained(batch.batch_id, batch.index + 1, metrics, failure, self.now))

    def _round(self) -> None:
        if (begun := self.state.round_due(self.now)) is not None:
            self._do(begun)
        elif asked := self.asked(Purpose.EVAL):
            found = stats(0.5, "L1/h") if asked[0].group_id == "eval-before" else None
            self._do(Evaluated(asked[0].group_id, asked[0].rollout_id, found, self.now))


def outstanding(state: RunState) -> list[BatchMade]:
    return [effect.batch for effect in state.open_work() if isinstance(effect, SendBatch)]


def opened(path: Path) -> Iterator[RunJournal]:
    with RunJournal(path, TINY) as journal:
        yield journal


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[RunJournal]:
    yield from opened(tmp_path / "aggregator.sqlite")


def written(state: RunState) -> object:
    """Everything that a run knows, but for kernels to repair: those of ended groups may be forgotten."""
    known = msgspec.msgpack.decode(msgspec.msgpack.encode(state.snapshot()))
    return known | {"dialogues": known["dialogues"]["turns"]}


def size(state: RunState) -> int:
    return len(msgspec.msgpack.encode(state.snapshot()))


def loaded(path: Path) -> RunState:
    state = RunState(plan())
    with RunJournal(path, TINY) as journal:
        journal.load(state)
    return state


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_is_compacted_again_and_again_is_the_one_that_never_was(tmp_path: Path, seed: int) -> None:
    path, compactions = tmp_path / "aggregator.sqlite", 0
    with RunJournal(path, TINY) as journal:
        life = Life(journal, seed)
        for _ in range(300):
            life.step()
            compactions += journal.is_due
            journal.compact_if_due(life.state)
    assert compactions > 3
    assert written(loaded(path)) == written(life.state)
    plain = RunState(plan())
    for entry in life.told:
        plain.do(entry)
    assert written(plain) == written(life.state)
    assert plain.counters() == life.state.counters()


def test_a_run_from_a_compacted_journal_goes_on_like_the_one_that_never_stopped(tmp_path: Path) -> None:
    with RunJournal(tmp_path / "a.sqlite", TINY) as one, RunJournal(tmp_path / "b.sqlite", TINY) as other:
        life = Life(one, 3)
        for _ in range(300):
            life.step()
            one.compact_if_due(life.state)
        again = Life(other, 99, loaded(tmp_path / "a.sqlite"))
        life.rng, again.now, begun = random.Random(99), life.now, len(life.told)
        for _ in range(200):
            life.step()
            again.step()
        assert again.told == life.told[begun:]


def test_the_history_has_every_entry_once_in_order_whatever_was_compacted(journal: RunJournal) -> None:
    life = Life(journal, 1)
    for step in range(300):
        life.step()
        if step % 70 == 0:
            journal.compact(b"")
    assert [without_tokens(e) for e in journal.history()] == [without_tokens(e) for e in life.told]
    scored = sum(isinstance(e, RolloutEnded | TurnTaken) for e in life.told)
    answers = journal.answers()
    assert len(answers.listed) == scored == life.state.turns_scored
    assert answers.unfinished.keys() == {ask.group_id for ask in life.asked(Purpose.TRAIN)}


def test_the_journal_is_as_large_as_what_is_open_however_long_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = connections(monkeypatch)
    monkeypatch.setattr("kbrl_async.runs.run_memory.KEPT_ENDS", 8)
    monkeypatch.setattr("kbrl_async.rollouts.buffer.buffer.REMEMBERED", 8)
    path = tmp_path / "aggregator.sqlite"
    sizes, states = [], []
    with RunJournal(path, TINY) as journal:
        life = Life(journal, 2)
        for _ in range(1800):
            life.step()
            journal.compact_if_due(life.state)
            sizes.append(pages(made[0]))
            states.append(size(life.state))
    early, late = slice(900, 1200), slice(1500, None)
    assert max(sizes[late]) <= max(sizes[early]) * 1.3
    assert max(states[late]) <= max(states[early]) * 1.3, "the run's own memory must not grow either"
    assert history_of(path).stat().st_size > 0


def snapshots(db: sqlite3.Connection, folder: Path, path: Path) -> list[Path]:
    """From now on the files are copied before each statement: what a kill at that point would leave."""
    copies: list[Path] = []

    def copy(_statement: str) -> None:
        target = folder / f"crash-{len(copies)}"
        target.mkdir()
        for file in path.parent.glob(f"{path.stem}*"):
            shutil.copy(file, target / file.name)
        copies.append(target)

    db.set_trace_callback(copy)
    return copies


def test_a_kill_at_any_point_of_a_compaction_loses_nothing_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = connections(monkeypatch)
    path = tmp_path / "run" / "aggregator.sqlite"
    path.parent.mkdir()
    with RunJournal(path, TINY) as journal:
        life = Life(journal, 4)
        for _ in range(120):
            life.step()
        db = made[0]
        copies = snapshots(db, tmp_path, path)
        for _ in range(2):
            journal.compact(msgspec.msgpack.encode(life.state.snapshot()))
            life.step()
        db.set_trace_callback(None)
    assert len(copies) >= 10
    told = [without_tokens(entry) for entry in life.told]
    lengths = set()
    for copy in copies:
        with RunJournal(copy / path.name, TINY) as journal:
            history = [without_tokens(entry) for entry in journal.history()]
            assert history == told[: len(history)]
            lengths.add(len(history))
            state = RunState(plan())
            journal.load(state)
            same = RunState(plan())
            for entry in life.told[: len(history)]:
                same.do(entry)
            assert written(state) == written(same), copy.name
            journal.compact(msgspec.msgpack.encode(state.snapshot()))
            assert [without_tokens(entry) for entry in journal.history()] == history, "compacting again doubles nothing"
    assert min(lengths) >= 120 - 60


def test_a_reader_beside_a_compaction_sees_every_entry_once(journal: RunJournal, tmp_path: Path) -> None:
    life = Life(journal, 5)
    for _ in range(60):
        life.step()
    reading = journal.history()
    first = next(reading)
    journal.compact(b"")
    assert [without_tokens(e) for e in [first, *reading]] == [without_tokens(e) for e in life.told]


def test_a_full_disk_leaves_the_journal_as_it_was_and_it_goes_on_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = connections(monkeypatch)
    with RunJournal(tmp_path / "aggregator.sqlite") as journal:
        check_a_full_disk(journal, made[0])


def check_a_full_disk(journal: RunJournal, db: sqlite3.Connection) -> None:
    life = Life(journal, 6)
    for _ in range(60):
        life.step()
    before = list(journal.entries())
    (size,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count={size}")
    bulk = [RolloutEnded("r" * 9000, "g", stats()) for _ in range(40)]
    with pytest.raises(DiskFull, match=r"aggregator\.sqlite can't grow.*Free some space"):
        journal.append(bulk)
    assert list(journal.entries()) == before
    db.execute("PRAGMA max_page_count=1000000")
    for _ in range(20):
        life.step()
    assert [without_tokens(e) for e in journal.entries()] == [without_tokens(e) for e in life.told]
    assert len(life.told) > len(before)


def test_a_history_that_can_not_be_written_stops_the_compaction_before_the_journal_lets_go(
    journal: RunJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(journal, 7)
    for _ in range(60):
        life.step()

    def refused(*_: object) -> None:
        raise DiskFull("history can't grow", "Free some space")

    monkeypatch.setattr("kbrl_async.runs.archive.journal.pack", refused)
    with pytest.raises(DiskFull):
        journal.compact(b"state")
    assert journal.state() is None
    assert len(list(journal.entries())) == len(life.told)


def test_a_journal_of_a_version_before_compaction_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "aggregator.sqlite"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE entries (id INTEGER PRIMARY KEY, group_id TEXT NOT NULL, entry BLOB NOT NULL)")
    entry = Watched(1, {"ess": 1.0}, 2.0)
    db.execute("INSERT INTO entries (group_id, entry) VALUES ('', ?)", (msgspec.msgpack.encode(entry),))
    db.commit()
    db.close()
    with RunJournal(path) as journal:
        journal.append([Watched(2, {"ess": 1.0}, 3.0)])
        assert [e.version for e in journal.history()] == [1, 2]  # type: ignore[union-attr]


def test_batches_that_are_under_way_survive_a_compaction_with_their_tokens(tmp_path: Path) -> None:
    path = tmp_path / "aggregator.sqlite"
    with RunJournal(path, TINY) as journal:
        life, made = Life(journal, 8), None
        while not isinstance(made, BatchMade):
            life.step()
            made = next(iter(outstanding(life.state)), None)
        expected = life.state.train_groups(made.batch_id)
        journal.compact(msgspec.msgpack.encode(life.state.snapshot()))
    again = loaded(path)
    assert again.train_groups(made.batch_id) == expected
    assert all(rollout_ids(group.group_id, GROUP) for group in expected)
