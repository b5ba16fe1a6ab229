"""Bodies of other projects' clients, as our questions and from our answers. Pure; each only what its client reads.

* KernelGYM: `POST /evaluate`, `GET /status/{id}`, `GET /results/{id}`.
* slime: `--rm-type remote_rm --rm-url …`: `{prompt, response, label}` to a number.
* OpenRLHF: `--remote_rm_url …`: `{query, prompts, labels}` to `{rewards, scores}`.

In the last two a `label` is a problem's id, or the reference's source (anything with a line break).
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kbrl_async.serving.documents import Answer, Ask, ClassName, Priority

# ── KernelGYM ───────────────────────────────────────────────────────────────────────────────────────────────────────

_BACKENDS = {"triton": "triton", "cuda": "cuda"}
"""Its names of ours; any other is guessed."""
_STATUS = {"queued": "pending", "running": "processing", "done": "completed", "failed": "failed"}
_ERRORS = {
    "format_error": "VALIDATION_ERROR",
    "static_violation": "VALIDATION_ERROR",
    "compile_error": "COMPILATION_ERROR",
    "incorrect": "CORRECTNESS_ERROR",
    "timeout": "TIMEOUT_ERROR",
    "out_of_memory": "RESOURCE_ERROR",
}


class Evaluate(msgspec.Struct, frozen=True):
    """KernelGYM's request; fields that it may have beyond these change nothing here."""

    task_id: Annotated[str, Meta(min_length=1, max_length=100)]
    reference_code: str
    kernel_code: str
    backend: str = "triton"
    timeout: Annotated[float, Meta(ge=1, le=3600)] = 300
    priority: Priority = "normal"
    force_refresh: bool = False
    entry_point: ClassName = "Model"
    run_performance: bool | None = None
    measure_performance: bool | None = None

    def ask(self) -> Ask:
        timed = self.measure_performance if self.run_performance is None else self.run_performance
        return Ask(
            candidate=self.kernel_code,
            reference=self.reference_code,
            entry_point=self.entry_point,
            backend=_BACKENDS.get(self.backend, "") if f"import {self.backend}" in self.kernel_code else "",
            timing=timed is not False,
            priority=self.priority,
            fresh=self.task_id if self.force_refresh else "",
        )


def task_status(task_id: str, found: Answer) -> dict[str, Any]:
    progress = {"queued": 0.0, "running": 50.0}.get(found.status, 100.0)
    return {
        "task_id": task_id,
        "status": _STATUS[found.status],
        "progress": progress,
        "estimated_completion": None,
        "queue_position": found.position,
        "assigned_device": (found.verdict or {}).get("device"),
        **({"error_message": found.error.cause} if found.error else {}),
    }


def evaluation(task_id: str, found: Answer) -> dict[str, Any]:
    """KernelGYM's result. Times are milliseconds; `speedup` is the lower end of its interval, as it is claimed."""
    document = found.verdict or {}
    timing, verdict = document.get("timing") or {}, document.get("verdict") or {}
    wrong = found.fault not in (None, "ok")
    message = found.error.cause if found.error else verdict.get("message", "") if wrong else ""
    return {
        "task_id": task_id,
        "status": _STATUS[found.status],
        "compiled": document.get("compiled"),
        "correctness": found.ok,
        "decoy_kernel": found.fault == "cheating" if found.fault else None,
        "reference_runtime": timing.get("reference_ms"),
        "kernel_runtime": timing.get("candidate_ms"),
        "speedup": timing.get("lo", 0.0) if found.fault else None,
        "metadata": {
            "kbrl": msgspec.to_builtins(found),
            "backend": document.get("backend"),
            **_coverage(timing, verdict),
        },
        "error_message": message or None,
        "error_code": ("SYSTEM_ERROR" if found.error else _ERRORS.get(found.fault or "", "RUNTIME_ERROR"))
        if wrong or found.error
        else None,
        "submitted_at": _iso(found.submitted_at),
        "completed_at": _iso(found.finished_at),
        "processing_time": found.seconds,
    }


def _coverage(timing: dict[str, Any], verdict: dict[str, Any]) -> dict[str, Any]:
    """What its coverage reward divides: of a call's microseconds those in own kernels, where the verdict says so."""
    share = verdict.get("own_share")
    if share is None or not timing:
        return {}
    us = 1000 * timing["candidate_ms"]
    return {"custom_kernel_cuda_time_in_profiling_us": share * us, "total_kernel_run_time_in_profiling_us": us}


def _iso(seconds: float | None) -> str | None:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat() if seconds else None


# ── slime and OpenRLHF ──────────────────────────────────────────────────────────────────────────────────────────────


class RemoteRm(msgspec.Struct, frozen=True):
    """slime's body."""

    response: str
    label: str
    prompt: Any = None

    def ask(self, preset: str) -> Ask:
        return labelled(self.response, self.label, preset)


class RewardQuery(msgspec.Struct, frozen=True):
    """OpenRLHF's body: `query[i]` is prompt and answer in one text."""

    query: Annotated[list[str], Meta(min_length=1, max_length=256)]
    prompts: list[str]
    labels: list[str]

    def asks(self, preset: str) -> list[Ask]:
        """:raises ValueError: the lists are not of one length."""
        triples = zip(self.query, self.prompts, self.labels, strict=True)
        return [labelled(answer_in(query, prompt), label, preset) for query, prompt, label in triples]


def answer_in(query: str, prompt: str) -> str:
    """What follows the prompt, which special tokens may stand before."""
    place = query.find(prompt) if prompt else -1
    return query[place + len(prompt) :] if place >= 0 else query


def labelled(response: str, label: str, preset: str) -> Ask:
    """A model's answer to the problem that a data set's label names."""
    is_source = "\n" in label
    reference, problem = (label, "") if is_source else ("", label)
    return Ask(candidate=response, problem=problem, reference=reference, response=True, preset=preset)
