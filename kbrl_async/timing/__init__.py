"""How fast is it, and how sure are we: the statistics of paired ratios and the recipe of a timed run on a CPU.

Knows nothing of sandboxes, problems or verdicts: it is given a function that measures one pair.

Invariants
* A speedup is the median of paired ratios with an exact confidence interval (I7).
* A sample that others disturbed is thrown away, and how many is reported.
"""

from kbrl_async.timing.recipe import Measured, Pair, Recipe, measure
from kbrl_async.timing.statistics import Interval, median_interval, stop_reason, widened

__all__ = ["Interval", "Measured", "Pair", "Recipe", "measure", "median_interval", "stop_reason", "widened"]
