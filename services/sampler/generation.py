"""From an engine's completion to the sampler's frame: the candidate in it, and which of its tokens are the kernel."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from kbrl_async.rollouts.prompts import extract, kernel_span
from kbrl_async.sampling.engine import Completion
from protocols.records import VERIFIER, Candidate, Fault, Generation, RolloutRequest

Locate = Callable[[Completion, str], tuple[int, int]]
"""Which tokens of a completion are the kernel with this source."""


def kernel_tokens(tokenizer: Any, done: Completion, source: str) -> tuple[int, int]:
    """(first token, first token behind) of the kernel; (0, 0) where it is not found in the text."""
    start, end = kernel_span(done.text, source)
    return token_span(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), done.token_ids, start, end)


def to_generation(
    done: Completion,
    request: RolloutRequest,
    worker_id: str,
    locate: Locate | None = None,
    *,
    opened_thought: bool = False,
) -> Generation:
    """The sampler's frame: the completion and the candidate in it, if one was asked for and there is one."""
    if request.role == VERIFIER:
        candidate, problem, fault = None, "", Fault.OK
    else:
        found = extract(done.text, opened_thought=opened_thought)
        candidate = Candidate(found.source, request.backend) if found.source else None
        problem, fault = found.problem, Fault.OK if found.source else Fault.FORMAT_ERROR
    span = locate(done, candidate.source) if locate is not None and candidate is not None else (0, 0)
    return Generation(
        policy_version=done.policy_version,
        prompt_ids=done.prompt_ids,
        token_ids=done.token_ids,
        logprobs=done.logprobs,
        text=done.text,
        finish_reason=done.finish_reason,
        candidate=candidate,
        fault=fault,
        message=problem,
        worker_id=worker_id,
        started_at=done.started_at,
        finished_at=done.finished_at,
        code_start=span[0],
        code_end=span[1],
        spans=done.spans if len(done.spans) > 1 else (),
    )


def token_span(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], start: int, end: int
) -> tuple[int, int]:
    """(first token, first token behind) of the characters `start` … `end` of the decoded text: every token that wrote
    one of them, and none that wrote none of them.

    Looks at a logarithmic number of prefixes: what `decode` gives of a prefix only grows with it.
    """
    places = range(len(token_ids) + 1)

    def length(count: int) -> int:
        return len(decode(token_ids[:count]))

    first = bisect_right(places, start, key=length) - 1
    behind = bisect_left(places, end, key=length)
    return (max(0, first), min(behind, len(token_ids))) if end > start else (0, 0)
