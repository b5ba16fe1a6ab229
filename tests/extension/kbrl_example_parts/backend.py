"""A language of kernels: `backend=kbrl_example_parts.backend:PLAIN_C`. It is C as ours, without any pragma."""

from __future__ import annotations

from kbrl_async.kernels.backends.c.build import CBackend
from protocols.records import BuildReport, Candidate, Fault


class PlainC(CBackend):
    name = "kbrl_example_parts.backend:PLAIN_C"

    def claims(self, source: str) -> float:
        return 0.0  # a source alone does not say that it wants to be judged so

    def check_module(self, candidate: Candidate) -> BuildReport | None:
        if "#pragma" in candidate.source:
            hint = "Write C without pragmas."
            return BuildReport(Fault.STATIC_VIOLATION, message="pragmas are not allowed", hint=hint, rule="plain_c")
        return super().check_module(candidate)


PLAIN_C = PlainC()
