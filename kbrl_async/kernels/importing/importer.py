"""Rows in, a folder of problems out: told apart, tried in confined children, several at once, and gone on with."""

from __future__ import annotations

import ast
import hashlib
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import msgspec

from kbrl_async import durable
from kbrl_async.errors import ProblemError
from kbrl_async.kernels.audit import Auditor, Limits
from kbrl_async.kernels.importing.found import Found
from kbrl_async.kernels.problems.audit_file import (
    CANNOT_RUN,
    CLEAN,
    FIXED_DEVICE,
    FLAGGED,
    KEEPS_STATE,
    ProblemAudit,
)
from kbrl_async.kernels.problems.contract import parse_problem
from kbrl_async.kernels.problems.declared import declared
from kbrl_async.kernels.problems.sources.folder import INDEX
from kbrl_async.kernels.syntax import ReferenceFacts, Unreadable, read
from kbrl_async.kernels.syntax.scope import INPUT_MAKERS
from protocols.records import Problem

JOURNAL = "import.jsonl"
LOCK = ".importer"
TAKEN, UNTRIED, LEFT = "taken", "taken, not tried", "left out"
ENDED = "its process ended"
STAYS = f"{FIXED_DEVICE}: a GPU's inputs meet tensors of its own that stay on the CPU"
FAILS = "its reference fails on inputs that candidates meet"
_TOLD = (CANNOT_RUN, KEEPS_STATE)
"""Flags that say little without what was seen."""
_NO_ROOM = re.compile(r"memory|does not fit|would need|longer than|deadline|no result after")
AHEAD = 4
"""Rows waiting for each worker: enough to keep it busy, few enough for a data set of any size."""


class ImportedRow(msgspec.Struct, frozen=True):
    """What became of one row; a line of the journal."""

    key: str
    """Of its text, so that the next run knows it again."""
    problem_id: str
    outcome: str
    reason: str = ""
    origin: str = ""
    license: str = ""
    structure: str = ""
    """Of its code and its input makers, names and constants hidden."""
    seconds: float = 0.0


