"""The last word of a run: `summary.json`, and the table on the terminal.

`build` is pure; `write` puts the file there in one atomic step, which is also the sign that the run has ended.

Invariants
* `groups_admitted` is the sum of trained, filtered, dropped stale and failed (I1); `groups_add_up` says if it is so.
* "first" and "last" are the answers that the first and the last policy versions wrote (`by_version`), never those that
  were scored first and last; `first_and_last` says in words which they are.
* A mean over nothing is null.
* Shares come with their intervals: answers are so few that a difference may be none.
"""

from __future__ import annotations

import math
import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kbrl_async.durable import write_atomically
from kbrl_async.evaluation.metrics import mean_over_problems, pass_at_k, sample_of
from kbrl_async.evaluation.proportions import KEY, wilson
from kbrl_async.kernels.backends.inline.ways import FAST
from kbrl_async.kernels.problems.split import FAMILY, INSTANCE
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.archive.funnel import funnel
from kbrl_async.runs.telemetry import by_version, stale
from kbrl_async.runs.telemetry.by_version import FIELDS, SHARES, Answers, speed_interval
from kbrl_async.runs.telemetry.training_metrics import kernels, outcome_rates
from protocols.records import TIMING_CONFIDENCE

Summary = dict[str, Any]

TRIES = 8
"""Answers to a held-out problem of which one has to be correct, for `pass_at_8`."""
HELDOUT_FIELDS = ("correct_rate", f"pass_at_{TRIES}", "compile_rate", "fast_1", "fast_1_proven", "speedup_mean")
KINDS = {INSTANCE: "of families that are trained on", FAMILY: "of families that are not"}
"""Of held-out problems, in words."""
BY_KIND = ("correct_rate", f"pass_at_{TRIES}")
BEST_KERNELS = 10
REASONS = 10
"""Why extensions were built in full, the commonest."""
SAYS_NOTHING = 100
"""Ends of a mean speedup's interval that are such a factor apart are not shown: kernels of two or three groups."""
OLD = (
    "This summary compared answers in the order of their scoring, failures first; 'kbrl report' shows the run by "
    "policy version."
)
"""Instead of the figures of a revision that did so."""


class RunCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What the aggregator counted over the whole run, restarts included."""

    groups_admitted: int
    groups_trained: int
    groups_filtered: int
    groups_dropped_stale: int
    groups_failed: int
    rollouts: int
    """Scored training rollouts."""
    updates: int
    max_staleness: int
    """Largest age, in versions, of a rollout that was trained on."""

    @property
    def ended(self) -> int:
        return self.groups_trained + self.groups_filtered + self.groups_dropped_stale + self.groups_failed


def build(
    *,
    counters: RunCounters,
    answers: Answers,
    wall_s: float,
    busy: Mapping[str, float],
    heldout_before: Sequence[RolloutStats] = (),
    heldout_after: Sequence[RolloutStats] = (),
    kinds: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Summary:
    """The content of `summary.json`.

    :param answers: scored training answers, and which of their groups lack some.
    :param wall_s: seconds from the first result, of a held-out answer or one of training, to the last update.
    :param busy: busy fraction by process over that time, see `system_metrics.busy_fractions`.
    :param kinds: of held-out problems by id, see `split.held_out_kinds`.
    :param extra: more fields, such as the run's name, seed and config hash.
    """
    return {
        **(extra or {}),
        **msgspec.structs.asdict(counters),
        "groups_add_up": counters.groups_admitted == counters.ended,
        "wall_s": wall_s,
        "updates_per_hour": counters.updates / wall_s * 3600 if wall_s > 0 else 0.0,
        "busy": dict(busy),
        "busy_total": math.fsum(busy.values()),
        **by_version.fields(answers),
        **_heldout(heldout_before, "heldout_", "_before"),
        **_heldout(heldout_after, "heldout_", "_after"),
        **_filtered(heldout_before, "_before"),
        **_filtered(heldout_after, "_after"),
        **_by_kind(heldout_before, "_before", kinds or {}),
        **_by_kind(heldout_after, "_after", kinds or {}),
        "heldout_kinds": dict(kinds or {}),
        **_timings([*answers.stats, *heldout_before, *heldout_after]),
        **_stale(answers),
        **_trust(answers.stats),
        **_builds([*answers.stats, *heldout_before, *heldout_after]),
        "funnel": funnel(answers.stats),
        "best_kernels": best_kernels([*answers.stats, *heldout_before, *heldout_after]),
    }


def versions() -> dict[str, str]:
    """What the numbers depend on: Python and the packages that compute."""
    packages = ("kbrl-async", "torch", "transformers", "triton", "peft", "numpy")
    installed = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {"python": platform.python_version(), **{name: installed[name] for name in packages if name in installed}}


def by_versions(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """The summary; without `…_first` and `…_last` where a revision wrote it to which they were the first and the last
    tenth in the order of scoring: failures came first there."""
    if "first_and_last" in summary:
        return summary
    return {name: value for name, value in summary.items() if not name.endswith(("_first", "_last"))}


def _heldout(rollouts: Sequence[RolloutStats], prefix: str, suffix: str) -> Summary:
    """Rates with their intervals `[lo, hi]` under their names and `KEY`, null of none, and of how many answers."""
    answers = kernels(rollouts)
    hits = {name: sum(getattr(r, flag) for r in answers) for name, flag in SHARES.items()}
    intervals = {name: wilson(count, len(answers)) if answers else None for name, count in hits.items()}
    problems: dict[str, list[RolloutStats]] = defaultdict(list)
    for answer in answers:
        problems[answer.problem_id].append(answer)
    intervals["speedup_mean"] = speed_interval(problems.values())
    rates: dict[str, float | None] = {**outcome_rates(answers)}
    if several := [[sample_of(answer) for answer in of] for _, of in sorted(problems.items()) if len(of) >= TRIES]:
        solved = mean_over_problems(several, lambda of: pass_at_k(len(of), sum(s.correct for s in of), TRIES))
        rates[f"pass_at_{TRIES}"], intervals[f"pass_at_{TRIES}"] = solved.value, (solved.lo, solved.hi)
    return {
        f"{prefix}answers{suffix}": len(answers),
        **{f"{prefix}{name}{suffix}": rates.get(name) for name in HELDOUT_FIELDS},
        **{f"{prefix}{name}{suffix}{KEY}": interval for name, interval in intervals.items()},
    }


def _timings(rollouts: Sequence[RolloutStats]) -> Summary:
    """Speedups that were measured, and how many of them can't be compared."""
    timed = [r for r in rollouts if r.correct and r.speedup is not None]
    return {"timings": len(timed), "timings_disturbed": sum(r.is_disturbed for r in timed)}


def _stale(answers: Answers) -> Summary:
    """What was dropped as too old, by the length of answers, shortest quarter first."""
    parts = stale.by_length(answers.ages, answers.listed)
    return {"stale_by_length": [msgspec.structs.asdict(p) for p in parts], "stale_warning": stale.warning(parts)}


def _trust(answers: Sequence[RolloutStats]) -> Summary:
    """Of correct answers, what their verdicts rest on, and how many of each kind are proven faster."""
    kinds = sorted({r.trust for r in answers if r.correct and r.trust})
    right = {kind: [r for r in answers if r.correct and r.trust == kind] for kind in kinds}
    counts = {
        kind: {"correct": len(found), "fast_1_proven": sum(r.fast_1_proven for r in found)}
        for kind, found in right.items()
    }
    return {"trust": counts}


def _builds(rollouts: Sequence[RolloutStats]) -> Summary:
    """How many answers had extensions built, and why the fast way was not enough, the commonest reasons first."""
    built = [r.built for r in rollouts if r.built]
    why = Counter(way for ways in built for way in ways if way != FAST)
    return {"extensions": len(built), "built_in_full": dict(why.most_common(REASONS))}


def _filtered(rollouts: Sequence[RolloutStats], suffix: str) -> Summary:
    """The held-out rates without the problems that an audit flags; nothing where it flags none."""
    kept = [r for r in rollouts if not r.flagged]
    if len(kept) == len(rollouts):
        return {}
    problems = len({r.problem_id for r in rollouts if r.flagged})
    return {**_heldout(kept, "heldout_filtered_", suffix), "heldout_problems_flagged": problems}


