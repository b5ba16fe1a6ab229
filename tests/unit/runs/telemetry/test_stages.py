"""The clock of a candidate's stages."""

from __future__ import annotations

from kbrl_async.kernels.stages import StageClock
from protocols.records import Fault, StageReport


def test_a_stage_begins_where_the_last_one_ended_and_says_what_in_it_took_how_long() -> None:
    now = [10.0]
    clock = StageClock(lambda: now[0])
    now[0] = 10.5
    clock.ends("reference")
    for _ in range(2):
        with clock.part("its process"):
            now[0] += 0.25
    with clock.part("nothing to speak of"):
        now[0] += 0.001
    now[0] += 0.999
    clock.ends("small_inputs", Fault.INCORRECT, "one set")
    clock.ends("timing")
    assert clock.reports == (
        StageReport("reference", Fault.OK, 0.5),
        StageReport("small_inputs", Fault.INCORRECT, 1.5, "one set; its process 0.50 s"),
        StageReport("timing", Fault.OK, 0.0),
    )
