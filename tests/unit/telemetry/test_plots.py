"""Charts and comparisons of runs."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from kbrl_async.telemetry import compare, summary
from kbrl_async.telemetry.plots import _Axis, line_chart, smoothed
from kbrl_async.telemetry.tensorboard import Writer

NAMESPACE = "{http://www.w3.org/2000/svg}"


def test_a_chart_is_valid_svg_with_a_line_a_series() -> None:
    svg = ET.fromstring(line_chart({"a<b": [(0, 1), (1, 2)], "c": [(0, 0.5)], "none": []}, title="t", x="x", y="y"))
    assert len(svg.findall(f"{NAMESPACE}polyline")) == 2
    assert "a<b" in [text.text for text in svg.findall(f"{NAMESPACE}text")]


def test_points_lie_inside_the_frame_and_higher_values_are_higher() -> None:
    svg = ET.fromstring(line_chart({"a": [(0, -3), (10, 7)]}, title="", x="", y=""))
    line = svg.find(f"{NAMESPACE}polyline")
    assert line is not None
    (x0, y0), (x1, y1) = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert 64 <= x0 < x1 <= 552
    assert 44 <= y1 < y0 <= 352


@pytest.mark.parametrize("values", [[0.0, 0.93], [1e-7, 3e-7], [-5.0, 1234.0], [2.0, 2.0]])
def test_an_axis_has_round_ticks_around_its_values(values: list[float]) -> None:
    axis = _Axis.over(values, 0, 100)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= min(values) + 1e-12
    assert ticks[-1] >= max(values) - 1e-9 or values[0] == values[1]


def test_smoothing_takes_the_mean_of_what_came_before() -> None:
    assert smoothed([1, 3, 5, 7], 2) == [1, 2, 4, 6]


def test_runs_are_compared_by_their_summaries_and_curves(tmp_path: Path) -> None:
    for name, reward in (("one", 0.5), ("two", 0.25)):
        writer = Writer(tmp_path / name / "tensorboard" / "training")
        for step in range(3):
            writer.scalars({"reward/mean": reward * step}, step)
        writer.close()
        summary.write(tmp_path / name / "summary.json", {"reward_mean_last": reward, "updates": 3})
    paths = {name: tmp_path / name for name in ("one", "two")}
    assert compare.curve(paths["one"], "reward/mean") == [(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)]
    assert compare.curve(paths["one"], "no/such") == []
    assert "two" in compare.chart(paths, "reward/mean")
    console = Console(width=100, file=io.StringIO())
    console.print(compare.table(compare.summaries(list(paths.values()))))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "reward_mean_last" in shown
    assert "0.250" in shown
    assert "success_rate" not in shown
