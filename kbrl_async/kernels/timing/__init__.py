"""How fast is it, and how sure are we: the statistics of paired ratios, the recipe of a timed run, and what the numbers
rest on (load, clocks, roofline, the bench's own resolution).

Knows nothing of sandboxes, problems or verdicts: it is given a function that measures one pair.

::

    host (load, cores, caches) ─┐
    clocks, nvml ───────────────┤
    resolution (A/A report) ────┼─▶ recipe.measure(sample) ─▶ Measured ─▶ Timing (made by `verifying`)
    statistics (pure) ──────────┘                                 ▲ roofline: is that time possible at all?

Invariants
* A speedup is the median of paired ratios with an exact confidence interval that survives looking more than once (I7).
* A sample that others disturbed, or whose clock was low, is set aside, and how many is reported.
* Nothing here changes a device's settings but `clocks` in mode `lock`, which restores them.
"""

from kbrl_async.kernels.timing.recipe import Measured, Pair, Point, Recipe, measure, share_at
from kbrl_async.kernels.timing.statistics import Interval, Sequential, median_interval, ready, stop_reason, widened

__all__ = [
    "Interval",
    "Measured",
    "Pair",
    "Point",
    "Recipe",
    "Sequential",
    "measure",
    "median_interval",
    "ready",
    "share_at",
    "stop_reason",
    "widened",
]
