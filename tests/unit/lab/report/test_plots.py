"""Charts and comparisons of runs."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from kbrl_async.errors import UserError
from kbrl_async.lab.report import comparing, curves, numbers
from kbrl_async.lab.report.layout import cells
from kbrl_async.lab.report.plots import STANDALONE, Dot, Series, dot_chart, line_chart, stacked
from kbrl_async.lab.report.scales import MOST, Scale, apart, binned, smoothed, thinned, time_label, time_ticks
from kbrl_async.runs import summary
from kbrl_async.runs.telemetry.tensorboard import Writer

NAMESPACE = "{http://www.w3.org/2000/svg}"
WORDS = {"title": "t", "x": "x", "y": "y"}


def drawn(*lines: Series) -> ET.Element:
    return ET.fromstring(line_chart(lines, label="a chart", box=STANDALONE, standalone=WORDS, labels="names"))


def test_a_chart_is_valid_svg_with_a_line_a_series() -> None:
    svg = drawn(Series("a<b", [(0, 1), (1, 2)]), Series("c", [(0, 0.5)]), Series("none", []))
    assert len(svg.findall(f"{NAMESPACE}polyline")) == 2
    assert "a<b" in [text.text for text in svg.findall(f"{NAMESPACE}text")]


def test_points_lie_inside_the_frame_and_higher_values_are_higher() -> None:
    line = drawn(Series("a", [(0, -3), (10, 7)])).find(f"{NAMESPACE}polyline")
    assert line is not None
    (x0, y0), (x1, y1) = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert STANDALONE.left <= x0 < x1 <= STANDALONE.width - STANDALONE.right
    assert STANDALONE.top <= y1 < y0 <= STANDALONE.height - STANDALONE.bottom


def test_faint_single_values_lie_inside_the_frame_too() -> None:
    svg = drawn(Series("a", [(float(i), 100.0 * (i == 5)) for i in range(10)], window=5))
    faint = next(path for path in svg.findall(f"{NAMESPACE}path") if "faint" in path.attrib["class"])
    heights = [float(point.split(",")[1]) for point in faint.attrib["d"][1:].split("L")]
    assert min(heights) >= STANDALONE.top


def test_a_line_of_any_length_is_drawn_with_few_points_of_the_same_mean() -> None:
    values = [(float(i), float(i % 7)) for i in range(10_000)]
    kept = thinned(values)
    assert len(kept) <= MOST
    line = drawn(Series("a", values)).find(f"{NAMESPACE}polyline")
    assert line is not None
    assert len(line.attrib["points"].split()) <= MOST
    assert sum(y for _, y in kept) / len(kept) == pytest.approx(sum(y for _, y in values) / len(values), rel=0.02)


@pytest.mark.parametrize("values", [[0.0, 0.93], [1e-7, 3e-7], [-5.0, 1234.0], [2.0, 2.0], [0.0, 0.0], [-1.0, -1.0]])
def test_an_axis_has_round_ticks_around_its_values(values: list[float]) -> None:
    scale = Scale.linear(values, 0, 100)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= min(values) + 1e-12
    assert ticks[-1] >= max(values) - 1e-9
    assert all(-1e-9 <= scale(value) <= 100 + 1e-9 for value in values)


def test_a_logarithmic_axis_gives_equal_factors_equal_room() -> None:
    scale = Scale.logarithmic([0.25, 4.0], 0.0, 100.0)
    assert scale(1.0) == pytest.approx(50.0)
    assert scale(2.0) - scale(1.0) == pytest.approx(scale(1.0) - scale(0.5))
    assert set(scale.ticks()) >= {0.5, 1.0, 2.0}
    assert scale(0.0) == scale(scale.low)


def test_a_logarithmic_axis_over_many_powers_has_few_ticks() -> None:
    assert 3 <= len(Scale.logarithmic([1e-24, 1e24], 0.0, 100.0).ticks()) <= 9


def test_labels_that_would_overlap_are_moved_apart_in_their_order_and_stay_inside() -> None:
    places = apart([10.0, 11.0, 99.0, 98.0], 12.0, 0.0, 100.0)
    assert sorted(range(4), key=lambda i: places[i]) == [0, 1, 3, 2]
    assert min(b - a for a, b in zip(sorted(places), sorted(places)[1:], strict=False)) >= 12.0 - 1e-9
    assert max(places) <= 100.0


def test_smoothing_takes_the_mean_of_what_came_before() -> None:
    assert smoothed([1, 3, 5, 7], 2) == [1, 2, 4, 6]


def test_bins_hold_every_item_once() -> None:
    parts = binned([-1.0, 0.0, 4.9, 5.0, 10.0, 11.0], float, 2, 0.0, 10.0)
    assert parts == [[-1.0, 0.0, 4.9], [5.0, 10.0, 11.0]]


def test_neighbours_of_one_shade_are_one_bar_and_gaps_stay() -> None:
    bars, tips = cells([(1.0, "a"), (0.99, "b"), None, (0.0, "c")], "fast")
    assert [(bar.start, bar.end, bar.class_) for bar in bars] == [(0, 50, "fast s5"), (75, 100, "fast s0")]
    assert tips == '["a","b","","c"]'


def test_shares_are_stacked_up_to_the_whole() -> None:
    svg = ET.fromstring(stacked([("a", "c1"), ("b", "c2")], [(0, [1, 3]), (1, [2, 2])], label="x", x_format=str))
    lower, upper = [area.attrib["points"].split() for area in svg.findall("polygon")]
    assert lower[:2] == upper[:1:-1]
    assert {point.split(",")[1] for point in upper[:2]} == {"12.0"}


@pytest.mark.parametrize("duration", [0.0, 3.0, 61.0, 4000.0, 90_000.0, 3e7])
def test_a_time_axis_has_few_ticks_with_different_labels(duration: float) -> None:
    ticks = time_ticks(duration)
    assert 1 <= len(ticks) <= 9
    assert len({time_label(tick) for tick in ticks}) == len(ticks)


def test_durations_and_shares_are_written_as_people_say_them() -> None:
    assert [numbers.seconds(s) for s in (0.04, 3.21, 59.8, 250, 7500)] == [
        "40 ms",
        "3.2 s",
        "60 s",
        "4 min 10 s",
        "2 h 05",
    ]
    assert [numbers.percent(s) for s in (0.0, 0.021, 0.5)] == ["0\u00a0%", "2.1\u00a0%", "50\u00a0%"]
    assert [numbers.times(s) for s in (None, 1.234, 12.34, 123.4)] == ["–", "1.23×", "12.3×", "123×"]


def test_runs_are_compared_by_their_summaries_and_curves(tmp_path: Path) -> None:
    for name, reward in (("one", 0.5), ("two", 0.25)):
        writer = Writer(tmp_path / name / "tensorboard" / "training")
        for step in range(3):
            writer.scalars({"reward/mean": reward * step}, step)
        writer.close()
        summary.write(
            tmp_path / name / "summary.json", {"first_and_last": "words", "reward_mean_last": reward, "updates": 3}
        )
    paths = {name: tmp_path / name for name in ("one", "two")}
    assert curves.curve(paths["one"], "reward/mean") == [(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)]
    assert curves.curve(paths["one"], "no/such") == []
    assert "two" in (curves.chart(paths, "reward/mean") or "")
    assert curves.chart(paths, "no/such") is None
    console = Console(width=100, file=io.StringIO())
    console.print(comparing.table(comparing.read(paths)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "training, last versions" in shown
    assert "0.25" in shown
    assert "solved in a rollout" not in shown


def test_a_summary_that_somebody_edited_is_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json can't be read"):
        comparing.read({"run": tmp_path})


def test_runs_of_one_name_are_told_apart() -> None:
    found = curves.named([Path("/a/runs/default"), Path("/b/runs/default"), Path("/b/runs/other")])
    assert list(found) == ["a/runs/default", "b/runs/default", "other"]


def test_arms_are_drawn_with_their_intervals_and_a_missing_one_is_left_out() -> None:
    rows = {"one": [Dot(0.2, 0.1, 0.3), Dot(-0.1, -0.2, 0.05)], "two": [Dot(0.4, 0.35, 0.5), None]}
    chart = ET.fromstring(dot_chart(rows, ["trained", "held out"], label="gains", standalone=WORDS))
    circles = chart.findall(f".//{NAMESPACE}circle")
    assert len(circles) == 3
    left, right = (next(c for c in circles if c[0].text.startswith(f"{v} ")) for v in ("20\u00a0%", "40\u00a0%"))
    assert float(left.get("cx", 0)) < float(right.get("cx", 0))
    words = {node.text for node in chart.iter(f"{NAMESPACE}text")}
    assert {"one", "two", "trained", "held out"} <= words
