"""What verifying one candidate gave: every stage's report, the verdict, the timing, and what sanitizers found."""

from __future__ import annotations

import html
from typing import Any

import msgspec

from kbrl_async.kernels.backends.checks.arithmetic import MEANS
from kbrl_async.kernels.backends.sanitize.parts import Sanitized
from kbrl_async.kernels.backends.sanitize.reports import SanitizerFinding
from kbrl_async.kernels.problems.cases import workload_lines
from protocols.records import BuildReport, Fault, StageReport, Timing, Verdict

DOCUMENT_VERSION = 1
_CORES = "candidate 1, reference 1: each is one thread on one core, OpenMP and PyTorch's own threads included"
_NOT_RUN = "nothing of the candidate was run"
_SANITIZER_HINT = "The results were right by luck: stay inside every buffer and inside what the language defines."


class Result(msgspec.Struct, frozen=True):
    """One candidate against one problem. `verdict` is always there: what failed early has it from that stage."""

    problem_id: str
    backend: str
    device: str
    verdict: Verdict
    stages: tuple[StageReport, ...]
    timing: Timing | None = None
    toolchain: str = ""
    build_isolation: str = ""
    origin: str = "file"
    """`"file"`, or `"response"` where the candidate was taken out of a model's answer."""
    sanitizers: tuple[str, ...] = ()
    """Those that ran to their end."""
    findings: tuple[SanitizerFinding, ...] = ()
    """What they found."""
    arithmetic: tuple[str, ...] = ()
    """Compiler options of the candidate by which its arithmetic may differ from what its source says."""
    not_sanitized: str = ""
    """Why one that was asked for could not say anything, or not about everything."""
    missing_baselines: dict[str, str] = {}
    """Why one that was asked for could not be had, by its name."""

    @property
    def fault(self) -> Fault:
        return self.verdict.fault

    @property
    def ok(self) -> bool:
        return self.verdict.fault is Fault.OK

    @property
    def compiled(self) -> bool:
        return any(stage.name == "compile" and stage.fault is Fault.OK for stage in self.stages)

    @property
    def credit(self) -> float:
        """Share of the secret input sets that were passed: 0 for what did not get that far."""
        return self.verdict.passed / self.verdict.total if self.verdict.total else 0.0

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    @property
    def seconds(self) -> dict[str, float]:
        return {stage.name: stage.seconds for stage in self.stages}

    def document(self) -> dict[str, Any]:
        """For JSON: every field, and what follows from them."""
        derived = {"version": DOCUMENT_VERSION, "ok": self.ok, "fault": self.fault.value, "exit_code": self.exit_code}
        more = {"compiled": self.compiled, "credit": self.credit}
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {**derived, **fields, **more}

    def rows(self) -> list[tuple[str, str]]:
        """(name, text) lines for a person, in reading order."""
        v = self.verdict
        rows = [("verdict", "ok: correct" if self.ok else v.fault.value.replace("_", " "))]
        under = f"{v.rule} (rules: {v.rules})" if v.rule and v.rules else v.rule
        given = (("rule", under), ("message", v.message), ("evidence", v.evidence), ("hint", v.hint))
        rows += [(name, text) for name, text in given if text]
        if v.rules == "strict" and v.fault is Fault.STATIC_VIOLATION:
            rows.append(
                ("also passes", "as it is with --rules open, if it holds the rules that are proven by running it")
            )
        if v.total:
            rows.append(("input sets", f"{v.passed} of {v.total} passed"))
        rows += [("workload", text) for text in workload_lines(v, self.timing)]
        if v.max_abs_error is not None and v.tolerance is not None:
            rows.append(("largest error", f"{v.max_abs_error:.3g}, allowed there {v.tolerance:.3g}"))
        if v.tolerance_note:
            rows.append(("tolerance", v.tolerance_note))
        if v.kernelbench is not None:
            rows.append(("KernelBench", "would call it correct" if v.kernelbench else "would call it wrong"))
        if self.arithmetic:
            rows.append(("arithmetic", f"{', '.join(self.arithmetic)}: {MEANS}"))
        if v.rules and not v.rule:
            rows.append(("rules", v.rules))
        if v.trust:
            rows.append(("trust", f"{v.trust}{f': {v.trust_reason}' if v.trust_reason else ''}"))
        rows += self._timing_rows()
        missing = f"; missing: {', '.join(v.isolation_missing)}" if v.isolation_missing else ""
        rows.append(("isolation", f"{v.isolation}{missing}"))
        rows += [(finding.rule, finding.message) for finding in self.findings]
        if self.sanitizers or self.not_sanitized:
            names = ", ".join(self.sanitizers) or "none"
            rows.append(("sanitizers", f"{names} ran" + (f"; {self.not_sanitized}" if self.not_sanitized else "")))
        if self.toolchain:
            rows.append(("built by", self.toolchain))
        return rows

    def _timing_rows(self) -> list[tuple[str, str]]:
        t = self.timing
        if t is None:
            return []
        interval = f"{t.lo:.3f} … {t.hi:.3f} at {t.confidence:.0%}, {t.n} pairs"
        rows = [("speedup", f"{t.speedup:.3f}× ({interval}): {t.claim}")]
        if t.workloads:
            counted = sum(one.weight > 0 for one in t.workloads)
            rows.append(("over", f"{counted} timed workload{'s' * (counted > 1)}: the weighted geometric mean"))
        rows.append(("time", f"{t.candidate_ms:.4g} ms, reference {t.reference_ms:.4g} ms"))
        if self.device == "cpu":
            rows.append(("cores", _CORES))
        facts = [t.hardware] if t.hardware else []
        facts += [f"{t.clock_mhz:.0f} MHz"] if t.clock_mhz else []
        facts += [f"throttled: {', '.join(t.throttle)}"] if t.throttle else []
        facts += [f"others used {t.load:.0%} of the core"] if t.load is not None else []
        return [*rows, ("hardware", ", ".join(facts))] if facts else rows

    def __repr__(self) -> str:
        speed = (
            "" if self.timing is None else f", {self.timing.speedup:.2f}× [{self.timing.lo:.2f}, {self.timing.hi:.2f}]"
        )
        why = f", {self.verdict.rule or self.verdict.message[:80]}" if not self.ok else ""
        return f"<{self.problem_id} · {self.backend} · {self.fault.value}{why}{speed}>"

    def _repr_html_(self) -> str:
        lines = [*self.rows(), *((f"stage {s.name}", f"{s.fault.value}, {s.seconds:.3f} s") for s in self.stages)]
        cells = "".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in lines)
        return f"<table><caption>{html.escape(f'{self.problem_id} · {self.backend}')}</caption>{cells}</table>"


