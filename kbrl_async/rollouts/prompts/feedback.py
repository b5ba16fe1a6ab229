"""What a policy is told of its last kernel, and the prompt of the next refinement turn.

::

    verdict of a turn ─ feedback_of ─▶ Feedback ─ render_turn ─▶ prompt of the next turn

Invariants
* Thoughts are dropped: only the extracted kernel goes on, whole or not at all.
* A prompt that exceeds its budget loses examples first, then the profile, lines of the error, the kernel, all of the
  feedback.
* Error text is at most 800 characters and ten lines, and holds no frame of ours (the reports clean it).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from kbrl_async.kernels.backends import backend as load_backend
from kbrl_async.rollouts.prompts.budget import UNBOUNDED, TokenBudget
from kbrl_async.rollouts.prompts.templates import prompt_forms
from protocols.records import Fault, Problem, Timing, Verdict

KERNEL_CHARACTERS = 20_000
"""Of a kernel that is shown again; a longer one is not shown."""
ERROR_CHARACTERS = 800
ERROR_LINES = 10
WORKLOADS = 8
"""Named with their speedups, the slowest first."""
_NOISE = re.compile(r"^(In file included|compilation terminated|ninja:|\s*\|)|note: ")


class Feedback(msgspec.Struct, frozen=True):
    """One turn's result as the model reads it."""

    fault: Fault
    category: str
    """format, static, compile, runtime, resources, mismatch, cheating, unproven, slow or fast."""
    error: str = ""
    hint: str = ""
    passed: int = 0
    total: int = 0
    speedup: float | None = None
    limits: str = ""
    """What limits a correct kernel, where the timing says so."""
    kernel: str = ""
    """The source that this is about; empty where none could be extracted."""
    profile: str = ""
    """What limits a correct kernel, see `kernels.profile`; empty where nobody asked."""


CATEGORIES = {
    Fault.FORMAT_ERROR: "format",
    Fault.STATIC_VIOLATION: "static",
    Fault.COMPILE_ERROR: "compile",
    Fault.RUNTIME_ERROR: "runtime",
    Fault.ILLEGAL_ACCESS: "runtime",
    Fault.TIMEOUT: "resources",
    Fault.OUT_OF_MEMORY: "resources",
    Fault.INCORRECT: "mismatch",
    Fault.CHEATING: "cheating",
    Fault.UNPROVEN: "unproven",
}
_HINTS = {
    "format": "Answer with one fenced Python file that defines ModelNew with a forward.",
    "static": "Only a kernel of your own may compute; keep to the allowed imports and calls.",
    "compile": "Fix the first error; the others may follow from it.",
    "runtime": "Check what forward passes to the kernel, and every index against the shapes.",
    "resources": "Look for a loop that does not end, or for far too much work or memory.",
    "mismatch": "Check the formula step by step against the module, then the edges of every loop.",
    "cheating": "Compute the result anew from the inputs in every call, with your own kernel.",
    "unproven": "Its answer is right, and nothing shows that your kernel makes it: let it do most of the work.",
    "slow": "It is right. Now make it faster: pass over memory once, fuse loops, vectorise.",
    "fast": "It is right and faster than PyTorch. Keep it right and make it faster still.",
}


def feedback_of(verdict: Verdict, timing: Timing | None, kernel: str, backend: str, profile: str = "") -> Feedback:
    """Of a kernel that was verified, or failed before; never of what infrastructure lost."""
    category = CATEGORIES.get(verdict.fault) or ("fast" if timing is not None and timing.is_faster else "slow")
    return Feedback(
        verdict.fault,
        category,
        shortened(verdict.message),
        verdict.hint or load_backend(backend).hints.get(category, _HINTS[category]),
        verdict.passed,
        verdict.total,
        timing.speedup if timing else None,
        _limits(timing),
        kernel,
        profile,
    )


def shortened(message: str) -> str:
    """The lines of an error that matter, at most ten, at most 800 characters."""
    lines = [line.rstrip() for line in message.splitlines() if line.strip() and not _NOISE.search(line)]
    text = "\n".join((lines or message.splitlines())[:ERROR_LINES])
    return text if len(text) <= ERROR_CHARACTERS else text[: ERROR_CHARACTERS - 2] + " …"


def _limits(timing: Timing | None) -> str:
    if timing is None:
        return ""
    share = timing.roofline
    if timing.workloads:
        slowest = sorted(timing.workloads, key=lambda one: one.speedup)[:WORKLOADS]
        return "by workload " + ", ".join(f"{one.name} {one.speedup:.3g}×" for one in slowest)
    spent = f"{timing.candidate_ms:.3g} ms against {timing.reference_ms:.3g} ms of PyTorch"
    return spent if share is None else f"{spent}, {share:.0%} of what the memory and arithmetic of this machine allow"


