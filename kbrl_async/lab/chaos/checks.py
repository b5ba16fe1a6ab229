"""What must hold after the end of a run, whatever was done to it: counted again from journal, archive and checkpoint.

::

    aggregator.sqlite · rollouts.sqlite · broker.sqlite · checkpoints/ · policies/ · summary.json
      └─ gather ─▶ Evidence ─ judge ─▶ [Check]

Invariants: `judge` is pure; a check that fails says which ids or figures are off.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table

from kbrl_async.durable import numbered
from kbrl_async.lab.chaos.driver import Happened
from kbrl_async.rollouts.turns import split_turn_id
from kbrl_async.runs.archive.history import entries_of
from kbrl_async.runs.config.loading import CONFIG_FILE
from kbrl_async.runs.folder import SUMMARY_FILE, load_run
from protocols.events import TaskRow
from protocols.records import GroupOutcome

_SHOWN = 5


class Check(msgspec.Struct, frozen=True):
    name: str
    ok: bool
    says: str


class Evidence(msgspec.Struct):
    """What a finished run has left, counted from files."""

    summary: dict[str, Any] = {}
    keeps_last: bool = True
    """The last version and a checkpoint of it are written before the run ends: in all but a rehearsal."""
    evaluates: bool = True
    """The final policy, as the run was set."""
    admitted: dict[str, int] = {}
    """Rollouts that each admitted group asked for, by group."""
    ended: list[tuple[str, str]] = []
    """(group, rollout) for each rollout that ended in the journal, scored or lost."""
    lost: dict[str, int] = {}
    """Rollouts without a reward, by reason."""
    batches: dict[str, list[str]] = {}
    """Groups of each batch."""
    trained: list[tuple[str, int]] = []
    """(batch, version that it made), in the journal's order."""
    failed: list[str] = []
    """Batches that ended without an update."""
    journaled: list[str] = []
    """Rollouts that the journal says were scored."""
    archived: list[str] | None = None
    """Rollouts in the archive; None where the run keeps none."""
    group_ends: dict[str, str] | None = None
    """How each group ended, as the archive says."""
    updates: list[tuple[str, int]] | None = None
    """(batch, version) of the archive."""
    progress: dict[str, Any] = {}
    """What the learner's newest checkpoint says."""
    policies: list[int] = []
    counters: dict[str, int] = {}
    live: list[str] = []
    """Tasks that the broker's journal still holds. A torn journal may have brought one back that had ended."""
    evaluated: list[str] = []
    """Held-out rollouts that ended."""
    left: list[str] = []
    """Processes of the run that have outlived it."""


def judge(evidence: Evidence) -> list[Check]:
    """All checks, in the order in which a reader would ask."""
    return [check(evidence) for check in _CHECKS]


def _verdict(name: str, problems: Iterable[str], says: str) -> Check:
    found = [problem for problem in problems if problem]
    return Check(name, not found, "; ".join(found) if found else says)


def _ended(evidence: Evidence) -> Check:
    return _verdict("the run has ended", ["" if evidence.summary else f"there is no {SUMMARY_FILE}"], "summary written")


def _groups(evidence: Evidence) -> Check:
    """I1: every admitted group has exactly one end."""
    summary = evidence.summary
    fields = ("groups_trained", "groups_filtered", "groups_dropped_stale", "groups_failed")
    counts = [int(summary.get(field, 0)) for field in fields]
    admitted = int(summary.get("groups_admitted", -1))
    problems = [_differs("ends", sum(counts), "admitted", admitted)]
    problems.append(_differs("admitted in the journal", len(evidence.admitted), "in the summary", admitted))
    if evidence.group_ends is not None:
        problems.append(_ids("groups without an end in the archive", set(evidence.admitted) - set(evidence.group_ends)))
        ends = Counter(evidence.group_ends.values())
        kinds = (GroupOutcome.TRAINED, GroupOutcome.FILTERED, GroupOutcome.DROPPED_STALE, GroupOutcome.FAILED)
        problems += [_differs(f"{k} in the archive", ends[k], "counted", n) for k, n in zip(kinds, counts, strict=True)]
    trained, filtered, stale, failed = counts
    says = f"{admitted} admitted = {trained} trained + {filtered} filtered + {stale} stale + {failed} failed"
    return _verdict("every group has one end", problems, says)


