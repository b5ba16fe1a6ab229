"""From a run's record to a `Result`: what the services found, in the form that `kbrl verify` gives."""

from __future__ import annotations

from kbrl_async.kernels.funnel.result import Result, unbuilt
from protocols.rollout import Record


def result_of(record: Record, device: str = "") -> Result:
    """The result of a record that has a verdict.

    :raises ValueError: it holds no generation, so nothing is known.
    """
    if record.generation is None:
        raise ValueError("a record without a generation has no result")
    request, build, v = record.request, record.build, record.verdict
    return Result(
        request.problem.problem_id,
        request.backend,
        device,
        v if record.bench is not None or build is None else unbuilt(build),
        record.stages,
        record.timing,
        toolchain=build.toolchain if build is not None else "",
        build_isolation=build.isolation if build is not None else "",
        origin="response",
    )
