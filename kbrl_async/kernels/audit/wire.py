"""What the auditor and its worker say to each other, one JSON document a line."""

from __future__ import annotations

import msgspec

from kbrl_async.kernels.problems.audit_file import ProblemAudit

READY = b"ready"
"""A worker's first line: what ends it later is a problem's doing, what ended it before is the host's."""


class AuditOptions(msgspec.Struct, frozen=True):
    device: str
    time_limit_s: float
    memory_limit_gib: float


class AuditProgress(msgspec.Struct, frozen=True):
    audit: ProblemAudit
    done: bool
