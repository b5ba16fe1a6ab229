"""Mistakes that are alike are one kind; the sample is drawn by a rule that nobody's taste is in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kbrl_async.lab.report import examples, report_page
from kbrl_async.lab.report.archived import Archived, read_archive
from kbrl_async.lab.report.examples import MOST_KINDS, MOST_TURNS, kind_of, read_examples
from kbrl_async.lab.report.model import TRAIN, RunData
from tests.unit.lab.report.conftest import HOSTILE


@pytest.fixture(scope="module")
def stored(run_folder: Path) -> Archived:
    found = read_archive(run_folder / "rollouts.sqlite")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("message", "other", "kind"),
    [
        ("kernel.c:8:21: error: expected ';' before '}' token", "k.c:1:2: error: expected ';' before '}' token\n  note",
         "expected ';' before '}' token"),
        ("k.c:1: error: 'b' undeclared (first use in this function)",
         "k.c:9: error: 'out' undeclared (not in a function at all)",
         "'…' undeclared (…)"),
        ("line 3, in f\nTypeError: run takes 7 arguments (const float *x, long m, long n), got 5",
         "line 9, in g\nTypeError: run takes 3 arguments (const float *restrict in, long n), got 2",
         "TypeError: run takes # arguments (…), got #"),
        ("", "  \n", "no message"),
    ],
)  # fmt: skip
def test_messages_that_differ_in_numbers_names_and_places_are_one_kind(message: str, other: str, kind: str) -> None:
    assert kind_of(message) == kind_of(other) == kind


def test_wrong_results_are_told_apart_by_their_hint() -> None:
    said = ("16248 of 16384 values are wrong", "Nearly everything is wrong: check the formula.")
    assert kind_of(*said, "incorrect") == said[1]


def test_the_commonest_mistakes_are_counted_and_have_an_example_in_the_sample(stored: Archived, run: RunData) -> None:
    by_hand = Counter(
        "expected" if "expected ';'" in said else "undeclared" if "undeclared" in said else "hostile"
        for said in _messages(stored)
    )
    kinds = run.examples.mistakes["compile_error"]
    found = {kind.kind: kind.count for kind in kinds}
    assert found["expected ';' before '}' token"] == by_hand["expected"]
    assert found["'…' undeclared (…)"] == by_hand["undeclared"]
    assert [kind.count for kind in kinds] == sorted((kind.count for kind in kinds), reverse=True)
    assert all(run.examples.place(kind.task_id) is not None for kind in kinds)
    assert run.examples.read["compile_error"] == (sum(by_hand.values()), sum(by_hand.values()))


def _messages(stored: Archived) -> list[str]:
    from kbrl_async.runs.archive.archive import ArchiveReader

    with ArchiveReader(stored.path) as archive:
        rows = [row for row in stored.rows if row.fault == "compile_error" and row.purpose == TRAIN]
        return [record.verdict.message.partition("\n")[0] for row in rows if (record := archive.record(row.task_id))]


def test_the_sample_is_bounded_and_always_the_same(stored: Archived, run: RunData) -> None:
    again = read_examples(list(reversed(run.turns)), stored)
    assert [one.turn.task_id for one in again.sample] == [one.turn.task_id for one in run.examples.sample]
    assert len(again.sample) == MOST_TURNS < again.kept


def test_every_version_and_outcome_is_in_it(run: RunData) -> None:
    kinds = {(turn.phase, turn.stats.policy_version, turn.stats.fault) for turn in run.turns}
    shown = {(one.turn.phase, one.turn.stats.policy_version, one.turn.stats.fault) for one in run.examples.sample}
    assert kinds == shown


def test_characters_are_bounded_too(stored: Archived, run: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "MOST_CHARACTERS", 5_000)
    sample = read_examples(run.turns, stored).sample
    assert sum(len(one.prompt) + len(one.answer) for one in sample[:-1]) < 5_000 + 60_000
    assert len(sample) < 20


def test_what_the_archive_has_evicted_is_not_shown(run: RunData) -> None:
    assert read_examples(run.turns, None).sample == ()


def test_a_hostile_answer_and_message_are_text(run: RunData) -> None:
    page = report_page(run)
    assert any(one.answer.startswith(HOSTILE[:20]) for one in run.examples.sample)
    assert len(run.examples.mistakes["compile_error"]) <= MOST_KINDS
    assert "<script>document.title" not in page
    assert "&lt;/script&gt;&lt;script&gt;document.title" in page
    assert "\u202e" not in page
    assert "x" * 1000 not in page
