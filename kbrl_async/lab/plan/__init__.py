"""How many processes a wished throughput needs, from stage times that a run has measured.

::

    runs/NAME/metrics/system.jsonl ─ observe ─▶ Observation ─ plan ─▶ Plan: servers by stage, what ends first
                                                    ▲ times of other hosts or models replace measured ones

Owns: the reading of stage times and the arithmetic of capacity. Starts nothing, changes nothing.
"""

from kbrl_async.lab.plan.capacity import Plan, Resource, Window, carried, plan
from kbrl_async.lab.plan.observing import Observation, StageWork, check_times, halves, observe, told
from kbrl_async.lab.plan.sizes import count_parameters

__all__ = [
    "Observation",
    "Plan",
    "Resource",
    "StageWork",
    "Window",
    "carried",
    "check_times",
    "count_parameters",
    "halves",
    "observe",
    "plan",
    "told",
]
