"""What goes over HTTP: a question, what became of it, and the answer that is made of both.

Invariants
* An unknown field, a wrong type or a value out of range is refused with its place, never ignored.
* No name of a request leads to an import or a file: presets and backends are names of ours, problems are ids.
* `reward` is a number only where the candidate earned it: with a fault of the host or the problem it is null.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kbrl_async.errors import UserError
from kbrl_async.kernels.funnel.result import Result
from kbrl_async.kernels.settings import Rules
from kbrl_async.rollouts.rewards.presets import Preset, find_presets, reward_of
from kbrl_async.rollouts.rewards.results import DEFAULT, record_of
from kbrl_async.rollouts.settings import REWARD_PRESETS, Reward

PRESETS = tuple(name for name in REWARD_PRESETS.ours if name != "auto")
"""Those of ours that stay the same; a name that leads to an import is no client's to give."""
Owner = Literal["candidate", "problem", "host"]
Priority = Literal["high", "normal", "low"]
Status = Literal["queued", "running", "done", "failed"]
ClassName = Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*$", max_length=100)]
Wait = Annotated[float, Meta(ge=0, le=3600)]


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a verdict is paid beyond the preset: settings `reward.observed_speedup` and `reward.unproven`."""

    observed_speedup: Annotated[float, Meta(gt=0)] | None = Reward().observed_speedup
    unproven: Annotated[float, Meta(ge=0, le=1)] = Reward().unproven


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One candidate against one problem: a `problem` id of the service, or the `reference` itself."""

    candidate: str
    """A Python file with `ModelNew`, or a model's whole answer."""
    problem: Annotated[str, Meta(max_length=200)] = ""
    """As `GET /v1/problems` names it."""
    reference: str = ""
    """Source in KernelBench's contract."""
    entry_point: ClassName = "Model"
    """The reference's class; the candidate's has `New` behind it."""
    backend: str = ""
    """Empty: guessed from what the candidate imports and calls."""
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    timing: bool = True
    """Time what is correct."""
    response: bool | None = None
    """Whether the candidate is a model's answer; null: looked at its text."""
    preset: str = DEFAULT
    policy: Policy = Policy()
    priority: Priority = "normal"
    """Among the same client's."""
    wait_s: Wait | None = None
    """How long the answer may be waited for; null: as the service has it; 0: the job's id comes at once."""
    fresh: Annotated[str, Meta(max_length=100)] = ""
    """Any text that was not used before has the same question verified anew."""
    rules: Rules | None = None
    """By which it has to be judged: refused by a service that judges by others; null: as the service does."""

    @property
    def id(self) -> str:
        """By content: the same question is the same job, whoever asks and however often."""
        asked = (self.problem, self.reference, self.entry_point, self.candidate, self.backend, self.precision)
        more = ("strict",) if self.rules == "strict" else ()
        parts = (*asked, str(self.timing), str(self.response), self.fresh, *more)
        return hashlib.sha256("\0".join(f"{len(part)} {part}" for part in parts).encode()).hexdigest()[:32]

    @property
    def about(self) -> str:
        """The problem alone, by content."""
        parts = (self.problem, self.reference, self.entry_point, self.precision)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Many questions; answers come in their order, or over a stream as they are there."""

    requests: Annotated[list[Ask], Meta(min_length=1, max_length=256)]
    wait_s: Wait | None = None


class Problems(msgspec.Struct, frozen=True):
    """What `problem` may name."""

    problems: list[dict[str, Any]]


class Trouble(msgspec.Struct, frozen=True):
    """Why there is no verdict."""

    cause: str
    cure: str = ""


class Refusal(msgspec.Struct, frozen=True):
    """The body of every answer of 4xx and 5xx."""

    error: Trouble


class Outcome(msgspec.Struct, frozen=True):
    """What verifying gave: a result, or whose fault it is that there is none."""

    result: Result | None = None
    owner: Literal["problem", "host", ""] = ""
    trouble: Trouble | None = None
    seconds: float = 0.0


class Job(msgspec.Struct):
    """One question on its way. Times are epoch seconds."""

    id: str
    client: str
    ask: Ask
    submitted_at: float
    started_at: float = 0.0
    finished_at: float = 0.0
    tries: int = 0
    outcome: Outcome | None = None

    @property
    def status(self) -> Status:
        if self.outcome is not None:
            return "done" if self.outcome.result is not None else "failed"
        return "running" if self.started_at else "queued"


class Answer(msgspec.Struct, frozen=True):
    """How a job stands, and its verdict once there is one."""

    id: str
    status: Status
    ok: bool | None = None
    """Correct; null while nothing is known."""
    fault: str | None = None
    fault_owner: Owner | None = None
    """Null while nothing is known, and where nothing is wrong."""
    reward: float | None = None
    preset: str = ""
    position: int | None = None
    """While it is queued: how many wait, it included."""
    verdict: dict[str, Any] | None = None
    """The document of `kbrl verify --json`."""
    error: Trouble | None = None
    submitted_at: float = 0.0
    finished_at: float | None = None
    seconds: float | None = None
    """That the verification took, without the queue."""


def answer(job: Job, ask: Ask, position: int | None = None) -> Answer:
    """`ask` says by which preset; it may be a later one than that which made the job."""
    outcome = job.outcome
    if outcome is None:
        return Answer(job.id, job.status, preset=ask.preset, position=position, submitted_at=job.submitted_at)
    times: dict[str, Any] = {"submitted_at": job.submitted_at, "finished_at": job.finished_at}
    times["seconds"] = outcome.seconds
    result = outcome.result
    if result is None:
        owner: Owner = outcome.owner or "host"
        return Answer(job.id, "failed", fault_owner=owner, preset=ask.preset, error=outcome.trouble, **times)
    return Answer(
        job.id,
        "done",
        ok=result.ok,
        fault=result.fault.value,
        fault_owner=None if result.ok else "candidate",
        reward=reward_for(ask, result),
        preset=ask.preset,
        verdict=result.document(),
        **times,
    )


def reward_for(ask: Ask, result: Result) -> float:
    return reward_of(record_of(result, source=ask.candidate, response=ask.candidate), preset_of(ask))


def preset_of(ask: Ask) -> Preset:
    """:raises UserError: no such preset of ours, or one that goes by the progress of a run."""
    if ask.preset not in PRESETS:
        raise UserError(f"there is no preset {ask.preset!r}", f"Choose among {', '.join(PRESETS)}")
    return _preset(ask.preset, ask.policy)


@functools.lru_cache(maxsize=256)
def _preset(name: str, policy: Policy) -> Preset:
    """Looked up once: parts may come from installed packages, and to look through these takes tens of milliseconds."""
    return find_presets(Reward(preset=name, observed_speedup=policy.observed_speedup, unproven=policy.unproven))[0]


def as_classes(ask: Ask) -> Ask:
    """The same question about classes `Model` and `ModelNew`."""
    name = ask.entry_point
    if name == "Model":
        return ask
    return msgspec.structs.replace(
        ask,
        reference=f"{ask.reference}\n\nModel = {name}\n" if ask.reference else "",
        candidate=f"{ask.candidate}\n\nModelNew = {name}New\n" if "ModelNew" not in ask.candidate else ask.candidate,
        entry_point="Model",
    )
