"""From a run's record to a `Result`: what the services found, in the form that `kbrl verify` gives."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kbrl_async.kernels.funnel.result import Result, early
from protocols.records import BenchReport, BuildReport, Fault, Frame, Generation, RolloutRequest, StageReport


def result_of(record: Sequence[Frame], device: str = "") -> Result:
    """The result of a record that has a verdict.

    :raises ValueError: it holds no generation, so nothing is known.
    """
    by_type = {type(frame): frame for frame in record}
    request, generation = by_type.get(RolloutRequest), by_type.get(Generation)
    if not isinstance(request, RolloutRequest) or not isinstance(generation, Generation):
        raise ValueError("a record without a generation has no result")
    result = Result(
        request.problem.problem_id,
        request.backend,
        device,
        early(generation.fault, generation.message),
        (StageReport("format", generation.fault, 0.0, "taken from a response"),),
        origin="response",
    )
    build, bench = by_type.get(BuildReport), by_type.get(BenchReport)
    if isinstance(build, BuildReport):
        verdict = early(build.fault, build.message, build.hint, build.rule, build.isolation)
        result = msgspec.structs.replace(
            result,
            verdict=verdict,
            stages=(*result.stages, *build.stages),
            toolchain=build.toolchain,
            build_isolation=build.isolation,
        )
    if isinstance(bench, BenchReport):
        timing = bench.timing if bench.verdict.fault is Fault.OK else None
        stages = (*result.stages, *bench.stages)
        result = msgspec.structs.replace(result, verdict=bench.verdict, timing=timing, stages=stages)
    return result
