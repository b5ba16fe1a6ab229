"""From the words of sanitizers to findings: pure functions of text.

A finding's rule is `sanitizer:` and the sanitizer's own name for it, as `sanitizer:heap-buffer-overflow`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from protocols.records import Fault

GPU_EXIT = 87
CALL_MARK = "kbrl-call"
_MAX_EVIDENCE = 600


class SanitizerFinding(msgspec.Struct, frozen=True):
    rule: str
    message: str
    evidence: str
    """The sanitizer's own lines, without folders."""
    fault: Fault = Fault.ILLEGAL_ACCESS


_ASAN_HEAD = re.compile(r"ERROR: AddressSanitizer: ([\w-]{1,60})(.*)")
_ASAN_ACCESS = re.compile(r"^(READ|WRITE) of size (\d+)", re.MULTILINE)
_ASAN_FRAME = re.compile(r"#\d+ \S+ in (\w+).*?((?:kernel\d*|main)\.c\w*):(\d+)")
_ASAN_REGION = re.compile(r"is located (\d+) bytes (.*?) of (\d+)-byte region")
_UBSAN_LINE = re.compile(r"((?:kernel\d*|main)\.c\w*):(\d+):\d+: runtime error: (.+)")
_UBSAN_RULES = (
    ("signed integer overflow", "signed-integer-overflow"),
    ("misaligned", "misaligned-access"),
    ("shift", "invalid-shift"),
    ("out of bounds", "index-out-of-bounds"),
    ("insufficient space", "object-too-small"),
    ("division by zero", "division-by-zero"),
    ("null pointer", "null-pointer"),
    ("pointer", "pointer-overflow"),
)
_GPU_RULES = (
    (re.compile(r"Invalid (\w{1,30}) (read|write) of size (\d{1,9})"), "invalid-{0}-{1}"),
    (re.compile(r"(Misaligned|misaligned) "), "misaligned-access"),
    (re.compile(r"Uninitialized (\w{1,30}) memory (read|access)"), "uninitialized-{0}-read"),
    (re.compile(r"(?:Potential )?(RAW|WAR|WAW) hazard|Race reported between"), "data-race"),
    (re.compile(r"Stack overflow"), "stack-overflow"),
    (re.compile(r"Program hit (\w+)"), "api-error"),
)


def distinct(findings: Iterable[SanitizerFinding]) -> tuple[SanitizerFinding, ...]:
    """One of each rule and message, in order."""
    return tuple({(finding.rule, finding.message): finding for finding in findings}.values())


def asan(output: str) -> list[SanitizerFinding]:
    """At most one: AddressSanitizer ends the process at its first error."""
    head = _ASAN_HEAD.search(output)
    if head is None:
        return []
    said = output[head.start() :]
    access, frame, region = _ASAN_ACCESS.search(said), _ASAN_FRAME.search(said), _ASAN_REGION.search(said)
    what = f"{access[1].lower()} of {access[2]} bytes" if access else head[1]
    where = f" in {frame[1]}, line {frame[3]} of the C source" if frame else ""
    side = f", {region[1]} bytes {region[2]} of a buffer of {region[3]} bytes" if region else ""
    kernel = _last_call(output[: head.start()])
    message = f"{what}{where}{side}{f' (launch {kernel})' if kernel else ''}"
    lines = [line for line in said.splitlines()[1:12] if line.strip() and "==" not in line[:2]]
    return [SanitizerFinding(f"sanitizer:{head[1]}", _clean(message), _clean("\n".join([head[0], *lines])))]


def ubsan(output: str) -> list[SanitizerFinding]:
    """One for each line of source that UndefinedBehaviorSanitizer complains of."""
    found: dict[tuple[str, str], SanitizerFinding] = {}
    for match in _UBSAN_LINE.finditer(output):
        rule = next((name for words, name in _UBSAN_RULES if words in match[3]), "undefined-behaviour")
        message = f"line {match[2]} of the C source: {match[3]}"
        finding = SanitizerFinding(f"sanitizer:{rule}", _clean(message), _clean(match[0]), Fault.RUNTIME_ERROR)
        found.setdefault((match[2], rule), finding)
    return list(found.values())


def compute_sanitizer(tool: str, output: str) -> list[SanitizerFinding]:
    """One for each kind of error that a tool of compute-sanitizer reports."""
    lines = [line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=========")]
    found: dict[str, SanitizerFinding] = {}
    for number, line in enumerate(lines):
        for pattern, name in _GPU_RULES:
            match = pattern.search(line)
            if match is None:
                continue
            parts = [(part or "").strip("_").lower() for part in match.groups()]
            rule = f"sanitizer:{name.format(*parts)}"
            evidence = _clean("\n".join([f"{tool}: {line}", *lines[number + 1 : number + 6]]))
            found.setdefault(rule, SanitizerFinding(rule, _clean(line), evidence))
            break
    return list(found.values())


def _last_call(output: str) -> str:
    marks = [line.removeprefix(CALL_MARK).strip() for line in output.splitlines() if line.startswith(CALL_MARK)]
    return marks[-1] if marks else ""


def _clean(text: str) -> str:
    """Without folders and addresses of ours, bounded."""
    text = re.sub(r"(/[\w.+-]+)+/", "", text)
    return re.sub(r"0x[0-9a-f]{6,}", "0x…", text)[:_MAX_EVIDENCE]
