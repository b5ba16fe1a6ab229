"""One turn of one rollout, from what was asked to what came of it, in one struct: the `Record`.

::

    RolloutRequest ── Generation ── BuildReport ── BenchReport (── BenchReport) ──▶ score
     (aggregator)      generate       compile       [verify]        bench

On the wire and in the archive a record is its frames, one a stage, in this order. A stage appends its own frame and
never touches another's; the broker stores and forwards them as bytes. What fails early goes to `score` at once and
lacks the frames behind it; nothing but the request is there where nobody could write an answer. Where a run has
verifiers, what they find right has two reports: theirs, and that of the bench which timed it.

Invariants
* `Record.of` and `Record.decode` are the only ways from frames to a record: none is missing in between, doubled or out
  of its order. `encode` gives back the bytes that code of this revision wrote.
* What follows from the frames (fault, verdict, stages, spans) is computed here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec

from protocols.messages import Stage, Status
from protocols.records import (
    INFRASTRUCTURE_FAULTS,
    VERIFIER,
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    RolloutRequest,
    StageReport,
    Timing,
    Verdict,
)

Work = Generation | BuildReport | BenchReport
"""The frame of a stage."""
Frame = RolloutRequest | Work
"""For the codec; everybody else takes the `Record`."""
_STAGES: dict[type[Work], Stage] = {
    Generation: Stage.GENERATE,
    BuildReport: Stage.COMPILE,
    BenchReport: Stage.BENCH,
}
STAGES = tuple(_STAGES.values())
"""The stages that add a frame to a record, in their order."""
STEPS = ("format", "static", "compile", "small_inputs", "full_inputs", "timing")
"""The funnel: each candidate passes these in order and leaves at the first that it fails. Among its stage reports are
others too, which say nothing of it: `reference` and `sanitize`."""
PROMPT_TOO_LONG = "prompt_too_long"
"""Begins the message of a generation, and is why its rollout is lost, whose prompt the policy's context can't hold."""
_ORDER: tuple[type[Frame], ...] = (RolloutRequest, *_STAGES)
_decode = msgspec.msgpack.Decoder(Frame).decode


class RecordError(ValueError):
    """The frames are no record; `str(error)` is the cause in one line."""


class StageSpan(msgspec.Struct, frozen=True, array_like=True):
    """A stage's work on a record, in epoch seconds: queued ≤ started ≤ finished. Archives hold it, so it only grows."""

    stage: str
    queued: float
    started: float
    finished: float
    worker: str = ""

    @property
    def seconds(self) -> float:
        return max(0.0, self.finished - self.started)

    @property
    def waited(self) -> float:
        return max(0.0, self.started - self.queued)

    def since(self, origin: float) -> StageSpan:
        """The same in seconds since `origin`."""
        queued, started, finished = self.queued - origin, self.started - origin, self.finished - origin
        return StageSpan(self.stage, queued, started, finished, self.worker)