def with_findings(result: Result, found: Sanitized, stages: tuple[StageReport, ...]) -> Result:
    """The result after sanitizers."""
    verdict = judged(result.verdict, found)
    return msgspec.structs.replace(
        result,
        verdict=verdict,
        timing=result.timing if verdict.fault is Fault.OK else None,
        stages=(*result.stages, *stages),
        sanitizers=found.ran,
        findings=found.findings,
        not_sanitized=found.not_run,
    )


def judged(verdict: Verdict, found: Sanitized) -> Verdict:
    """A finding is the candidate's fault where nothing else was."""
    if not found.findings or verdict.fault is not Fault.OK:
        return verdict
    first = found.findings[0]
    return msgspec.structs.replace(
        verdict,
        fault=first.fault,
        message=first.message,
        rule=first.rule,
        evidence=first.evidence,
        hint=_SANITIZER_HINT,
    )


def early(fault: Fault, message: str, hint: str = "", rule: str = "") -> Verdict:
    """The verdict of what no backend could be asked about."""
    return Verdict(fault, message=message, hint=hint, rule=rule, isolation_missing=[_NOT_RUN])


def unbuilt(build: BuildReport) -> Verdict:
    """The verdict of what never reached the bench."""
    not_run = [] if build.isolation != "none" else [_NOT_RUN]
    return Verdict(
        build.fault,
        message=build.message,
        hint=build.hint,
        rule=build.rule,
        isolation=build.isolation,
        isolation_missing=not_run,
        rules=build.rules,
    )