def _rollouts(evidence: Evidence) -> Check:
    """Nothing twice: a rollout ends once. Nothing lost: all rollouts of a trained group have ended."""
    ends = Counter(rollout for _, rollout in evidence.ended)
    by_group = Counter(group for group, _ in evidence.ended)
    gone = {batch for batch, _ in evidence.trained}
    groups = {group for batch, members in evidence.batches.items() if batch in gone for group in members}
    short = {group for group in groups if by_group[group] != evidence.admitted.get(group)}
    problems = [
        _ids("ended twice", {rollout for rollout, count in ends.items() if count > 1}),
        _ids("trained groups with rollouts missing or too many", short),
    ]
    lost = ", ".join(f"{count} {reason}" for reason, count in sorted(evidence.lost.items()))
    says = f"{len(ends)} ended once, {len(evidence.journaled)} with a reward"
    return _verdict("every rollout ended once", problems, says + (f", {lost}" if lost else ""))


def _archive(evidence: Evidence) -> Check:
    """A score that counts has its record, and the counts agree."""
    if evidence.archived is None:
        return Check("every score has its record", True, "this run keeps no archive")
    problems = [_ids("scored, and not in the archive", set(evidence.journaled) - set(evidence.archived))]
    return _verdict("every score has its record", problems, f"{len(set(evidence.journaled))} records")


def _batches(evidence: Evidence) -> Check:
    """Each batch entered the weights once, each group one batch, and each made the next version."""
    uses = Counter(group for batch, _ in evidence.trained for group in evidence.batches.get(batch, []))
    versions = [version for _, version in evidence.trained]
    problems = [
        _ids("groups in two trained batches", {group for group, count in uses.items() if count > 1}),
        _ids("batches trained twice", {b for b, n in Counter(b for b, _ in evidence.trained).items() if n > 1}),
        "" if versions == list(range(1, len(versions) + 1)) else f"versions {versions[:_SHOWN]}… are not 1, 2, 3, …",
        _ids("batches without an end", set(evidence.batches) - {b for b, _ in evidence.trained} - set(evidence.failed)),
    ]
    if evidence.updates is not None and sorted(evidence.updates) != sorted(evidence.trained):
        problems.append(f"{len(evidence.updates)} updates in the archive, {len(evidence.trained)} in the journal")
    return _verdict("every batch was trained once", problems, f"{len(versions)} updates")


def _learner(evidence: Evidence) -> Check:
    """What the weights say of themselves: of all updates; in a rehearsal of the first of them."""
    progress = evidence.progress
    version, made = int(progress.get("version", 0)), len(evidence.trained)
    if not evidence.keeps_last:
        made = min(version, made)
    last = evidence.trained[made - 1][0] if made else ""
    problems = [
        "" if progress or not evidence.trained else "there is no checkpoint",
        _differs("batches in the checkpoint", int(progress.get("batches", 0)), "trained", made),
        _differs("version of the checkpoint", version, "trained", made),
        "" if progress.get("last_batch_id", "") == last else f"its last batch is {progress.get('last_batch_id')}",
    ]
    return _verdict("the learner counts the same", problems, f"checkpoint of version {version}")


def _broker(evidence: Evidence) -> Check:
    counters = evidence.counters
    submitted, finished = counters.get("submitted", 0), counters.get("finished", 0)
    over = {rollout for _, rollout in evidence.ended} | set(evidence.evaluated)
    over |= {batch for batch, _ in evidence.trained} | set(evidence.failed)
    problems = [
        _differs("submitted", submitted, "finished + live", finished + len(evidence.live)),
        _ids("still live, without an end", {task for task in evidence.live if split_turn_id(task)[0] not in over}),
    ]
    names = ("duplicates", "lost", "expired", "nacked", "poisoned", "stale")
    more = ", ".join(f"{name} {counters[name]}" for name in names if counters.get(name))
    says = f"{submitted} submitted, {finished} finished, {len(evidence.live)} left"
    return _verdict("the broker's tasks add up", problems, says + (f" ({more})" if more else ""))