def _by_kind(rollouts: Sequence[RolloutStats], suffix: str, kinds: Mapping[str, str]) -> Summary:
    """The held-out rates of other instances of trained families, and of families that are held out whole."""
    found: Summary = {}
    for kind in KINDS:
        of_kind = [r for r in rollouts if kinds.get(r.problem_id) == kind]
        found |= _heldout(of_kind, f"heldout_{kind}_", suffix) if of_kind else {}
    return found


def best_kernels(rollouts: Sequence[RolloutStats]) -> list[Summary]:
    """The fastest kernel of each problem whose speedup is one (I7), by the lower end of its interval;
    disturbed measurements are not ranked."""
    best: dict[str, RolloutStats] = {}
    for rollout in rollouts:
        if rollout.fast_1_proven and not rollout.is_disturbed and _lo(rollout) > _lo(best.get(rollout.problem_id)):
            best[rollout.problem_id] = rollout
    ranked = sorted(best.values(), key=_lo, reverse=True)[:BEST_KERNELS]
    return [
        {"problem": r.problem_id, "speedup": r.speedup, "lo": r.speedup_lo, "hi": r.speedup_hi, "file": r.file}
        for r in ranked
    ]


def _lo(rollout: RolloutStats | None) -> float:
    return rollout.speedup_lo if rollout is not None and rollout.speedup_lo is not None else 0.0