class Record(msgspec.Struct, frozen=True):
    """`status` is the header's word on how the last stage ended: another than `ok` where the infrastructure gave up."""

    request: RolloutRequest
    generation: Generation | None = None
    build: BuildReport | None = None
    bench: BenchReport | None = None
    """The last one: a verifier's, until there is a bench's."""
    status: str = Status.OK
    verified: BenchReport | None = None
    """A verifier's, where a bench's came after it."""

    @classmethod
    def of(cls, *frames: Frame, status: str = Status.OK) -> Self:
        """:raises RecordError: a frame is missing, doubled or out of its order."""
        verified = None
        if len(frames) == len(_ORDER) + 1 and _is_verifiers(frames[-2]):
            verified, frames = frames[-2], (*frames[:-2], frames[-1])
        kinds = [type(frame) for frame in frames]
        if not kinds or kinds != list(_ORDER[: len(kinds)]):
            raise RecordError(f"no record is made of the frames {', '.join(kind.__name__ for kind in kinds) or 'none'}")
        found: dict[str, Any] = dict(zip(cls.__struct_fields__, frames, strict=False))
        return cls(**found, status=str(status), verified=verified)  # type: ignore[arg-type]

    @classmethod
    def decode(cls, frames: Sequence[bytes], status: str = Status.OK) -> Self:
        """:raises RecordError: a frame can't be read, or they are no record."""
        try:
            found = [_decode(frame) for frame in frames]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RecordError(f"a frame can't be read: {error}") from None
        return cls.of(*found, status=status)

    def encode(self) -> list[bytes]:
        return [msgspec.msgpack.encode(frame) for frame in (self.request, *self.work)]

    @property
    def work(self) -> tuple[Work, ...]:
        """What the stages found, as far as it came."""
        frames = (self.generation, self.build, self.verified, self.bench)
        return tuple(frame for frame in frames if frame is not None)

    @property
    def fault(self) -> Fault:
        """How it ended; `INFRA_ERROR` too where it ends without a reason of the candidate's own."""
        if self.status != Status.OK:
            return Fault(self.status) if self.status in INFRASTRUCTURE_FAULTS else Fault.INFRA_ERROR
        failed = [fault for frame in self.work if (fault := fault_of(frame)) is not Fault.OK]
        if failed:
            return next((fault for fault in failed if fault in INFRASTRUCTURE_FAULTS), failed[0])
        return Fault.OK if self._is_whole else Fault.INFRA_ERROR

    @property
    def _is_whole(self) -> bool:
        """A verifier's turn is a prediction: nothing is built of it."""
        is_prediction = self.request.role == VERIFIER and self.generation is not None
        return is_prediction or self.bench is not None

    @property
    def is_scorable(self) -> bool:
        """Its end is the policy's own, so it earns a reward (I4)."""
        return self.fault not in INFRASTRUCTURE_FAULTS

    @property
    def lost_because(self) -> str:
        """Why it earns no reward: the header's word, or the kind of failure."""
        if self.status != Status.OK:
            return self.status
        message = self.generation.message if self.generation is not None else ""
        return PROMPT_TOO_LONG if message.startswith(f"{PROMPT_TOO_LONG}:") else Fault.INFRA_ERROR.value

    @property
    def candidate(self) -> Candidate | None:
        return self.generation.candidate if self.generation is not None else None

    @property
    def source(self) -> str:
        """Of its kernel; empty where none could be extracted."""
        return self.candidate.source if self.candidate is not None else ""

    @property
    def verdict(self) -> Verdict:
        """The bench's; of what never came there, what the stage before says in its place."""
        if self.bench is not None:
            return self.bench.verdict
        if (b := self.build) is not None:
            told = {"message": b.message, "hint": b.hint, "rule": b.rule, "isolation": b.isolation, "rules": b.rules}
            return Verdict(self.fault, **told)  # type: ignore[arg-type]
        return Verdict(self.fault, message=self.generation.message if self.generation is not None else "")

    @property
    def timing(self) -> Timing | None:
        """Of a correct candidate; nobody else's time counts (I7)."""
        return self.bench.timing if self.bench is not None and self.bench.verdict.fault is Fault.OK else None

    @property
    def stages(self) -> tuple[StageReport, ...]:
        """All steps that the candidate came to, in the order of the funnel."""
        found = () if self.generation is None else (_format(self.generation),)
        reports = [frame for frame in self.work if not isinstance(frame, Generation)]
        return found + tuple(stage for report in reports for stage in report.stages)

    @property
    def spans(self) -> tuple[StageSpan, ...]:
        """When each stage got the record, began and ended. It waits from its admission, or from the stage before."""
        ready = [self.request.admitted_at, *(frame.finished_at for frame in self.work)]
        return tuple(
            StageSpan(
                _STAGES[type(frame)],
                min(since, frame.started_at) if since else frame.started_at,
                frame.started_at,
                frame.finished_at,
                frame.worker_id,
            )
            for since, frame in zip(ready, self.work, strict=False)
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Of work by stage, and `queue`: what it waited between its stages."""
        spans, found = self.spans, dict[str, float]()
        for span in spans:
            found[span.stage] = found.get(span.stage, 0.0) + span.seconds
        return {**found, "queue": sum(span.waited for span in spans[1:])}


def _is_verifiers(frame: Frame) -> bool:
    """Whether a bench's report may follow: it is right, and was not timed."""
    return isinstance(frame, BenchReport) and frame.timing is None and frame.verdict.fault is Fault.OK


def fault_of(frame: Work) -> Fault:
    """How one stage ended."""
    return frame.verdict.fault if isinstance(frame, BenchReport) else frame.fault


def _format(generation: Generation) -> StageReport:
    """The funnel's first step, which takes no time: is there a candidate in the answer?"""
    has_none = generation.candidate is None and generation.fault is Fault.OK
    return StageReport("format", Fault.FORMAT_ERROR if has_none else generation.fault, 0.0, "taken from a response")
