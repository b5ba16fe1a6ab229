"""Whether a candidate's own kernels do the work: rules over what its process traced and what the trusted side compared.

::

    recorded run ─▶ no own launch: no_own_kernel        share of CPU time next to nothing: decoy_kernel (one fact)
    muted run    ─▶ outputs still right (compared here): decoy_kernel    an operator had the answer alone: decoy_kernel

A library call for a sub-step is honest: a product from the library with an own epilogue passes, however small the
epilogue's share. What fails is a kernel that the answer does not need.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from kbrl_async.kernels.verify.operators import computes
from kbrl_async.kernels.verify.wire import Trace
from protocols.records import Fault

MIN_SHARE = 0.002
MIN_LIBRARY_NS = 300_000
"""Under this, times are those of calling, not of computing, and a share says nothing."""


IN_PLACE = "the library's change of an input"
"""Instead of an operator: what lies where forward writes over an input."""


class Finding(msgspec.Struct, frozen=True):
    """A broken rule, with what shows it."""

    rule: str
    text: str
    evidence: str
    fault: Fault = Fault.CHEATING
    """An accusation needs two facts, such as a library that did the work and own kernels that were not needed for it;
    with one of them a candidate is `UNPROVEN`."""


def of_recorded(
    trace: Trace, has_times: bool = True, is_closed: bool = False, is_extension: bool = False
) -> Finding | None:
    """What a run says by itself; None where the own kernels may well do the work.

    `has_times`: those of its trace are of the work itself; of a GPU's they are not. `is_closed`: as `Backend` says.
    `is_extension`: it may launch or call what is its own where nobody counts.
    """
    if trace.tampered:
        text = f"the candidate replaced {trace.tampered}"
        return Finding("tampered", text, f"{trace.tampered} is another object than before the candidate was loaded")
    if not trace.launches:
        return _without_launches(trace, is_extension)
    calls = [name for name in trace.inside if computes(name)]
    if calls and is_closed:
        text = f"an own kernel calls {calls[0]}: C code that reaches into the library"
        return Finding("decoy_kernel", text, evidence(trace))
    own, library = own_ns(trace), library_ns(trace)
    if has_times and library >= MIN_LIBRARY_NS and own < MIN_SHARE * (own + library):
        text = f"own kernels took {100 * own / (own + library):.2f} % of the computing time"
        text += ": nothing shows that they do the work"
        return Finding("decoy_kernel", text, evidence(trace), Fault.UNPROVEN)
    return None


def _without_launches(trace: Trace, is_extension: bool) -> Finding:
    shown = f"own launches: none; {_library(trace)}"
    if not any(computes(name) for book in (trace.ops, trace.inside) for name in book):
        text = (
            "no launch of a kernel of the candidate's own was seen, and none of the library's: its work is not proven"
        )
        return Finding("no_own_kernel", text, shown, Fault.UNPROVEN)
    if is_extension:
        text = (
            "forward was not seen to launch or call what is its own, and the library computes: its work is not proven"
        )
        return Finding("no_own_kernel", text, shown, Fault.UNPROVEN)
    text = "forward launched none of the candidate's own kernels: the result comes from the library"
    return Finding("no_own_kernel", text, shown)


def of_backward(has_kernels: bool) -> Finding:
    """Gradients are right without an own kernel that upstream gradients reach; or there is none."""
    if has_kernels:
        text = "the gradients are the same with the candidate's own kernels of the backward switched off"
        return Finding("decoy_kernel", text, "own kernels of the backward off, gradients right")
    text = "no own kernel takes part in the backward: the gradients come from the library"
    return Finding("no_own_kernel", text, "upstream gradients reach no own launch")


def unseen_backward(reason: str) -> Finding:
    """Which launches are the backward's is only known of a replay."""
    text = f"nothing shows that own kernels make the gradients, as the candidate could not be replayed: {reason}"
    return Finding("no_own_kernel", text, reason, Fault.UNPROVEN)


def of_shadows(operator: str) -> Finding:
    """An operator had the answer, of nothing that own code had written."""
    text = f"{operator} gives the answer without anything that own code writes: that may have done none of the work"
    return Finding("no_own_kernel", text, f"of what the library made alone {operator} made the answer", Fault.UNPROVEN)


def unseen(reason: str) -> Finding:
    """Neither that own kernels are needed nor that they are not."""
    text = f"nothing shows that the candidate's own kernels are needed: {reason}"
    return Finding("no_own_kernel", text, reason, Fault.UNPROVEN)


def failed(text: str) -> Finding:
    """By a call without own kernels that failed: forward may have been told to, by what it saw of them."""
    return unseen(f"the call without them ended before it had an answer: {text}")


def one_answer() -> Finding:
    """Whoever made it, it would be right."""
    return unseen("without them the answer is right, but all inputs have the same one here")


_FAMILIES = {
    "matmul": ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"),
    "linear": ("mm", "addmm", "linear"),
    "attention": ("scaled_dot_product_attention", "scaled_dot_product_flash_attention_for_cpu"),
}
"""Names that people know, of operators that the library calls otherwise."""


def of_forbidden(trace: Trace, names: Collection[str]) -> Finding | None:
    """Whether a run called an operator that the problem forbids: by name, with `native_`, or by family."""
    meant = {member for name in names for member in (name, *_FAMILIES.get(name, ()))}
    for called in (*trace.ops, *trace.inside):
        plain = called.removeprefix("aten::").strip("_")
        if plain in meant or plain.removeprefix("native_") in meant:
            text = f"forward calls {called}, which the problem forbids"
            return Finding("forbidden_operator", text, evidence(trace))
    return None


def of_muted(trace: Trace | None, is_still_right: bool) -> Finding | None:
    """What a run without own kernels says. `is_still_right`: as the trusted side found by comparing."""
    if is_still_right:
        text = "the outputs are the same with all of the candidate's own kernels switched off: they are decoys"
        return Finding(
            "decoy_kernel", text, "own kernels off, outputs right" + (f"; {_library(trace)}" if trace else "")
        )
    return passed_on(trace.answered) if trace is not None and trace.answered else None


def passed_on(operator: str) -> Finding:
    """This operator's result was the answer, in whatever layout."""
    text = f"{operator} computes the whole answer, the own kernel only passes it on"
    return Finding("decoy_kernel", text, f"own kernels off, the result of {operator} is the answer")


def own_ns(trace: Trace) -> int:
    """CPU time in own kernels, without the library calls that they made."""
    return max(0, sum(spent for _, spent in trace.launches.values()) - sum(spent for _, spent in trace.inside.values()))


def library_ns(trace: Trace) -> int:
    return sum(spent for book in (trace.ops, trace.inside) for name, (_, spent) in book.items() if computes(name))


def evidence(trace: Trace) -> str:
    """One line: own kernels and operators with counts and microseconds."""
    own = ", ".join(f"{name} ×{count} {spent / 1000:.0f} µs" for name, (count, spent) in trace.launches.items())
    return f"own kernels: {own or 'none'}; {_library(trace)}"


def _library(trace: Trace) -> str:
    ops = [
        f"{name} ×{count} {spent / 1000:.0f} µs"
        for book in (trace.ops, trace.inside)
        for name, (count, spent) in book.items()
        if computes(name)
    ]
    return f"library operators: {', '.join(ops[:12]) or 'none'}"
