"""Charts as SVG and HTML text, in one look: for the run report, comparisons and the bench. No plotting library.

::

    values ─ points ─▶ few enough ─ scales ─▶ pixels ─ lines │ areas ─▶ '<svg …>'   text inside; standalone files too
                                                     └ rows          ─▶ '<div …>'   text laid out by a browser

To add a kind of chart, write a module with one function that returns `Markup`, made of `element`s only.
"""

from kbrl_async.lab.report.plots.areas import stacked
from kbrl_async.lab.report.plots.dots import Dot, dot_chart
from kbrl_async.lab.report.plots.frame import STANDALONE, Box
from kbrl_async.lab.report.plots.lines import Line, line_chart
from kbrl_async.lab.report.plots.points import MOST, Points, apart, binned, smooth, smoothed, thinned
from kbrl_async.lab.report.plots.rows import Axis, Bar, Mark, axis_row, cells, legend, row, rows
from kbrl_async.lab.report.plots.scales import Scale, time_label, time_ticks

__all__ = [
    "MOST",
    "STANDALONE",
    "Axis",
    "Bar",
    "Box",
    "Dot",
    "Line",
    "Mark",
    "Points",
    "Scale",
    "apart",
    "axis_row",
    "binned",
    "cells",
    "dot_chart",
    "legend",
    "line_chart",
    "row",
    "rows",
    "smooth",
    "smoothed",
    "stacked",
    "thinned",
    "time_label",
    "time_ticks",
]
