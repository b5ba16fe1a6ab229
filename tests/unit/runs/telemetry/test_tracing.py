"""A record becomes the way of its rollout: stages, waits and steps, inside one another."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec
import pytest

from kbrl_async.errors import MissingTool
from kbrl_async.runs.telemetry import tracing
from kbrl_async.runs.telemetry.tracing import Span, spans_of
from protocols.records import (
    BenchReport,
    BuildReport,
    Fault,
    Generation,
    Problem,
    RolloutRequest,
    SamplingParams,
    StageReport,
    Verdict,
)
from protocols.rollout import Record

REQUEST = RolloutRequest(
    "g000012.r3",
    "g000012",
    Problem("L1/01_tanh", 1, "tanh", ""),
    "p",
    "c",
    SamplingParams(8),
    turn=1,
    admitted_at=100.0,
)
GENERATED = Generation(
    3, [1], [2, 3], [0.0, 0.0], "x", "stop", worker_id="sampler.1", started_at=102.0, finished_at=104.0
)
BUILT = BuildReport(
    Fault.OK, started_at=104.5, finished_at=105.5, worker_id="farm.1",
    stages=(StageReport("static", Fault.OK, 0.25), StageReport("compile", Fault.OK, 0.5)),
)  # fmt: skip
JUDGED = BenchReport(
    Verdict(Fault.INCORRECT), started_at=105.5, finished_at=106.0,
    stages=(StageReport("small_inputs", Fault.OK, 0.25), StageReport("full_inputs", Fault.INCORRECT, 9.0)),
)  # fmt: skip
RECORD = Record.of(REQUEST, GENERATED, BUILT, JUDGED)


def whole() -> Span:
    span = spans_of(RECORD, 0.5)
    assert span is not None
    return span


def walk(span: Span) -> Iterator[tuple[Span, Span]]:
    for part in span.inside:
        yield span, part
        yield from walk(part)


def test_stages_and_the_waits_between_them_fill_the_rollout() -> None:
    span = whole()
    parts = [(part.name, part.start, part.end) for part in span.inside]
    assert parts == [
        ("waiting", 100.0, 102.0), ("generate", 102.0, 104.0), ("waiting", 104.0, 104.5), ("compile", 104.5, 105.5),
        ("bench", 105.5, 106.0),
    ]  # fmt: skip
    assert (span.name, span.start, span.end) == ("rollout", 100.0, 106.0)


def test_steps_are_inside_their_stage_whatever_the_clocks_say() -> None:
    assert [part.name for _, part in walk(whole())][-2:] == ["small_inputs", "full_inputs"]
    for outer, inner in walk(whole()):
        assert outer.start <= inner.start <= inner.end <= outer.end


def test_the_fault_is_where_it_happened_and_on_the_rollout() -> None:
    assert [part.name for _, part in walk(whole()) if part.failed] == ["bench", "full_inputs"]
    assert whole().failed == "incorrect"


def test_what_it_was_and_what_it_was_worth_is_told() -> None:
    told = whole().attributes
    assert told["kbrl.rollout"] == "g000012.r3"
    assert told["kbrl.problem"] == "L1/01_tanh"
    assert (told["kbrl.turn"], told["kbrl.reward"]) == (1, 0.5)


def test_a_record_that_nobody_has_worked_on_has_no_way() -> None:
    assert spans_of(Record.of(REQUEST)) is None


def test_turns_of_a_rollout_share_a_trace_and_other_rollouts_have_their_own() -> None:
    ids = [tracing.trace_id("run", "g1.r1"), tracing.trace_id("run", "g1.r2"), tracing.trace_id("other", "g1.r1")]
    assert len(set(ids)) == 3
    assert tracing.trace_id("run", "g1.r1") == ids[0]
    assert all(0 < made < 2**128 for made in ids)


def test_without_an_endpoint_nothing_is_traced_and_nothing_is_needed() -> None:
    assert tracing.open_traces("run", None) is None


def test_an_endpoint_without_opentelemetry_is_an_error_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingTool, match="otel"):
        tracing.open_traces("run", "http://127.0.0.1:4318/v1/traces")


def test_opentelemetry_gets_the_same_tree_with_the_times_of_the_stages() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    traces = tracing.Traces("run", exporter, batched=False)
    traces.add(RECORD, 0.5)
    traces.add(Record.of(msgspec.structs.replace(REQUEST, turn=2), GENERATED))
    traces.close()
    spans = exporter.get_finished_spans()
    assert {span.context.trace_id for span in spans} == {tracing.trace_id("run", "g000012.r3")}
    first, second = [span for span in spans if span.parent is None]
    assert first.attributes is not None
    assert second.attributes is not None
    assert (first.name, first.attributes["kbrl.reward"], second.attributes["kbrl.turn"]) == ("rollout", 0.5, 2)
    assert (first.start_time, first.end_time) == (100_000_000_000, 106_000_000_000)
    bench = next(span for span in spans if span.name == "bench")
    assert bench.parent is not None
    assert bench.parent.span_id == first.context.span_id
    assert bench.status.description == "incorrect"
