"""Findings → `Verdict`: fault, message and hint for the model, all of it text that is bounded and cleaned; and what was
measured → `Timing`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kbrl_async.errors import InfraError
from kbrl_async.kernels.syntax.where import located
from kbrl_async.kernels.timing import Measured, Recipe
from kbrl_async.kernels.verify.compare import Difference
from kbrl_async.kernels.verify.session import CandidateFault
from protocols.records import Fault, Timing, Verdict

MAX_TEXT = 800
_HINTS = {
    Fault.TIMEOUT: "Look for a loop that does not end, or for far too much work.",
    Fault.ILLEGAL_ACCESS: "Check loop bounds and index arithmetic against the shapes that are passed in.",
    Fault.OUT_OF_MEMORY: "Allocate less: outputs and small scratch buffers only.",
    Fault.RUNTIME_ERROR: "Fix the Python error in ModelNew, or the arguments passed to the kernel.",
}
RULE_HINTS = {
    "input_mutation": "Write results into a new tensor, never into the inputs.",
    "output_overwritten": "Allocate the output in each call; a kept buffer passes where outputs are set to kept.",
    "tensor_subclass": "Return plain tensors.",
    "shape": "Allocate the output with the reference's shape.",
    "dtype": "Allocate the output with the reference's dtype.",
    "layout": "Write every element of the output into memory of its own.",
    "structure": "Return what the reference returns: the same number of tensors in the same containers.",
    "output_alias": "Allocate the output; never return an input or a view of one.",
    "state_carried": "Depend on nothing that an earlier call left behind: no accumulating buffers, no cached results.",
    "not_deterministic": "Add in a fixed order: no atomics on floating-point numbers.",
    "forbidden_operator": "Do this part in your own kernel: the problem forbids the library's operator.",
    "no_own_kernel": "Launch your own kernel in forward, without a fallback to torch.",
    "decoy_kernel": "Let your own kernel compute the result; torch may only do sub-steps.",
    "reference_copied": "Write a kernel of your own: the reference's code earns nothing.",
    "wrong_when_timed": "Compute every call in full: timed calls are checked like all others.",
    "side_stream": "Let torch's current stream wait for every stream that you use, before forward returns.",
    "forged_time": "Do not replace functions of the bench; work only inside forward.",
    "tampered": "Do not replace functions of Python, torch or the launcher.",
    "phase": "Do the same work in every call: one that is timed alone must not differ from others.",
    "slot_batched": "Write the outputs of this call only: a forward has no business with inputs of others.",
    "stray_write": "Write inside of your own outputs and scratch buffers only: check bounds and pointers.",
    "impossible_time": "Compute all of it in forward: no hardware is that fast.",
    "output": "Return a tensor whose memory is still there after forward: one that torch allocated.",
    "forged_result": "Let forward return its result; write to no file descriptor.",
}


class Findings(Protocol):
    fault: CandidateFault | None
    passed: int
    near: int
    own_share: float | None
    total: int
    worst: Difference | None
    failed: list[tuple[str, Difference]]
    isolation: tuple[str, tuple[str, ...]]
    kernelbench: bool | None
    carries_state: bool
    evidence: str
    trust: str
    trust_reason: str

    @property
    def tolerance_note(self) -> str: ...


def clean(text: str) -> str:
    """At most 800 printable characters."""
    printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in text).strip()
    return printable if len(printable) <= MAX_TEXT else printable[: MAX_TEXT - 2] + " …"


def verdict_of(found: Findings) -> Verdict:
    """`OK` only where every set passed and nothing failed: here, and nowhere else.

    :raises InfraError: what was found contradicts itself.
    """
    fault, message, hint, rule = Fault.OK, "", "", ""
    if found.fault is not None:
        fault, rule = found.fault.kind, found.fault.rule
        message = clean(found.fault.text)
        hint = RULE_HINTS.get(rule, _HINTS.get(fault, ""))
    elif found.failed:
        fault = Fault.INCORRECT
        message, hint = _explain(found)
        if found.carries_state:
            rule, hint = "state_carried", RULE_HINTS["state_carried"]
            message = f"the same inputs were answered rightly once and wrongly another time. {message}"
    elif not 0 < found.passed == found.total:
        raise InfraError(
            f"{found.passed} of {found.total} input sets passed and nothing failed", "This is a bug of ours"
        )
    level, missing = found.isolation
    worst = found.worst
    return Verdict(
        fault,
        found.passed,
        found.total,
        message,
        hint,
        rule,
        clean(found.evidence or message),
        max_abs_error=None if worst is None else worst.worst,
        tolerance=None if worst is None else worst.allowed,
        isolation=level,
        isolation_missing=list(missing),
        kernelbench=_kernelbench(found),
        tolerance_note=found.tolerance_note,
        trust=found.trust,
        trust_reason=clean(found.trust_reason),
        near=found.near,
        own_share=found.own_share,
    )


def placed(verdict: Verdict, source: str) -> Verdict:
    """With the line of the candidate that its fault is about, where the message names none."""
    if verdict.fault is Fault.OK:
        return verdict
    message = located(verdict.message, source, verdict.rule or verdict.fault.value, MAX_TEXT)
    return msgspec.structs.replace(verdict, message=message)


def _kernelbench(found: Findings) -> bool | None:
    """Its comparison knows no rules, but a run that ended or has another shape is wrong there too."""
    is_right = found.fault is not None and found.fault.kind in (Fault.CHEATING, Fault.UNPROVEN)
    if found.fault is not None and not is_right and found.kernelbench is None:
        return False
    return found.kernelbench


def _explain(found: Findings) -> tuple[str, str]:
    names = ", ".join(sorted({name for name, _ in found.failed}))
    name, worst = max(found.failed, key=lambda item: item[1].wrong / max(1, item[1].total))
    where = f"[{', '.join(map(str, worst.where))}]"
    message = (
        f"{worst.wrong} of {worst.total} values are wrong on the {name} inputs; worst at {where}: got {worst.got:.6g}, "
        f"expected {worst.expected:.6g}, allowed difference {worst.allowed:.3g}. {found.passed} of {found.total} input "
        f"sets passed; wrong: {names}."
    )
    if worst.nans:
        return message + f" {worst.nans} values are NaN.", "Guard against 0/0, inf−inf and uninitialised memory."
    share = worst.wrong / max(1, worst.total)
    if share > 0.99:
        return message, "Nearly everything is wrong: check the formula, and that every output element is written."
    if share < 0.1:
        return message, "Few values are wrong: check the edges, tails and special cases."
    return message, "Check the formula, and on which inputs it goes wrong."


def timing_of(measured: Measured, recipe: Recipe, method: str, hardware: str, clock_mhz: float | None) -> Timing:
    """What every stopwatch says in the same way; `load` is the measurement's own."""
    interval = measured.interval
    return Timing(
        measured.n,
        interval.median,
        interval.lo,
        interval.hi,
        measured.candidate_ms,
        measured.reference_ms,
        recipe.confidence,
        method,
        measured.stopped,
        hardware,
        clock_mhz,
        load=measured.load,
        resolution=measured.share,
        rejected=measured.rejected,
        spent_s=measured.spent_s,
        ratios=measured.ratios,
    )
