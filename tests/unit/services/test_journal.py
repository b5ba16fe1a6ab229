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
from kbrl_async.rollouts.alarms import AlarmOptions
from kbrl_async.rollouts.buffer.buffer import BufferOptions, rollout_ids
from kbrl_async.rollouts.buffer.events import BatchMade, Change
from kbrl_async.rollouts.curriculum import CurriculumOptions
from kbrl_async.rollouts.turns import TurnScore
from kbrl_async.runs.archive.history import history_of
from protocols.records import Problem, TrainSample
from services.reward_aggregator.journal import Journal
from services.reward_aggregator.rounds import RoundBegun, group_of_round
from services.reward_aggregator.run_state import (
    BEFORE,
    Entry,
    Evaluated,
    Plan,
    RolloutEnded,
    RunState,
    Watched,
    without_tokens,
)
from services.rollouts.trajectories import TurnTaken
from tests.records import stats

GROUP = 3
TINY = 1500
"""Bytes of entries from which on a compaction is due here."""


def plan() -> Plan:
    book = BufferOptions(groups_per_batch=2, max_batches=10_000, max_lag=2, bench_after=1, baseline="running_mean")
    problems = [Problem(f"L1/{name}", 1, name, "") for name in "abcd"]
    held = [Problem("L1/h", 1, "h", "")]
    curriculum = CurriculumOptions(kind="learnable", window=1)
    return Plan(problems, held, 1, GROUP, 0, book, curriculum, eval_every=2, alarms=AlarmOptions(ess_below=0.5))


class Life:
    """A campaign that does at random what campaigns do; each step is journaled as the aggregator would."""

    def __init__(self, journal: Journal, seed: int, campaign: RunState | None = None) -> None:
        self.campaign = campaign or RunState(plan())
        self.journal, self.rng = journal, random.Random(seed)
        self.told: list[Entry] = []
        self.now = self.campaign.clock

    def step(self) -> None:
        self.now += 1.0
        self.rng.choice(
            [self._admit, self._rollout, self._rollout, self._rollout, self._poll, self._answer, self._round]
        )()

    def _write(self, entries: list[Entry], ended: list[str] | None = None) -> None:
        self.journal.append(entries, ended or [])
        self.told += entries

    def _change(self, change: Change, *more: Entry) -> None:
        if change.event is None:
            return
        for entry in more:
            self.campaign.apply(entry)
        self.campaign.note(change.event, change.closed)
        self._write([*more, change.event], [group.group_id for group in change.closed])

    def _admit(self) -> None:
        problem = self.campaign.next_problem(self.now)
        self._change(self.campaign.book.admit(problem.problem_id, 1, GROUP, self.now))

    def _rollout(self) -> None:
        waiting = [(g, r) for g, rollouts in self.campaign.book.open_rollouts().items() for r in rollouts]
        if not waiting:
            return self._admit()
        group, rollout = self.rng.choice(waiting)
        turn = len(self.campaign.dialogues.turns(rollout))
        sample = TrainSample(rollout, [1, 2], [3] * 20, [-0.1] * 20, 0.0, self.rng.random(), self._version(), turn)
        kept = "kernels/k.py" if self.rng.random() < 0.1 else ""
        problem_id, lo = self.campaign.book.group_problem(group), self.rng.random()
        ended = stats(sample.reward, problem_id, file=kept, speedup_lo=lo, turn=turn, rollout_id=rollout)
        if self.rng.random() < 0.1:
            return self._change(self.campaign.book.lost(group, rollout, "worker_lost", self.now))
        if turn == 0 and self.rng.random() < 0.3:
            taken = TurnTaken(rollout, group, sample, ended, TurnScore(0.0), "next", self.now, repair="mend it")
            self.campaign.apply(taken)
            return self._write([taken])
        samples = [*(t.sample for t in self.campaign.dialogues.turns(rollout)), sample]
        return self._change(
            self.campaign.book.scored(group, rollout, samples, self.now), RolloutEnded(rollout, group, ended)
        )

    def _version(self) -> int:
        return max(0, self.campaign.book.version - self.rng.randint(0, 1))

    def _poll(self) -> None:
        self._change(self.campaign.book.poll(self.now))

    def _answer(self) -> None:
        for batch in self.campaign.book.outstanding()[:1]:
            if self.rng.random() < 0.2:
                return self._change(self.campaign.book.batch_failed(batch.batch_id, "nonfinite", self.now))
            metrics = {"ess": self.rng.random(), "nonfinite": 0.0}
            seen = Watched(batch.index + 1, metrics, self.now)
            return self._change(self.campaign.book.trained(batch.batch_id, batch.index + 1, self.now), seen)
        return None

    def _round(self) -> None:
        rounds = self.campaign.rounds
        entry: Entry | None = None
        if (version := rounds.due(self.campaign.book.version)) is not None:
            entry = RoundBegun(version, self.now)
        elif wanted := list(self.campaign.awaited(BEFORE)):
            entry = Evaluated(BEFORE, wanted[0], stats(0.5, "L1/h"), self.now)
        elif asked := list(rounds.wanted()):
            entry = Evaluated(group_of_round(rounds.running or 0), asked[0], None, self.now)
        if entry is not None:
            self.campaign.apply(entry)
            self._write([entry])


