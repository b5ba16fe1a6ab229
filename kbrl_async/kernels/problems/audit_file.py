"""What an audit found about problems: the file's format, and which problems it speaks against.

`kbrl problems audit` writes such files; those of the project's own suite and of KernelBench lie in `audits/`. A finding
belongs to a problem's source (by hash) at one choice of shapes: a problem that was changed since is not audited.

Invariants
* Nothing here runs a problem.
* A file of a later version is refused, never half understood.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from kbrl_async.errors import ProblemError
from protocols.records import Problem

VERSION = 1
OUR_AUDITS = Path(__file__).parent / "audits"
AUDIT_FILE = "audit.json"
CLEAN, FLAGGED, NOT_AUDITED = "clean", "flagged", "not_audited"
OURS, KERNELBENCH, HALF = "ours", "kernelbench", "kernelbench_half"
FIXED_DEVICE = "fixed_device"
RANDOM, KEEPS_STATE, CANNOT_RUN = "random", "keeps_state", "cannot_run"
_ABOUT_NO_TOLERANCE = (RANDOM, KEEPS_STATE, CANNOT_RUN)


class OutputTrial(msgspec.Struct, frozen=True):
    """An output that does not do the work, against the right one, over all inputs that were tried."""

    name: str
    """`zeros`, `constant`, `input_independent`, `half_rows` or `half_batch`; `unchanged_input`, also where on some sets
    it is zeros or a constant: what a verdict means that says its problem proves nothing.
    """
    tolerance: str
    """`kernelbench` (1e-4 in fp32), `kernelbench_half` (1e-2) or `ours`."""
    passes: bool
    inputs: int
    """Input sets on which it was tried."""
    passed: int
    """Those on which it passed."""
    worst_error: float
    """Largest absolute difference on the set where it did best."""
    wrong_share: float
    """Share of elements outside the tolerance on that set."""


class AuditFinding(msgspec.Struct, frozen=True):
    """Something that makes a problem's scores say less than they seem to."""

    kind: str
    """A trial's name, `random`, `mutates_inputs`, `dtype_cast`, `cannot_run`, `keeps_state`: what a call leaves behind
    changes later answers; or `fixed_device`: tensors of its own stay on the CPU, so that it runs on no GPU.
    """
    evidence: str
    tolerance: str = ""

    @property
    def flag(self) -> str:
        return f"{self.kind}@{self.tolerance}" if self.tolerance else self.kind


class ProblemAudit(msgspec.Struct, frozen=True):
    """`reason` says what did not fit or could not be tried; `not_audited`: nothing was found before that either."""

    problem_id: str
    problem_hash: str
    status: str
    reason: str = ""
    findings: tuple[AuditFinding, ...] = ()
    trials: tuple[OutputTrial, ...] = ()
    ours: str = ""
    """Empty where our own tolerances were tried too, else why not."""
    outputs: tuple[str, ...] = ()
    """Type and shape of each, as `float32[16, 1000]`."""
    output_scale: float = 0.0
    seconds: float = 0.0
    isolation: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """What a verdict or a score may be doubted for: not the wide tolerance of half precision, nor casts."""
        found = [f for f in self.findings if f.tolerance in (OURS, KERNELBENCH) or f.kind in _ABOUT_NO_TOLERANCE]
        return tuple(dict.fromkeys(f.flag for f in found))


class Audit(msgspec.Struct, frozen=True):
    """The file."""

    version: int
    suite: str
    """What was audited, as it was asked for: `suite`, or a folder's name."""
    shapes: str
    device: str
    created: str
    software: dict[str, str]
    time_limit_s: float
    memory_limit_gib: float
    problems: list[ProblemAudit]


def problem_hash(problem: Problem) -> str:
    """Of the source with its shapes chosen, white space at line ends aside."""
    text = "\n".join(line.rstrip() for line in problem.source.strip().splitlines())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def disqualifies(flag: str) -> bool:
    """Whether our own verdicts on such a problem mean little: nothing can be learned from them."""
    return flag.endswith(f"@{OURS}") or flag in _ABOUT_NO_TOLERANCE


def usable(problems: Iterable[Problem]) -> list[Problem]:
    """Those that nothing disqualifies."""
    return [problem for problem in problems if not any(map(disqualifies, problem.flags))]


def read(path: Path) -> Audit:
    """:raises ProblemError: it is no audit of a version that this program knows."""
    try:
        version = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw]).get("version")
        if version is None or bytes(version) != str(VERSION).encode():
            raise ProblemError(f"{path} is no audit of version {VERSION}", "Make it again with 'kbrl problems audit'")
        return msgspec.json.decode(path.read_bytes(), type=Audit)
    except msgspec.DecodeError as error:
        raise ProblemError(f"{path} can't be read: {error}", "Make it again with 'kbrl problems audit'") from None


def write(path: Path, audit: Audit) -> None:
    """The whole file in one step, one problem a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(audit, problems=[])), indent=2)
    lines = b",\n".join(b"    " + msgspec.json.encode(problem) for problem in audit.problems)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(head.replace(b'"problems": []', b'"problems": [\n' + lines + b"\n  ]") + b"\n")
    fresh.replace(path)


def find(folder: Path | None, shapes: str) -> list[Path]:
    """The audit files of a problem folder (None: of the suite) for these shapes, where there are any: ours of
    KernelBench, which speaks of a problem wherever its source lies, then the folder's own.
    """
    places = [OUR_AUDITS / f"suite-{shapes}.json"]
    if folder is not None:
        places = [*sorted(OUR_AUDITS.glob("kernelbench-*.json")), folder / AUDIT_FILE]
    return [path for path in places if path.is_file()]


def with_flags(problems: Sequence[Problem], audits: Iterable[Audit]) -> list[Problem]:
    """The problems with all that any of the audits holds against them: what one device has no room for another may
    have found. An audit of another source says nothing.
    """
    known: dict[tuple[str, str], dict[str, None]] = {}
    for one in (one for audit in audits for one in audit.problems):
        known.setdefault((one.problem_id, one.problem_hash), {}).update(dict.fromkeys(one.flags))
    flagged = [(problem, tuple(known.get((problem.problem_id, problem_hash(problem)), ()))) for problem in problems]
    return [msgspec.structs.replace(problem, flags=flags) if flags else problem for problem, flags in flagged]
