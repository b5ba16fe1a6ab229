"""The document of an evaluation: raw and filtered, by level, and how it is shown."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kbrl_async.errors import CheckpointError
from kbrl_async.evaluation import show
from kbrl_async.evaluation.document import Document, build, read, write
from kbrl_async.evaluation.metrics import Sample


def sample(problem: str, number: int, speedup: float | None, *, flags: tuple[str, ...] = (), **more: object) -> Sample:
    speeds = {} if speedup is None else {"eager": (speedup, speedup - 0.1, speedup + 0.1)}
    found = {"compiled": True, "correct": speedup is not None, "fault": "ok" if speedup else "incorrect", **more}
    level = int(problem[1])
    return Sample(problem_id=problem, level=level, sample=number, speedups=speeds, flags=flags, **found)  # type: ignore[arg-type]


SAMPLES = [
    sample("L1/1_a", 0, 2.0),
    sample("L1/1_a", 1, None, fault="cheating", cheated=True),
    sample("L1/2_b", 0, 1.05, flags=("zeros@ours",)),
    sample("L1/2_b", 1, 1.5, flags=("zeros@ours",)),
    sample("L2/1_c", 0, None, compiled=False, fault="compile_error"),
    sample("L2/1_c", 1, None, fault="expired", expired=True),
]


@pytest.fixture(scope="module")
def document() -> Document:
    return build(SAMPLES, policy={"label": "p", "version": 3}, settings={}, lost={"worker_lost": 2})


def test_filtered_figures_leave_out_flagged_problems_only(document: Document) -> None:
    raw, filtered = document.overall.raw, document.overall.filtered
    assert raw is not None
    assert filtered is not None
    assert (raw.problems, filtered.problems, document.overall.flagged) == (3, 2, 1)
    assert raw.correct.value == pytest.approx(0.5)
    assert filtered.correct.value == pytest.approx(0.25)


def test_levels_have_figures_of_their_own(document: Document) -> None:
    one, two = document.levels["1"].raw, document.levels["2"].raw
    assert one is not None
    assert two is not None
    assert (one.correct.value, two.correct.value) == (0.75, 0.0)
    assert two.speedup["eager"].geometric_mean is None


def test_cheating_and_deadlines_count_as_wrong_and_are_told_apart(document: Document) -> None:
    assert document.overall.raw is not None
    assert document.overall.raw.hacked.value == pytest.approx(1 / 6)
    assert (document.expired, document.lost) == (1, {"worker_lost": 2})
    assert document.overall.raw.samples == 6, "what was lost through our fault is in no figure"


def test_a_problem_that_lost_samples_is_left_out_of_larger_k_only() -> None:
    listed = [sample("L1/1_a", 0, 2.0), sample("L1/1_a", 1, None), sample("L1/2_b", 0, None)]
    raw = build(listed, policy={}, settings={}, lost={"worker_lost": 1}).overall.raw
    assert raw is not None
    assert {k: figure.value for k, figure in raw.pass_at_k.items()} == {"1": 0.25, "2": 1.0}


def test_a_speedup_is_proven_only_by_its_whole_interval(document: Document) -> None:
    assert document.overall.raw is not None
    speeds = document.overall.raw.speedup["eager"]
    assert speeds.fast_p["1"].value == pytest.approx(3 / 6)
    assert speeds.fast_1_proven.value == pytest.approx(2 / 6)
    assert speeds.fast_p_best["1"].value == pytest.approx(2 / 3)


def test_compiled_baselines_get_figures_where_they_were_measured() -> None:
    both = {"eager": (2.0, 1.9, 2.1), "compile": (0.8, 0.7, 0.9)}
    made = build([Sample(problem_id="L1/1_a", level=1, sample=0, correct=True, speedups=both)], policy={}, settings={})
    assert made.overall.raw is not None
    assert made.overall.raw.speedup["compile"].fast_p["0.8"].value == 0.0
    assert made.overall.raw.speedup["eager"].fast_p["1.5"].value == 1.0
    assert "eval/speedup_median_vs_compile" in show.scalars(made)


def test_a_disturbed_measurement_is_nobody_s_best_speedup() -> None:
    made = build([sample("L1/1_a", 0, 90.0, disturbed=True), sample("L1/1_a", 1, 1.5)], policy={}, settings={})
    assert (made.problems[0].best_speedup, made.problems[0].disturbed) == (1.5, 1)
    out = io.StringIO()
    Console(file=out, width=160).print(show.render(made))
    assert "1.50×, disturbed ×1" in out.getvalue()


def test_it_survives_the_way_to_disk_and_back(document: Document, tmp_path: Path) -> None:
    write(tmp_path / "evaluation.json", document)
    assert read(tmp_path / "evaluation.json") == document
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(CheckpointError, match="kbrl eval"):
        read(tmp_path / "evaluation.json")


def test_the_table_shows_every_figure_and_what_is_missing(document: Document) -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(show.render(document))
    text = out.getvalue()
    for word in ("pass@2", "fast_1.2", "without 1 flagged", "level 2", "2 worker_lost", "expired ×1", "zeros@ours"):
        assert word in text


def test_tensorboard_tags_are_of_all_of_the_unflagged_and_of_each_level(document: Document) -> None:
    found = show.scalars(document)
    assert (found["eval/correct_rate"], found["eval_filtered/correct_rate"]) == (0.5, 0.25)
    assert found["eval_level1/pass_at_2"] == 1.0


def test_nothing_makes_no_figures() -> None:
    made = build([], policy={}, settings={})
    assert (made.overall.raw, made.levels, show.scalars(made)) == (None, {}, {})


def test_what_was_replayed_and_what_was_observed_are_counted_apart() -> None:
    rows = [
        sample("L1/1_a", 0, 2.0, trust="replayed"),
        sample("L1/1_a", 1, 0.9, trust="replayed"),
        sample("L1/2_b", 0, 3.0, trust="observed"),
        sample("L1/2_b", 1, None, trust="observed"),
    ]
    made = build(rows, policy={}, settings={})
    assert made.overall.raw is not None
    found = made.overall.raw.trust
    assert {kind: (one.correct, one.fast_1_proven.value) for kind, one in found.items()} == {
        "observed": (1, 0.25),
        "replayed": (2, 0.25),
    }
    shown = dict(show.figure_rows(made.overall.raw))
    assert (shown["correct, replayed"], shown["correct, observed"]) == ("2", "1")
    assert shown["fast_1_proven, replayed"].startswith("25.0%")