def opened(path: Path) -> Iterator[Journal]:
    with Journal(path, TINY) as journal:
        yield journal


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    yield from opened(tmp_path / "aggregator.sqlite")


def written(campaign: RunState) -> object:
    """Everything that a campaign knows, but for kernels to repair: those of ended groups may be forgotten."""
    known = msgspec.msgpack.decode(msgspec.msgpack.encode(campaign.state()))
    return known | {"dialogues": known["dialogues"]["turns"]}


def size(campaign: RunState) -> int:
    return len(msgspec.msgpack.encode(campaign.state()))


def loaded(path: Path) -> RunState:
    campaign = RunState(plan())
    with Journal(path, TINY) as journal:
        journal.load(campaign)
    return campaign


@pytest.mark.parametrize("seed", range(4))
def test_a_campaign_that_is_compacted_again_and_again_is_the_one_that_never_was(tmp_path: Path, seed: int) -> None:
    path, compactions = tmp_path / "aggregator.sqlite", 0
    with Journal(path, TINY) as journal:
        life = Life(journal, seed)
        for _ in range(300):
            life.step()
            compactions += journal.is_due
            journal.compact_if_due(life.campaign)
    assert compactions > 3
    assert written(loaded(path)) == written(life.campaign)
    plain = RunState(plan())
    for entry in life.told:
        plain.apply(entry)
    assert written(plain) == written(life.campaign)
    plain.book.check()


