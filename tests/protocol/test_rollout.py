"""A rollout's record: its frames as they travel, and what follows from them."""

from __future__ import annotations

import json

import msgspec
import pytest

from protocols.messages import Status
from protocols.records import (
    INFRASTRUCTURE_FAULTS,
    VERIFIER,
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    StageReport,
    Timing,
    Verdict,
)
from protocols.rollout import STEPS, Frame, Record, RecordError, StageSpan, Work
from tests.protocol.freezing import GOLDEN
from tests.records import record, turn

WRITTEN = Generation(0, [], [], [], "", "stop", Candidate("KERNEL", "c"))
BUILT = BuildReport(Fault.OK)
FAST = Timing(9, 2.0, 1.5, 3.0, 1.0, 2.0)
RIGHT = BenchReport(Verdict(Fault.OK, 5, 5), FAST)
FRAMES: tuple[Frame, ...] = (turn().request, WRITTEN, BUILT, RIGHT)


def failing(fault: Fault, timing: Timing | None = None) -> BenchReport:
    return BenchReport(Verdict(fault), timing)


@pytest.mark.parametrize("revision", sorted(GOLDEN.glob("revision-*.json")), ids=lambda path: path.stem)
def test_the_frames_of_an_earlier_revision_are_a_record_today(revision: object) -> None:
    golden = json.loads((GOLDEN / revision.name).read_text())["records"]  # type: ignore[attr-defined]
    frames = [bytes.fromhex(golden[type(frame).__name__]) for frame in FRAMES]
    assert [type(frame) for frame in Record.decode(frames).work] == [type(frame) for frame in FRAMES[1:]]
    for then, now in zip(frames, Record.decode(frames).encode(), strict=True):
        sent, plain = msgspec.msgpack.decode(then), msgspec.msgpack.decode(now)
        assert plain.keys() >= sent.keys()


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_record_travels_as_the_bytes_of_its_frames(length: int) -> None:
    sent = [msgspec.msgpack.encode(frame) for frame in FRAMES[:length]]
    assert Record.decode(sent) == Record.of(*FRAMES[:length])
    assert Record.decode(sent).encode() == sent


@pytest.mark.parametrize("places", [(), (1,), (0, 2), (0, 1, 3), (0, 1, 1), (0, 0), (1, 0), (0, 1, 2, 3, 3)])
def test_frames_that_are_missing_doubled_or_out_of_order_are_no_record(places: tuple[int, ...]) -> None:
    with pytest.raises(RecordError, match="no record"):
        Record.of(*(FRAMES[place] for place in places))


def test_what_a_verifier_finds_right_has_its_report_before_the_benchs() -> None:
    verified = BenchReport(RIGHT.verdict, worker_id="verifier.1", stages=(StageReport("full_inputs", Fault.OK, 1.0),))
    whole = Record.of(*FRAMES[:3], verified, RIGHT)
    assert (whole.verified, whole.bench, whole.timing) == (verified, RIGHT, FAST)
    assert Record.decode(whole.encode()) == whole
    assert [stage.name for stage in whole.stages] == ["format", "full_inputs"]
    assert [span.stage for span in whole.spans] == ["generate", "compile", "bench", "bench"]
    alone = Record.of(*FRAMES[:3], verified)
    assert (alone.verified, alone.bench, alone.timing) == (None, verified, None)


@pytest.mark.parametrize("first", [RIGHT, failing(Fault.INCORRECT)])
def test_a_report_that_is_no_verifiers_has_none_behind_it(first: BenchReport) -> None:
    with pytest.raises(RecordError, match="no record"):
        Record.of(*FRAMES[:3], first, RIGHT)


def test_work_of_a_stage_in_two_parts_is_added_up() -> None:
    first = BenchReport(RIGHT.verdict, started_at=10.0, finished_at=12.0)
    parts = first, msgspec.structs.replace(RIGHT, started_at=20.0, finished_at=22.0)
    assert Record.of(*FRAMES[:3], *parts).seconds["bench"] == 4.0


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x91" * 100_000, msgspec.msgpack.encode({"type": "timing"})])
def test_a_frame_that_cannot_be_read_is_an_error_of_the_protocol(garbage: bytes) -> None:
    with pytest.raises(RecordError, match="can't be read"):
        Record.decode([*Record.of(*FRAMES[:3]).encode(), garbage])


