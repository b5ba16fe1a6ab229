"""Findings → `Verdict`: fault, message and hint for the model, all of it text that is bounded and cleaned."""

from __future__ import annotations

from typing import Protocol

from kbrl_async.verifying.compare import Difference
from kbrl_async.verifying.session import CandidateFault
from protocols.records import Fault, Verdict

MAX_TEXT = 800
_HINTS = {
    Fault.TIMEOUT: "Look for a loop that does not end, or for far too much work.",
    Fault.ILLEGAL_ACCESS: "Check loop bounds and index arithmetic against the shapes that are passed in.",
    Fault.OUT_OF_MEMORY: "Allocate less: outputs and small scratch buffers only.",
    Fault.RUNTIME_ERROR: "Fix the Python error in ModelNew, or the arguments passed to the kernel.",
}
_RULE_HINTS = {
    "input_mutation": "Write results into a new tensor, never into the inputs.",
    "output_overwritten": "Do not keep and reuse one output buffer.",
    "tensor_subclass": "Return plain tensors.",
    "shape": "Allocate the output with the reference's shape.",
    "dtype": "Allocate the output with the reference's dtype.",
}


class Findings(Protocol):
    fault: CandidateFault | None
    passed: int
    total: int
    worst: Difference | None
    failed: list[tuple[str, Difference]]
    isolation: tuple[str, tuple[str, ...]]


def clean(text: str) -> str:
    """At most 800 printable characters."""
    printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in text).strip()
    return printable if len(printable) <= MAX_TEXT else printable[: MAX_TEXT - 2] + " …"


def verdict_of(found: Findings) -> Verdict:
    fault, message, hint, rule = Fault.OK, "", "", ""
    if found.fault is not None:
        fault, rule = Fault(found.fault.kind), found.fault.rule
        message = clean(found.fault.text)
        hint = _RULE_HINTS.get(rule, _HINTS.get(fault, ""))
    elif found.failed:
        fault = Fault.INCORRECT
        message, hint = _explain(found)
    level, missing = found.isolation
    worst = found.worst
    return Verdict(
        fault,
        found.passed,
        found.total,
        message,
        hint,
        rule,
        max_abs_error=None if worst is None else worst.worst,
        tolerance=None if worst is None else worst.allowed,
        isolation=level,
        isolation_missing=list(missing),
    )


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