def test_a_campaign_from_a_compacted_journal_goes_on_like_the_one_that_never_stopped(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.sqlite", TINY) as one, Journal(tmp_path / "b.sqlite", TINY) as other:
        life = Life(one, 3)
        for _ in range(300):
            life.step()
            one.compact_if_due(life.campaign)
        again = Life(other, 99, loaded(tmp_path / "a.sqlite"))
        life.rng, again.now, begun = random.Random(99), life.now, len(life.told)
        for _ in range(200):
            life.step()
            again.step()
        assert again.told == life.told[begun:]


def test_the_history_has_every_entry_once_in_order_whatever_was_compacted(journal: Journal) -> None:
    life = Life(journal, 1)
    for step in range(300):
        life.step()
        if step % 70 == 0:
            journal.compact(b"")
    assert [without_tokens(e) for e in journal.history()] == [without_tokens(e) for e in life.told]
    scored = sum(isinstance(e, RolloutEnded | TurnTaken) for e in life.told)
    answers = journal.answers()
    assert len(answers.listed) == scored == life.campaign.scored
    assert answers.unfinished.keys() == life.campaign.book.open_rollouts().keys()


def test_the_journal_is_as_large_as_what_is_open_however_long_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.reward_aggregator.run_state.KEPT_ENDS", 8)
    path = tmp_path / "aggregator.sqlite"
    pages, states = [], []
    with Journal(path, TINY) as journal:
        life = Life(journal, 2)
        for _ in range(1200):
            life.step()
            journal.compact_if_due(life.campaign)
            pages.append(journal._db.execute("PRAGMA page_count").fetchone()[0])
            states.append(size(life.campaign))
    early, late = slice(200, 500), slice(900, None)
    assert max(pages[late]) <= max(pages[early]) * 1.3
    assert max(states[late]) <= max(states[early]) * 1.3, "the campaign's own memory must not grow either"
    assert history_of(path).stat().st_size > 0


def snapshots(journal: Journal, folder: Path, path: Path) -> list[Path]:
    """From now on the files are copied before each statement: what a kill at that point would leave."""
    copies: list[Path] = []

    def copy(_statement: str) -> None:
        target = folder / f"crash-{len(copies)}"
        target.mkdir()
        for file in path.parent.glob(f"{path.stem}*"):
            shutil.copy(file, target / file.name)
        copies.append(target)

    journal._db.set_trace_callback(copy)
    return copies


def test_a_kill_at_any_point_of_a_compaction_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run" / "aggregator.sqlite"
    path.parent.mkdir()
    with Journal(path, TINY) as journal:
        life = Life(journal, 4)
        for _ in range(120):
            life.step()
        copies = snapshots(journal, tmp_path, path)
        for _ in range(2):
            journal.compact(msgspec.msgpack.encode(life.campaign.state()))
            life.step()
        journal._db.set_trace_callback(None)
    assert len(copies) >= 10
    told = [without_tokens(entry) for entry in life.told]
    lengths = set()
    for copy in copies:
        with Journal(copy / path.name, TINY) as journal:
            history = [without_tokens(entry) for entry in journal.history()]
            assert history == told[: len(history)]
            lengths.add(len(history))
            campaign = RunState(plan())
            journal.load(campaign)
            same = RunState(plan())
            for entry in life.told[: len(history)]:
                same.apply(entry)
            assert written(campaign) == written(same), copy.name
            journal.compact(msgspec.msgpack.encode(campaign.state()))
            assert [without_tokens(entry) for entry in journal.history()] == history, "compacting again doubles nothing"
    assert min(lengths) >= 120 - 60


def test_a_reader_beside_a_compaction_sees_every_entry_once(journal: Journal, tmp_path: Path) -> None:
    life = Life(journal, 5)
    for _ in range(60):
        life.step()
    reading = journal.history()
    first = next(reading)
    journal.compact(b"")
    assert [without_tokens(e) for e in [first, *reading]] == [without_tokens(e) for e in life.told]


def test_a_full_disk_leaves_the_journal_as_it_was_and_it_goes_on_once_there_is_room(journal: Journal) -> None:
    life = Life(journal, 6)
    for _ in range(60):
        life.step()
    before = list(journal.entries())
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count={pages}")
    bulk = [RolloutEnded("r" * 9000, "g", stats()) for _ in range(40)]
    with pytest.raises(DiskFull, match=r"aggregator\.sqlite can't grow.*Free some space"):
        journal.append(bulk)
    assert list(journal.entries()) == before
    journal._db.execute("PRAGMA max_page_count=1000000")
    for _ in range(20):
        life.step()
    assert [without_tokens(e) for e in journal.entries()] == [without_tokens(e) for e in life.told]
    assert len(life.told) > len(before)


def test_a_history_that_can_not_be_written_stops_the_compaction_before_the_journal_lets_go(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(journal, 7)
    for _ in range(60):
        life.step()

    def refused(*_: object) -> None:
        raise DiskFull("history can't grow", "Free some space")

    monkeypatch.setattr("services.rollouts.journal.pack", refused)
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
    with Journal(path) as journal:
        journal.append([Watched(2, {"ess": 1.0}, 3.0)])
        assert [e.version for e in journal.history()] == [1, 2]  # type: ignore[union-attr]


def test_batches_that_are_under_way_survive_a_compaction_with_their_tokens(tmp_path: Path) -> None:
    path = tmp_path / "aggregator.sqlite"
    with Journal(path, TINY) as journal:
        life, made = Life(journal, 8), None
        while not isinstance(made, BatchMade):
            life.step()
            made = next(iter(life.campaign.book.outstanding()), None)
        expected = life.campaign.book.train_groups(made.batch_id)
        journal.compact(msgspec.msgpack.encode(life.campaign.state()))
    again = loaded(path).book
    assert again.train_groups(made.batch_id) == expected
    assert all(rollout_ids(group.group_id, GROUP) for group in expected)
