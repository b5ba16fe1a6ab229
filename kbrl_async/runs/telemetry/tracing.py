"""One trace a rollout, made of its record when it is scored: what it waited for and where its time went.

::

    rollout g000012.r3  ├─ waiting ─┤─ generate ─┤ w ├─ compile ─┤ w ├─ bench ──────────────────────┤
                                                       static, compile  reference, small_inputs, …

Nothing is traced while it happens: the stages stamp their frames with their times anyway, so tracing costs them nothing
and a record that took three hosts needs no context passed between them. `spans_of` is pure; `Traces` hands its spans to
OpenTelemetry where that is installed and an endpoint is configured.

Invariants
* Turns of one rollout are in one trace, whose id follows from run and rollout: no two processes need to agree on it.
* Times are those of the hosts that worked; a child never lies outside of its parent.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from kbrl_async.errors import MissingTool
from protocols.records import BenchReport, BuildReport, Fault, Generation, StageReport
from protocols.rollout import Record, StageSpan, Work, fault_of

Value = str | int | float | bool
_NANO = 1_000_000_000


class Span(msgspec.Struct, frozen=True):
    """Epoch seconds, and the spans inside."""

    name: str
    start: float
    end: float
    attributes: dict[str, Value] = msgspec.field(default_factory=dict)
    failed: str = ""
    """The fault that it ended with."""
    inside: tuple[Span, ...] = ()


def spans_of(record: Record, reward: float | None = None) -> Span | None:
    """The whole rollout (one turn of it) as a tree; None for a record that nobody has worked on."""
    timed = record.spans
    if not timed or not timed[0].started:
        return None
    stages = [_stage(span, frame) for span, frame in zip(timed, record.work, strict=True)]
    waits = [Span("waiting", span.queued, span.started) for span in timed if span.waited]
    request = record.request
    attributes: dict[str, Value] = {
        "kbrl.rollout": request.rollout_id,
        "kbrl.group": request.group_id,
        "kbrl.problem": request.problem.problem_id,
        "kbrl.purpose": request.purpose.value,
        "kbrl.turn": request.turn,
        "kbrl.role": request.role,
    }
    if reward is not None:
        attributes["kbrl.reward"] = reward
    failed = next((stage.failed for stage in stages if stage.failed), "")
    inside = tuple(sorted([*stages, *waits], key=lambda span: span.start))
    return Span("rollout", timed[0].queued, max(stage.end for stage in stages), attributes, failed, inside)


def _stage(span: StageSpan, frame: Work) -> Span:
    start, end = span.started, max(span.started, span.finished)
    attributes = {"kbrl.worker": span.worker, **_attributes(frame)}
    steps = () if isinstance(frame, Generation) else tuple(_steps(frame.stages, start, end))
    return Span(span.stage, start, end, attributes, _failed(fault_of(frame)), steps)


def _attributes(frame: Work) -> dict[str, Value]:
    match frame:
        case Generation():
            return {"kbrl.tokens": len(frame.token_ids), "kbrl.policy_version": frame.policy_version}
        case BuildReport():
            return {"kbrl.cached": frame.cached, "kbrl.isolation": frame.isolation}
        case BenchReport(verdict, timing):
            speedup: dict[str, Value] = {} if timing is None else {"kbrl.speedup": timing.speedup}
            return {"kbrl.isolation": verdict.isolation, **speedup}


def _failed(fault: Fault) -> str:
    return "" if fault is Fault.OK else fault.value


def _steps(stages: Sequence[StageReport], start: float, end: float) -> list[Span]:
    """Steps follow one another; together they may be a little longer than their stage by another clock."""
    marks = list(itertools.accumulate((stage.seconds for stage in stages), initial=start))
    return [
        Span(step.name, min(a, end), min(b, end), {}, _failed(step.fault))
        for step, (a, b) in zip(stages, itertools.pairwise(marks), strict=True)
    ]


def trace_id(run: str, rollout_id: str) -> int:
    """128 bits, never 0."""
    return int.from_bytes(hashlib.sha256(f"{run}\0{rollout_id}".encode()).digest()[:16], "big") | 1


class Traces:
    """Hands spans to OpenTelemetry. What is still here when the process ends, or at `close`, is sent then."""

    def __init__(self, run: str, exporter: Any, *, batched: bool = True) -> None:
        """`exporter`: a `SpanExporter`. Needs `opentelemetry-sdk`."""
        otel = importlib.import_module("opentelemetry.trace")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        self._run = run
        self._otel = otel
        self._ids = _ids(sdk)
        resource = resources.Resource.create({"service.name": "kbrl-async", "kbrl.run": run})
        self._provider = sdk.TracerProvider(id_generator=self._ids, resource=resource)
        processor = export.BatchSpanProcessor if batched else export.SimpleSpanProcessor
        self._provider.add_span_processor(processor(exporter))
        self._tracer = self._provider.get_tracer("kbrl_async")

    def add(self, record: Record, reward: float | None = None) -> None:
        span = spans_of(record, reward)
        if span is not None:
            self._ids.trace = trace_id(self._run, str(span.attributes["kbrl.rollout"]))
            self._emit(span, self._otel.set_span_in_context(self._otel.INVALID_SPAN))

    def _emit(self, span: Span, parent: Any) -> None:
        made = self._tracer.start_span(span.name, parent, attributes=span.attributes, start_time=_nanos(span.start))
        if span.failed:
            made.set_status(self._otel.StatusCode.ERROR, span.failed)
        for part in span.inside:
            self._emit(part, self._otel.set_span_in_context(made))
        made.end(end_time=_nanos(span.end))

    def close(self) -> None:
        self._provider.shutdown()


def _ids(sdk: Any) -> Any:
    """Random span ids; the trace id is what was set last."""

    class Ids(sdk.id_generator.RandomIdGenerator):  # type: ignore[misc] # a class of an optional package
        trace = 1

        def generate_trace_id(self) -> int:
            return self.trace

    return Ids()


def _nanos(seconds: float) -> int:
    return round(seconds * _NANO)


def open_traces(run: str, endpoint: str | None) -> Traces | None:
    """Traces that are sent to `endpoint`; None where there is none.

    :raises MissingTool: an endpoint is configured and OpenTelemetry is not installed.
    """
    if not endpoint:
        return None
    try:
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        return Traces(run, otlp.OTLPSpanExporter(endpoint=endpoint))
    except ImportError as error:
        cure = "pip install 'kbrl-async[otel]', or leave metrics.otlp_endpoint out"
        raise MissingTool(f"metrics.otlp_endpoint needs OpenTelemetry: {error}", cure) from None