@pytest.mark.parametrize(
    ("work", "fault"),
    [
        ((), Fault.INFRA_ERROR),
        ((WRITTEN,), Fault.INFRA_ERROR),
        ((WRITTEN, BUILT), Fault.INFRA_ERROR),
        ((WRITTEN, BUILT, RIGHT), Fault.OK),
        ((WRITTEN, BUILT, failing(Fault.INCORRECT)), Fault.INCORRECT),
        ((WRITTEN, BuildReport(Fault.COMPILE_ERROR)), Fault.COMPILE_ERROR),
        ((msgspec.structs.replace(WRITTEN, fault=Fault.FORMAT_ERROR),), Fault.FORMAT_ERROR),
        ((WRITTEN, BuildReport(Fault.COMPILE_ERROR), failing(Fault.INFRA_ERROR)), Fault.INFRA_ERROR),
    ],
)
def test_a_record_ends_as_its_first_failing_stage_unless_that_was_ours(work: tuple[Work, ...], fault: Fault) -> None:
    assert turn(*work).fault is fault
    assert turn(*work).is_scorable is (fault not in INFRASTRUCTURE_FAULTS)


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (Status.WORKER_LOST, Fault.WORKER_LOST),
        (Status.STALE, Fault.STALE),
        (Status.NO_WORKER, Fault.INFRA_ERROR),
        ("infra_error", Fault.INFRA_ERROR),
        ("of a later revision", Fault.INFRA_ERROR),
    ],
)
def test_what_the_header_says_counts_before_the_frames(status: str, fault: Fault) -> None:
    lost = turn(WRITTEN, BUILT, RIGHT, status=status)
    assert (lost.fault, lost.is_scorable, lost.lost_because) == (fault, False, status)


def test_a_prompt_that_no_sampler_can_hold_is_named_as_the_reason() -> None:
    message = "prompt_too_long: prompt of 900 tokens"
    assert turn(msgspec.structs.replace(WRITTEN, fault=Fault.INFRA_ERROR, message=message)).lost_because == (
        "prompt_too_long"
    )
    assert turn(WRITTEN, BUILT).lost_because == "infra_error"


def test_a_prediction_ends_with_its_answer() -> None:
    assert turn(WRITTEN, role=VERIFIER).fault is Fault.OK
    assert turn(role=VERIFIER).fault is Fault.INFRA_ERROR


def test_the_verdict_is_the_benchs_or_what_the_stage_before_says() -> None:
    refused = BuildReport(Fault.STATIC_VIOLATION, message="asm", hint="no asm", rule="asm", isolation="full")
    assert turn(WRITTEN, BUILT, RIGHT).verdict is RIGHT.verdict
    verdict = turn(WRITTEN, refused).verdict
    assert (verdict.fault, verdict.message, verdict.hint, verdict.rule, verdict.isolation) == (
        Fault.STATIC_VIOLATION, "asm", "no asm", "asm", "full",
    )  # fmt: skip
    nothing = msgspec.structs.replace(WRITTEN, candidate=None, fault=Fault.FORMAT_ERROR, message="no block")
    assert (turn(nothing).verdict.fault, turn(nothing).verdict.message) == (Fault.FORMAT_ERROR, "no block")


def test_the_time_of_a_wrong_kernel_is_none() -> None:
    assert turn(WRITTEN, BUILT, RIGHT).timing is FAST
    assert turn(WRITTEN, BUILT, failing(Fault.CHEATING, FAST)).timing is None


def test_its_steps_are_all_stages_reports_in_the_order_of_the_funnel() -> None:
    built = BuildReport(Fault.OK, stages=(StageReport("static", Fault.OK, 0.1), StageReport("compile", Fault.OK, 0.2)))
    tried = BenchReport(Verdict(Fault.INCORRECT), stages=(StageReport("small_inputs", Fault.INCORRECT, 0.3),))
    stages = turn(WRITTEN, built, tried).stages
    assert [(s.name, s.fault) for s in stages] == [
        ("format", Fault.OK), ("static", Fault.OK), ("compile", Fault.OK), ("small_inputs", Fault.INCORRECT),
    ]  # fmt: skip
    assert [s.name for s in stages] == list(STEPS[: len(stages)])


def test_spans_are_the_work_of_each_stage_and_the_wait_before_it() -> None:
    made = record()
    assert made.spans == (
        StageSpan("generate", 100.0, 101.0, 102.0, "sampler.1"),
        StageSpan("compile", 102.0, 102.5, 103.0, "farm.1"),
        StageSpan("bench", 103.0, 103.5, 104.0, "bench.1"),
    )
    assert made.seconds == {"generate": 1.0, "compile": 0.5, "bench": 0.5, "queue": 1.0}


def test_a_stage_by_a_clock_behind_waited_for_nothing() -> None:
    late = msgspec.structs.replace(BUILT, started_at=9.0, finished_at=9.5)
    (_, span) = turn(msgspec.structs.replace(WRITTEN, started_at=10.0, finished_at=11.0), late).spans
    assert (span.queued, span.waited, span.seconds) == (9.0, 0.0, 0.5)