def _policy(evidence: Evidence) -> Check:
    made, newest = len(evidence.trained), max(evidence.policies, default=-1)
    rate = evidence.summary.get("heldout_correct_rate_after")
    problems = [
        "" if made else "nothing was trained",
        _differs("newest policy", newest, "updates", made) if evidence.keeps_last else "",
        "" if rate is not None or not evidence.evaluates else "the final policy was not evaluated",
    ]
    measured = f"correct on {rate:.0%} of the held-out answers" if rate is not None else "not to be evaluated"
    says = f"policy-v{newest}, {measured}"
    return _verdict("the final policy is trained and evaluated", problems, says)


def _processes(evidence: Evidence) -> Check:
    return _verdict("nothing runs on", [_ids("processes left", evidence.left)], "all processes are gone")


_CHECKS: tuple[Callable[[Evidence], Check], ...] = (
    _ended, _groups, _rollouts, _archive, _batches, _learner, _broker, _policy, _processes,
)  # fmt: skip


def _differs(name: str, value: int, other: str, expected: int) -> str:
    return "" if value == expected else f"{name} {value}, {other} {expected}"


def _ids(what: str, ids: Iterable[str]) -> str:
    found = sorted(ids)
    return f"{what}: {', '.join(found[:_SHOWN])}{' …' if len(found) > _SHOWN else ''} ({len(found)})" if found else ""


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def gather(run_dir: Path) -> Evidence:
    """Reads what is there; what is missing stays empty, and a check will say so."""
    evidence = Evidence()
    if (run_dir / SUMMARY_FILE).is_file():
        evidence.summary = msgspec.json.decode((run_dir / SUMMARY_FILE).read_bytes())
    if (run_dir / CONFIG_FILE).is_file():
        config = load_run(run_dir)
        evidence.keeps_last = not config.is_rehearsal
        evidence.evaluates = bool(config.eval_samples)
    _read_journal(run_dir / "aggregator.sqlite", evidence)
    _read_archive(run_dir / "rollouts.sqlite", evidence)
    _read_broker(run_dir / "broker.sqlite", evidence)
    for _, folder in numbered(run_dir / "checkpoints", "step-")[-1:]:
        evidence.progress = msgspec.json.decode((folder / "state.json").read_bytes())["progress"]
    evidence.policies = [version for version, _ in numbered(run_dir / "policies", "policy-v")]
    return evidence


def _read_journal(path: Path, evidence: Evidence) -> None:
    admitted, ended, batches, trained, journaled, lost = {}, [], {}, [], [], Counter[str]()
    failed: list[str] = []
    for blob in entries_of(path) if path.is_file() else ():
        entry = msgspec.msgpack.decode(blob)
        match entry["type"]:
            case "admitted":
                admitted[entry["group_id"]] = entry["rollouts"]
            case "scored":
                ended.append((entry["group_id"], entry["rollout_id"]))
                journaled.append(entry["rollout_id"])
            case "lost":
                ended.append((entry["group_id"], entry["rollout_id"]))
                lost[entry["reason"]] += 1
            case "evaluated":
                evidence.evaluated.append(entry["rollout_id"])
            case "batch_made":
                batches[entry["batch_id"]] = entry["group_ids"]
            case "batch_trained":
                trained.append((entry["batch_id"], entry["version"]))
            case "batch_failed":
                failed.append(entry["batch_id"])
    evidence.admitted, evidence.ended, evidence.batches = admitted, ended, batches
    evidence.trained, evidence.failed, evidence.journaled, evidence.lost = trained, failed, journaled, dict(lost)


def _read_archive(path: Path, evidence: Evidence) -> None:
    if path.is_file():
        evidence.archived = [row[0] for row in _query(path, "SELECT rollout_id FROM rollouts")]
        evidence.group_ends = dict(_query(path, "SELECT group_id, outcome FROM groups"))
        evidence.updates = list(_query(path, "SELECT batch_id, version FROM updates ORDER BY version"))