def render_turn(
    option: str,
    problem: Problem,
    feedback: Feedback,
    contract: str = "c",
    budget: TokenBudget = UNBOUNDED,
    hardware: str = "",
) -> str:
    """The prompt of the turn after `feedback`, in the same template as the first turn's and within `budget`.

    Where not even the shortest feedback fits, the rollout is started afresh: the first turn's prompt.
    """
    firsts = list(prompt_forms(option, problem, contract, hardware))
    forms = _compact_forms(firsts[-1], feedback) if option == "compact" else _forms(firsts, feedback)
    return budget.first_fitting(forms)


def _forms(firsts: Sequence[str], feedback: Feedback) -> Iterator[str]:
    """From all that is known to nothing but the problem: examples go first."""
    lines = feedback.error.splitlines()
    first = firsts[-1]
    if len(feedback.kernel) <= KERNEL_CHARACTERS:
        for with_examples in firsts[:-1]:
            yield _format(with_examples, feedback, feedback.kernel, lines)
    kernels = [feedback.kernel] if len(feedback.kernel) <= KERNEL_CHARACTERS else []
    if feedback.profile:
        for kernel in kernels:
            yield _format(first, feedback, kernel, lines)
        feedback = msgspec.structs.replace(feedback, profile="")
    for kernel in [*kernels, *([""] if feedback.kernel else [])]:
        for kept in sorted({len(lines), len(lines) // 2, min(1, len(lines)), 0}, reverse=True):
            yield _format(first, feedback, kernel, lines[:kept])
    yield first


def _format(first: str, feedback: Feedback, kernel: str, error: Sequence[str]) -> str:
    parts = [first]
    if kernel:
        parts.append(f"Your last answer:\n\n```python\n{kernel.rstrip()}\n```\n")
    elif feedback.kernel:
        parts.append("Your last answer is too long to be shown again.\n")
    return "\n".join([*parts, render_result(feedback, error)])


def render_result(feedback: Feedback, error: Sequence[str] | None = None) -> str:
    """What became of the last answer, and what to do: where a conversation holds the rest. `error`: the lines of it
    that there is room for."""
    lines = feedback.error.splitlines() if error is None else error
    parts = ["Its result:\n" + "\n".join(_status(feedback)) + "\n"]
    if feedback.profile:
        parts.append(f"What limits it:\n{feedback.profile}\n")
    if lines:
        parts.append("```\n" + "\n".join(lines) + "\n```\n")
    return "\n".join([*parts, f"{feedback.hint} Answer with the whole improved file.\n"])


def _compact_forms(first: str, feedback: Feedback) -> Iterator[str]:
    """The small policy's corpus holds feedback with its attempt only, or none."""
    if len(feedback.kernel) <= KERNEL_CHARACTERS:
        yield compact_turn(first, feedback)
    yield first


_NOT_BUILT = frozenset({Fault.FORMAT_ERROR, Fault.STATIC_VIOLATION, Fault.COMPILE_ERROR})


def _status(feedback: Feedback) -> Iterator[str]:
    """One fact a line: a model finds each at the same place in every turn."""
    yield f"Compiled: {'no' if feedback.fault in _NOT_BUILT else 'yes'}"
    if feedback.total:
        yield f"Tests passed: {feedback.passed} of {feedback.total}"
    if feedback.fault is Fault.OK:
        speed = "not timed" if feedback.speedup is None else f"{feedback.speedup:.2f}×"
        yield f"Speedup: {speed}{f' ({feedback.limits})' if feedback.limits else ''}"
    else:
        yield f"Failed as: {feedback.fault.value.replace('_', ' ')}"


def compact_turn(first: str, feedback: Feedback) -> str:
    """For the project's small policy: problem, attempt, what became of it, and the line that the compiler names, in a
    form that its corpus holds too.

    >>> compact_turn("P### ModelNew\\n", Feedback(Fault.INCORRECT, "mismatch", kernel="K\\n"))
    'P### Attempt\\nK\\n### Feedback: mismatch\\n### ModelNew\\n'
    """
    body = first.removesuffix("### ModelNew\n")
    kernel = feedback.kernel.rstrip() + "\n" if feedback.kernel else ""
    return f"{body}### Attempt\n{kernel}### Feedback: {feedback.category}\n{named_line(feedback)}### ModelNew\n"


_PLACE = re.compile(r"kernel\.\w+[:(](\d+)")
_SOURCE = re.compile(r'"""(.*?)"""', re.DOTALL)


def named_line(feedback: Feedback) -> str:
    """The line of the kernel's source that the first error is about, line end included; empty where none is known."""
    place, source = _PLACE.search(feedback.error), _SOURCE.search(feedback.kernel)
    if place is None or source is None:
        return ""
    return next(iter(source[1].split("\n")[int(place[1]) - 1 :][:1]), "") + "\n"