class Importer:
    """One folder. `avoid`: problems that nothing may be near to, as those that are held out."""

    def __init__(self, out: Path, limits: Limits, avoid: Iterable[Problem] = (), jobs: int = 2) -> None:
        self.out, self.limits, self.jobs = out, limits, jobs
        self._held = [reading for problem in avoid if (reading := _reading(problem.source))]
        self.rows: list[ImportedRow] = []
        self._known: dict[str, ImportedRow] = {}
        self._structures: set[str] = set()
        self._names: set[str] = set()

    def run(self, found: Iterable[Found]) -> Iterator[ImportedRow]:
        """Each row's fate, in order; those of an earlier run at once. The index is written at the end.

        :raises AddressTaken: another import is writing the folder.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        cure = "Wait for its end, stop that process, or import into another folder"
        with durable.alone(self.out / LOCK, why="an import is going on", cure=cure):
            self._read_journal()  # nobody adds to it from now on
            yield from self._rows(found)
            self._write_index()

    def _rows(self, found: Iterable[Found]) -> Iterator[ImportedRow]:
        auditors: SimpleQueue[Auditor] = SimpleQueue()
        for _ in range(self.jobs):
            auditors.put(Auditor(self.limits))
        with ThreadPoolExecutor(self.jobs) as pool, (self.out / JOURNAL).open("a", encoding="utf-8") as journal:
            try:
                for row, is_new in _ahead((self._start(one, pool, auditors) for one in found), AHEAD * self.jobs):
                    if is_new:
                        journal.write(msgspec.json.encode(row).decode() + "\n")
                        journal.flush()
                    self.rows.append(row)
                    yield row
            finally:
                pool.shutdown(cancel_futures=True)
                while not auditors.empty():
                    auditors.get().close()

    def _start(
        self, found: Found, pool: ThreadPoolExecutor, auditors: SimpleQueue[Auditor]
    ) -> Callable[[], tuple[ImportedRow, bool]]:
        """What is known at once is told at once; the rest is tried."""
        key = hashlib.blake2b(f"{found.origin}\0{found.source}".encode("utf-8", "replace"), digest_size=8).hexdigest()
        if key in self._known:
            known = self._known[key]
            return lambda: (known, False)
        problem_id = self._id(found)
        row = ImportedRow(key, problem_id, LEFT, found.left_out, found.origin, found.license)
        if found.left_out:
            return lambda: (row, True)
        try:
            problem = parse_problem(found.source, problem_id, level=found.level, origin=found.origin)
            reading = read(found.source)
        except (ProblemError, Unreadable) as error:
            why = _without_place(str(error), found.origin)
            return lambda: (msgspec.structs.replace(row, reason=why), True)
        kind = "-backward" if declared(found.source).backward else ""
        row = msgspec.structs.replace(row, structure=f"{reading.code_hash:x}-{_makers(found.source):x}{kind}")
        if why := self._near(row, reading):
            return lambda: (msgspec.structs.replace(row, reason=why), True)
        self._structures.add(row.structure)
        future: Future[ProblemAudit] = pool.submit(_audit, auditors, problem)
        return lambda: (self._ended(row, problem, future.result()), True)

    def _near(self, row: ImportedRow, reading: ReferenceFacts) -> str:
        if row.structure in self._structures:
            return "the same as another row, but for names and constants"
        chain = reading.chain_hash
        if any(reading.code_hash == held.code_hash or (chain and chain == held.chain_hash) for held in self._held):
            return "near a held-out problem"
        return ""

    def _ended(self, row: ImportedRow, problem: Problem, audit: ProblemAudit) -> ImportedRow:
        """Writes the file of what is sound, or could not be tried for want of room."""
        row = msgspec.structs.replace(row, seconds=audit.seconds)
        if audit.status == FLAGGED:
            flag = next(iter(audit.flags), "")
            told = next((f.evidence for f in audit.findings if f.flag == flag and flag in _TOLD), "")
            return msgspec.structs.replace(row, reason=f"{flag}: {told[:160]}" if told else flag)
        if audit.status != CLEAN and ENDED in audit.reason:
            return msgspec.structs.replace(row, reason=f"{ENDED} itself, or for want of memory")
        if _fails(audit):
            return msgspec.structs.replace(row, reason=f"{FAILS}: {_cause(audit.ours)}")
        if FIXED_DEVICE in (f.kind for f in audit.findings):
            return msgspec.structs.replace(row, reason=STAYS)
        path = self.out / f"level{problem.level}" / f"{problem.name}.py"
        path.parent.mkdir(exist_ok=True)
        durable.write_atomically(path, problem.source)
        outcome = TAKEN if audit.status == CLEAN and not audit.ours else UNTRIED
        return msgspec.structs.replace(row, outcome=outcome, reason="; ".join(filter(None, (audit.reason, audit.ours))))

    def _id(self, found: Found) -> str:
        """Unique in this folder."""
        name, number = found.name, 2
        while f"L{found.level}/{name}" in self._names:
            name, number = f"{found.name}_{number}", number + 1
        self._names.add(f"L{found.level}/{name}")
        return f"L{found.level}/{name}"

    def _read_journal(self) -> None:
        """A line that was cut off when a run was killed is done again."""
        path = self.out / JOURNAL
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            try:
                row = msgspec.json.decode(line, type=ImportedRow)
            except (msgspec.DecodeError, ValueError):
                continue
            self._known[row.key] = row
            self._names.add(row.problem_id)
            if row.outcome != LEFT:
                self._structures.add(row.structure)

    def _write_index(self) -> None:
        kept = [row for row in self.rows if row.outcome != LEFT]
        lines = [f'["{row.problem_id}"]\nsplit = "train"\n' for row in kept]
        durable.write_atomically(self.out / INDEX, "\n".join(lines))


def _fails(audit: ProblemAudit) -> bool:
    """Whether a bench could never verify a kernel for it, for another cause than room or time here."""
    return "the reference of " in audit.ours and not _NO_ROOM.search(audit.ours)


def _cause(ours: str) -> str:
    """What the bench said of it, without the problem's name."""
    return re.sub(r"^not tried: the reference of \S+ (fails: )?", "", ours)[:160]


def _reading(source: str) -> ReferenceFacts | None:
    try:
        return read(source)
    except Unreadable:
        return None


def _makers(source: str) -> int:
    """How inputs are made, names and constants hidden: the number of dimensions stays, their sizes do not."""
    makers = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name in INPUT_MAKERS]
    text = re.sub(r"(value|id|name|arg|attr)=('[^']*'|[\d.]+)", "", "".join(map(ast.dump, makers)))
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def _ahead(started: Iterator[Callable[[], tuple[ImportedRow, bool]]], count: int) -> Iterator[tuple[ImportedRow, bool]]:
    """Results in order, with at most `count` begun before they are asked for."""
    waiting: deque[Callable[[], tuple[ImportedRow, bool]]] = deque()
    for one in started:
        waiting.append(one)
        if len(waiting) >= count:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


def _audit(auditors: SimpleQueue[Auditor], problem: Problem) -> ProblemAudit:
    auditor = auditors.get()
    try:
        return auditor.audit(problem)
    finally:
        auditors.put(auditor)


def _without_place(text: str, origin: str) -> str:
    """The same words for the same cause."""
    return text.replace(origin, "it") if origin else text
