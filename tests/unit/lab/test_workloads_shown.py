"""Whatever shows a kernel of a problem with several workloads shows each of them."""

from __future__ import annotations

from kbrl_async.evaluation.course import Tried, keep
from kbrl_async.evaluation.document import row_of
from kbrl_async.kernels.funnel.result import Result
from kbrl_async.kernels.kernelbench.formats import metadata_of
from kbrl_async.lab.verdicts import of_verdict
from kbrl_async.rollouts.prompts.feedback import feedback_of
from kbrl_async.rollouts.stats import RolloutStats
from protocols.records import Fault, Problem, Timing, Verdict, WorkloadTiming, WorkloadVerdict

VERDICT = Verdict(
    Fault.OK, 12, 12,
    workloads=(
        WorkloadVerdict("decode", Fault.OK, 4, 4), WorkloadVerdict("prefill", Fault.OK, 4, 4),
        WorkloadVerdict("tail rows=1", Fault.OK, 4, 4),
    ),
)  # fmt: skip
TIMING = Timing(
    20, 1.2, 1.1, 1.3, 1.0, 1.2,
    workloads=(
        WorkloadTiming("decode", 0.75, 10, 1.5, 1.4, 1.6, 0.1, 0.15),
        WorkloadTiming("prefill", 0.25, 10, 0.7, 0.6, 0.8, 5.0, 3.5),
    ),
)  # fmt: skip
RESULT = Result("L4/01_a", "c", "cpu", VERDICT, (), TIMING)
LINES = [
    "decode: right, 4 of 4 sets; 1.500× (1.400 … 1.600), weight 0.75; 0.1 ms, reference 0.15 ms",
    "prefill: right, 4 of 4 sets; 0.700× (0.600 … 0.800), weight 0.25; 5 ms, reference 3.5 ms",
    "tail rows=1: right, 4 of 4 sets",
]


def test_a_result_a_kernelbench_file_and_a_row_of_verdicts_name_each() -> None:
    assert [text for name, text in RESULT.rows() if name == "workload"] == LINES
    assert metadata_of(RESULT)["workloads"] == LINES
    assert of_verdict(VERDICT, TIMING)["workloads"] == LINES
    assert "workloads" not in metadata_of(Result("L1/01_a", "c", "cpu", Verdict(Fault.OK), ()))


def test_the_next_turn_reads_the_slowest_first() -> None:
    assert feedback_of(VERDICT, TIMING, "", "c").limits == "by workload prefill 0.7×, decode 1.5×"


def test_an_evaluation_counts_them_by_name_and_secret_shapes_as_one() -> None:
    stats = RolloutStats(
        problem_id="L4/01_a", level=4, reward=1.0, correct=True, speedup=1.2, speedup_lo=1.1, speedup_hi=1.3
    )
    kept = keep(Problem("L4/01_a", 4, "a", ""), "a.0", [Tried("a.0", stats, RESULT, "", 0.0)])
    row = row_of([kept.sample, kept.sample])
    assert {name: (one.samples, one.correct, one.best_speedup) for name, one in row.workloads.items()} == {
        "decode": (2, 2, 1.5), "prefill": (2, 2, 0.7), "secret shapes": (2, 2, None),
    }  # fmt: skip