def write(path: Path, summary: Summary) -> None:
    """Put the whole file there in one step, or leave nothing."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n")


def read(path: Path) -> Summary:
    """What `write` wrote.

    :raises FileNotFoundError: the run has not ended.
    :raises msgspec.DecodeError: somebody edited it.
    """
    return _named_as_today(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))


def _named_as_today(summary: Summary) -> Summary:
    """A summary from when `fast_1` meant what is called `fast_1_proven` now."""
    if any("fast_1_proven" in name for name in summary):
        return summary
    points = [_proven(point) for point in summary.get("by_version", [])]
    return _proven(summary) | ({"by_version": points} if points else {})


def _proven(figures: Summary) -> Summary:
    return {name.replace("fast_1", "fast_1_proven"): value for name, value in figures.items()}


def render(summary: Summary) -> Group:
    """The summary as tables for the terminal."""
    tables: list[RenderableType] = [
        _progress_table(by_versions(summary)),
        Text(format_first_and_last(summary), "dim"),
        run_table(summary),
    ]
    if summary.get("best_kernels"):
        tables.append(_kernel_table(summary["best_kernels"]))
    return Group(*tables)


def _progress_table(summary: Mapping[str, Any]) -> Table:
    table = Table(title="What the policy learned", title_justify="left")
    table.add_column("training problems")
    for which in ("first", "last"):
        table.add_column(_heading(summary, which), justify="right")
    for name in FIELDS:
        table.add_row(name, *(_with_interval(summary, f"{name}_{which}", name) for which in ("first", "last")))
    if "success_rate_first" in summary:
        for name in ("success_rate", "compile_fix_rate"):
            table.add_row(name, _format(name, summary.get(f"{name}_first")), _format(name, summary.get(f"{name}_last")))
    table.add_section()
    _add_heldout(table, summary, "held-out problems", "heldout_")
    counts = Counter((summary.get("heldout_kinds") or {}).values())
    for kind, words in KINDS.items() if len(counts) > 1 else ():
        _add_heldout(table, summary, f"{counts[kind]} {words}", f"heldout_{kind}_", BY_KIND)
    if flagged := summary.get("heldout_problems_flagged"):
        _add_heldout(table, summary, f"without {flagged} flagged problems", "heldout_filtered_")
    return table


def _heading(summary: Mapping[str, Any], which: str) -> str:
    first, last = summary.get(f"versions_{which}") or (None, None)
    if first is None:
        return f"{which} versions"
    return f"version {first}" if first == last else f"versions {first}–{last}"


def format_first_and_last(summary: Mapping[str, Any]) -> str:
    """Which answers the first and the last figure are of."""
    return str(summary.get("first_and_last", OLD))


def _add_heldout(
    table: Table, summary: Mapping[str, Any], title: str, prefix: str, fields: Sequence[str] = HELDOUT_FIELDS
) -> None:
    heads = [(when, summary.get(f"{prefix}answers_{when}")) for when in ("before", "after")]
    table.add_row(
        title, *(when if count is None else f"{when}: {count} answers" for when, count in heads), style="bold"
    )
    for name in fields:
        table.add_row(name, *(_with_interval(summary, f"{prefix}{name}_{when}", name) for when in ("before", "after")))


def run_table(summary: Summary) -> Table:
    table = Table(title="How it ran", title_justify="left", show_header=False)
    ends = ("trained", "filtered", "dropped_stale", "failed")
    parts = ", ".join(f"{summary.get(f'groups_{end}')} {end.replace('_', ' ')}" for end in ends)
    if cut_off := (summary.get("failed_reasons") or {}).get("run_ended"):
        parts += f" ({cut_off} were open when the run ended)"
    mark = "" if summary.get("groups_add_up", True) else "   these do not add up: please report it"
    table.add_row("groups", f"{summary.get('groups_admitted')} = {parts}{mark}")
    if reached := summary.get("small_policy_cut"):
        table.add_row("small policy", f"cut at {reached} by sft.max_seconds: version 0 is worse than a whole one")
    table.add_row("rollouts", str(summary.get("rollouts")))
    table.add_row("updates", f"{summary.get('updates')} in {summary.get('wall_s', 0):.0f} s")
    if why := _why_no_update(summary):
        table.add_row("no update", why)
    table.add_row("updates an hour", f"{summary.get('updates_per_hour', 0):.0f}")
    table.add_row("largest staleness", f"{summary.get('max_staleness')} versions")
    if by_length := summary.get("stale_by_length"):
        shares = ", ".join(f"{part['share']:.0%}" for part in by_length)
        table.add_row("dropped as too old", f"{shares}  (a quarter each, shortest answers first)")
    if summary.get("stale_warning"):
        table.add_row("warning", summary["stale_warning"])
    for kind, found in (summary.get("trust") or {}).items():
        table.add_row(kind, f"{found['correct']} correct answers, {found['fast_1_proven']} of them proven faster")
    if in_full := summary.get("built_in_full"):
        reasons = ", ".join(f"{count} {reason}" for reason, count in in_full.items())
        table.add_row("built in full", f"of {summary['extensions']} answers with extensions: {reasons}")
    if disturbed := summary.get("timings_disturbed"):
        table.add_row("timings", f"{disturbed} of {summary['timings']} were disturbed, and are not ranked")
    busy = ", ".join(f"{name} {share:.0%}" for name, share in summary.get("busy", {}).items())
    table.add_row("busy", f"{busy}  (sum {summary.get('busy_total', 0):.2f})")
    return table


def _why_no_update(summary: Mapping[str, Any]) -> str:
    """For a run whose groups all had equal rewards: that, where its answers failed, and what to do; else empty."""
    funnel: Mapping[str, Mapping[str, int]] = summary.get("funnel") or {}
    if summary.get("updates") or not (summary.get("failed_reasons") or {}).get("zero_variance") or not funnel:
        return ""
    stage, found = max(funnel.items(), key=lambda item: item[1]["entered"] - item[1]["passed"])
    failed = found["entered"] - found["passed"]
    return (
        f"in no group did the rewards differ; {failed} of {found['entered']} answers ended at '{stage}'. "
        "Look with 'kbrl inspect'; then easier problems, a better policy or more sft.steps"
    )


def _kernel_table(best: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Fastest verified kernels", title_justify="left")
    for heading in ("problem", "speedup", f"{TIMING_CONFIDENCE:.0%} interval", "file"):
        table.add_column(heading, overflow="fold")
    for k in best:
        table.add_row(k["problem"], f"{k['speedup']:.2f}×", f"{k['lo']:.2f} … {k['hi']:.2f}", k["file"])
    return table


def _with_interval(summary: Mapping[str, Any], key: str, name: str) -> str:
    """The value, with its interval where there is one."""
    shown, interval = _format(name, summary.get(key)), summary.get(f"{key}{KEY}")
    if interval is None:
        return shown
    if name.startswith("speedup") and interval[1] > SAYS_NOTHING * interval[0]:
        return f"{shown} (too few)"
    return f"{shown} ({_format(name, interval[0])} … {_format(name, interval[1])})"


def _format(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name == "reward_mean":
        return f"{value:.3f}"
    return f"{value:.2f}×" if name.startswith("speedup") else f"{value:.0%}"
