"""A run whose policy never changes and whose bench is slow for correct kernels: nothing shows progress."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kbrl_async.lab.report import comparing, numbers, read_run, report_page
from kbrl_async.lab.report.curves import version_curves
from kbrl_async.lab.report.model import RunData
from kbrl_async.lab.report.page import compare_page
from kbrl_async.lab.report.verdict import verdict
from kbrl_async.runs import summary
from kbrl_async.runs.run_journal import RunJournal
from kbrl_async.runs.run_state import AFTER, BEFORE, Evaluated
from kbrl_async.runs.telemetry.by_version import ends, points, sentence, settled
from tests.records import stats
from tests.slow_bench import CORRECT, SlowBench, tenths


@pytest.fixture(scope="module")
def slow() -> SlowBench:
    return SlowBench(updates=14)


@pytest.fixture(scope="module")
def folder(slow: SlowBench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow.folder(tmp_path_factory.mktemp("runs") / "slow")


@pytest.fixture(scope="module")
def seen(folder: Path) -> RunData:
    return read_run(folder)


def printed(made: object) -> str:
    out = io.StringIO()
    Console(file=out, width=4000).print(made)
    return out.getvalue()


def test_in_the_order_of_scoring_it_would_seem_to_learn(slow: SlowBench) -> None:
    first, last = tenths(slow.scored)
    assert first < 0.1
    assert last > 0.7


def test_its_tiles_terminal_page_and_comparison_say_one_sentence(folder: Path, seen: RunData) -> None:
    made = summary.read(folder / "summary.json")
    said = made["first_and_last"]
    assert said.startswith("First: 192 answers of version 0 (24 groups); last: ")
    assert sentence(seen.answers, settled(seen.answers)) == said
    assert said in printed(summary.render(made))
    assert report_page(seen).count(said) >= 2
    sides = comparing.read({"slow": folder})
    assert said in " ".join(comparing.format_sides(sides))
    assert said in compare_page({"slow": folder}, sides)


def test_its_tiles_show_no_progress(seen: RunData) -> None:
    two = ends(settled(seen.answers))
    assert two.first
    assert two.last
    first, last = two.first.figures()["correct_rate"], two.last.figures()["correct_rate"]
    assert first.interval
    assert last.interval
    assert first.interval[0] < last.interval[1]
    assert last.interval[0] < first.interval[1]
    assert f"{two.first.versions} {100 * first.value:.0f}" in report_page(seen).replace("\u00a0", " ")


def test_its_curves_are_flat(folder: Path, seen: RunData) -> None:
    parts = points(settled(seen.answers), least=32)
    shares = [part.figures()["correct_rate"].value for part in parts]
    assert all(abs(share - CORRECT) < 0.2 for share in shares)
    curve = version_curves(folder)["version/correct_rate"]
    assert [x for x, _ in curve] == sorted(x for x, _ in curve)
    early, late = [y for _, y in curve][: len(curve) // 2], [y for _, y in curve][len(curve) // 2 :]
    assert abs(sum(late) / len(late) - sum(early) / len(early)) < 0.1


def test_its_verdict_is_that_nothing_can_be_told(seen: RunData) -> None:
    assert verdict(seen).startswith("No change that can be told from chance: training correct (version 0 → ")


def test_its_comparison_shows_the_versions_and_the_intervals(folder: Path, tmp_path: Path) -> None:
    made = summary.read(folder / "summary.json")
    summary.write(tmp_path / "summary.json", {"rollouts": 9, "correct_rate_first": 0.0, "correct_rate_last": 0.79})
    rows = {
        (row.part, row.name): row.cells for row in comparing.rows(comparing.read({"slow": folder, "old": tmp_path}))
    }
    assert [cell.value for cell in rows["training, first versions", "answers"]] == ["192 of v0", "–"]
    low, high = made["correct_rate_last_95"]
    correct, old = rows["training, last versions", "correct"]
    assert (correct.value, correct.interval) == (
        numbers.percent(made["correct_rate_last"]), f"{numbers.percent(low)} … {numbers.percent(high)}"
    )  # fmt: skip
    assert (old.value, old.difference) == ("–", ""), "the order of scoring is no figure"
    assert low < CORRECT < high


def test_two_such_runs_differ_by_nothing_that_can_be_told(folder: Path, tmp_path: Path) -> None:
    other = SlowBench(updates=14, seed=1).folder(tmp_path / "other")
    for row in comparing.rows(comparing.read({"slow": folder, "other": other})):
        assert not any(cell.is_told for cell in row.cells)


def test_a_run_that_goes_on_is_not_judged_by_what_was_quick(tmp_path: Path) -> None:
    slow = SlowBench(updates=40, until_s=200.0)
    slow.entries = slow.entries[:-1]  # nobody has ended it
    seen = read_run(slow.folder(tmp_path / "open"))
    found = settled(seen.answers)
    assert found.unfinished > 0
    assert found.horizon is not None
    assert max(found.versions) < found.horizon <= slow.book.version
    assert f"{found.unfinished} of groups that had not ended" in report_page(seen)


def test_an_evaluation_that_has_not_ended_is_left_out(tmp_path: Path) -> None:
    slow = SlowBench(updates=4)
    folder = slow.folder(tmp_path / "run")
    whole = [Evaluated(BEFORE, f"b{n}", stats(correct=n < 4, compiled=True, rollout_id=f"b{n}")) for n in range(12)]
    part = [Evaluated(AFTER, f"a{n}", stats(rollout_id=f"a{n}")) for n in range(5)]
    lost = [Evaluated("eval-v2", f"c{n}", None if n else stats(rollout_id="c0")) for n in range(12)]
    with RunJournal(folder / "aggregator.sqlite") as journal:
        journal.append([*whole, *part, *lost])
    seen = read_run(folder)
    assert len(seen.phase(BEFORE)) == 12
    assert seen.phase(AFTER) == []
    assert len(seen.phase("eval-v2")) == 1, "what infrastructure lost has ended, too"
    assert any("eval-after has not ended: its first 5 answers of 12" in words for words in seen.missing)