def _read_broker(path: Path, evidence: Evidence) -> None:
    for (value,) in _query(path, "SELECT value FROM meta WHERE key = 'counters'"):
        evidence.counters = msgspec.msgpack.decode(value)
    rows = _query(path, "SELECT row FROM tasks")
    tasks = [msgspec.msgpack.decode(row, type=TaskRow) for (row,) in rows]
    evidence.live = [task.task_id for task in tasks if task.stage]


def _query(path: Path, statement: str) -> list[Any]:
    if not path.is_file():
        return []
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=10.0)
    try:
        return db.execute(statement).fetchall()
    finally:
        db.close()


# ── what came of it: `RUN/chaos.json`, and the same as a table ───────────────────────────────────────────────────────


FILE = "chaos.json"
BROKER_BACK_S = 3.0
"""A broker that was killed under load has to take the next result by then."""


class ChaosReport(msgspec.Struct, omit_defaults=True):
    """Written at the start with the plan alone, and again at the end."""

    run: str
    seed: int | None = None
    faults: list[Happened] = []
    starts: int = 1
    """How often the run was started; every fault that ends it costs one more."""
    checks: list[Check] = []
    took_s: float = 0.0
    ok: bool = False

    def conclude(self, checks: Sequence[Check], broker_back_s: float = BROKER_BACK_S) -> None:
        """`checks` of what is left, and those of the plan itself."""
        self.checks = [self._plan_check(), self._starts_check(), *checks, self._broker_check(broker_back_s)]
        self.ok = all(check.ok for check in self.checks)

    def by_kind(self) -> dict[str, int]:
        return dict(Counter(str(happened.fault.kind) for happened in self.faults if happened.done))

    def broker_back(self) -> list[float]:
        """Seconds from `kill -9` to the next result, for every death of the broker under load."""
        return [h.working_s for h in self.faults if h.working_s is not None and h.under_load]

    def _plan_check(self) -> Check:
        undone = [f"{h.fault.kind} of {h.fault.target}: {h.failed}" for h in self.faults if not h.done]
        shown = "; ".join(undone[:3]) + (f"; and {len(undone) - 3} more" if len(undone) > 3 else "")
        return Check("every fault of the plan was done", not undone, shown or f"{len(self.faults)} faults")

    def _starts_check(self) -> Check:
        """Nothing but a fault that is meant to may end a run; two that come together end it once."""
        meant = sum(happened.done and happened.fault.ends_run for happened in self.faults)
        says = f"started {self.starts} times, ended on purpose {meant} times"
        return Check("the run ended only where it was made to", self.starts <= 1 + meant, says)

    def _broker_check(self, limit_s: float) -> Check:
        """It answers within the limit whatever else is down, and takes a result by then where results came before."""
        answered = [h.answered_s for h in self.faults if h.answered_s is not None]
        if not answered:
            return Check("the broker comes back", True, "it was not killed")
        back = self.broker_back()
        working = (
            f"at work after {max(back):.2f} s at most, of {len(back)} times under load" if back else "never under load"
        )
        says = f"answers after {max(answered):.2f} s at most, of {len(answered)} times; {working}; limit {limit_s:g} s"
        return Check("the broker comes back", max(answered + back) <= limit_s, says)


def render(report: ChaosReport) -> Group:
    """For a terminal."""
    table = Table(title=f"chaos in {report.run}", title_justify="left")
    for name, justify in (("fault", "left"), ("done", "right"), ("not", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type] # rich names these
    done, total = report.by_kind(), Counter(str(happened.fault.kind) for happened in report.faults)
    for kind, count in sorted(total.items()):
        table.add_row(kind, str(done.get(kind, 0)), str(count - done.get(kind, 0) or ""))
    checks = Table(show_header=False, box=None)
    for check in report.checks:
        checks.add_row("[green]ok[/]" if check.ok else "[red]OFF[/]", check.name, check.says)
    return Group(table, checks)
