"""All that is printed, made again from the archive."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.special import ndtri
from scipy.stats import bootstrap

from benchmarks.figures.archive import IN_TIME, ArchivedTurns, LoggedAnswer, TurnRecord
from benchmarks.figures.versions import CONFIDENCE, SHARES, AnswersByVersion, by_version, figures_of, turns_of, wilson

POINTS, BEST, TRIES = 100, 10, 8
FUNNEL = ("format", "static", "compile", "small_inputs", "full_inputs", "timing")
WIDEST = 10.0


def again(archive: ArchivedTurns, run: Path) -> Iterator[tuple[str, Any]]:
    """(name as in `summary.json`, value)."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    answers = archive.answers("r.purpose = 'train'")
    yield from _counters(archive)
    versions = by_version(archive, answers, config.get("group_size", 8))
    several = any(answer.turn for answer in answers)
    for which, chosen in (("first", versions.first()), ("last", versions.last())):
        mine = versions.of(chosen)
        yield f"versions_{which}", [min(chosen), max(chosen)] if chosen else None
        yield f"answers_{which}", len(mine)
        for name, (value, ends) in figures_of(mine).items():
            yield f"{name}_{which}", value
            yield f"{name}_{which}_95", ends
        if several:
            yield f"success_rate_{which}", turns_of(mine)["success_rate"]
            yield f"compile_fix_rate_{which}", turns_of(mine)["compile_fix_rate"]
    if several:
        yield "avg_turns", turns_of(versions.of(versions.by))["avg_turns"]
    yield "answers_left_out", versions.left_out
    yield "by_version", _curve(versions)
    kinds = json.loads((run / "summary.json").read_text()).get("heldout_kinds") or {}
    yield from _heldout(archive, kinds)
    before, after = (_best_turns(archive.answers(f"r.purpose = '{when}'")) for when in ("before", "after"))
    timed = [answer for answer in (*answers, *before, *after) if answer.correct and answer.speedup is not None]
    yield "timings", len(timed)
    yield "timings_disturbed", sum(not _is_sound(answer) for answer in timed)
    yield "trust", _trust(archive, answers)
    yield from _builds(archive, [*answers, *before, *after])
    yield "funnel", funnel(archive, answers)
    yield "best_kernels", best_kernels([*answers, *before, *after])


def _trust(archive: ArchivedTurns, answers: Sequence[LoggedAnswer]) -> dict[str, dict[str, int]]:
    kinds: dict[str, list[LoggedAnswer]] = defaultdict(list)
    for answer in answers:
        if answer.correct and answer.key in archive.records:
            kinds[archive.records[answer.key].trust].append(answer)
    return {
        kind: {"correct": len(found), "fast_1_proven": sum(answer.proven for answer in found)}
        for kind, found in kinds.items()
        if kind
    }


def _builds(archive: ArchivedTurns, answers: Sequence[LoggedAnswer]) -> Iterator[tuple[str, Any]]:
    """Of each answer with extensions, how these were built stands behind the toolchain's name."""
    tools = [archive.records[answer.key].toolchain for answer in answers if answer.key in archive.records]
    found = [ways for tool in tools if (ways := re.findall(r" (fast|full: [^;]+)(?:;|$)", tool))]
    why = Counter(way.removeprefix("full: ") for ways in found for way in ways if way != "fast")
    yield "extensions", len(found)
    yield "built_in_full", dict(why.most_common(BEST))


def _counters(archive: ArchivedTurns) -> Iterator[tuple[str, Any]]:
    ends = Counter(dict(archive.db.execute("SELECT outcome, count(*) FROM groups GROUP BY 1")))
    groups = "SELECT group_id FROM groups UNION SELECT group_id FROM rollouts WHERE purpose = 'train'"
    yield "groups_admitted", archive.count(f"SELECT count(*) FROM ({groups})")
    for end in ("trained", "filtered", "dropped_stale", "failed"):
        yield f"groups_{end}", ends[end]
    why = archive.db.execute("SELECT reason, count(*) FROM groups WHERE outcome <> 'trained' GROUP BY 1")
    yield "failed_reasons", {reason: count for reason, count in why if reason}
    in_time = f"{IN_TIME} AND purpose = 'train'"
    yield "rollouts", archive.count(f"SELECT count(*) {in_time} AND status = 'ok' AND reward IS NOT NULL")
    yield "rollouts_lost", dict(archive.db.execute(f"SELECT status, count(*) {in_time} AND status <> 'ok' GROUP BY 1"))
    yield "updates", archive.count("SELECT count(*) FROM updates")
    trained = "FROM outcomes o JOIN rollouts r USING (task_id)"
    yield "max_staleness", archive.count(f"SELECT coalesce(max(o.trained_on - r.policy_version), 0) {trained}")
    begun = archive.count("SELECT min(clock) FROM rollouts")
    ended = archive.count("SELECT max(clock) FROM groups WHERE outcome = 'trained'")
    yield "wall_s", ended - begun if ended and begun else 0.0


def _curve(versions: AnswersByVersion) -> list[dict[str, Any]]:
    order = sorted(versions.by)
    size = max(1, -(-len(order) // POINTS))
    points = []
    for part in (order[at : at + size] for at in range(0, len(order), size)):
        mine = versions.of(part)
        values = {name: value for name, (value, _) in figures_of(mine).items() if value is not None}
        points.append({"versions": [part[0], part[-1]], "answers": len(mine), **values})
    return points


def _heldout(archive: ArchivedTurns, kinds: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """`kinds`: of problems by id, which follow from what is trained on and stand in no archive."""
    for when in ("before", "after"):
        answers = _best_turns(archive.answers(f"r.purpose = '{when}'"))
        flagged = [a for a in answers if a.key in archive.records and archive.records[a.key].flagged]
        yield from _heldout_figures(answers, "heldout_", when)
        for kind in sorted({kinds[a.problem] for a in answers if a.problem in kinds}):
            mine = [a for a in answers if kinds.get(a.problem) == kind]
            yield from _heldout_figures(mine, f"heldout_{kind}_", when)
        if flagged:
            yield "heldout_problems_flagged", len({a.problem for a in flagged})
            yield from _heldout_figures([a for a in answers if a not in flagged], "heldout_filtered_", when)
    ended = "SELECT group_id, count(DISTINCT rollout_id) FROM rollouts WHERE purpose IN ('before', 'eval') GROUP BY 1"
    sizes = dict(archive.db.execute(ended))
    rounds = [group for group, size in sizes.items() if size == sizes.get("eval-before") and group[:6] == "eval-v"]
    yield (
        "heldout_by_version",
        {
            group.removeprefix("eval-v"): _round(_best_turns(archive.answers(f"r.group_id = '{group}'")))
            for group in rounds
        },
    )


def _heldout_figures(answers: Sequence[LoggedAnswer], prefix: str, when: str) -> Iterator[tuple[str, Any]]:
    yield f"{prefix}answers_{when}", len(answers)
    yield from _one_of_eight(answers, prefix, when)
    for name, (value, speeds) in figures_of([a._replace(group=a.problem) for a in answers]).items():
        if name != "reward_mean":
            yield f"{prefix}{name}_{when}", value
        if name == "speedup_mean":
            yield f"{prefix}{name}_{when}_95", speeds
        if name in SHARES:
            ends = wilson(value, len(answers), float(ndtri((1 + CONFIDENCE) / 2))) if value is not None else None
            yield f"{prefix}{name}_{when}_95", ends


def _one_of_eight(answers: Sequence[LoggedAnswer], prefix: str, when: str) -> Iterator[tuple[str, Any]]:
    """That one of eight answers is correct, of problems that have as many, by counting the draws that have none."""
    right: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        right[answer.problem].append(answer.correct)
    several = [of for _, of in sorted(right.items()) if len(of) >= TRIES]
    chances = np.array([1 - math.comb(of.count(False), TRIES) / math.comb(len(of), TRIES) for of in several])
    yield f"{prefix}pass_at_{TRIES}_{when}", float(chances.mean()) if several else None
    ends = [float(chances.mean())] * 2 if several else None
    if len(several) > 1:
        drawn = bootstrap((chances,), np.mean, n_resamples=1000, method="percentile", rng=np.random.default_rng(0))
        ends = [float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)]
    if ends:
        yield f"{prefix}pass_at_{TRIES}_{when}_95", ends


def _best_turns(answers: Sequence[LoggedAnswer]) -> list[LoggedAnswer]:
    best: dict[str, LoggedAnswer] = {}
    for one in answers:
        kept = best.setdefault(one.rollout, one)
        if (one.correct, one.lo or 0, one.reward) > (kept.correct, kept.lo or 0, kept.reward):
            best[one.rollout] = one
    return list(best.values())


def _round(answers: Sequence[LoggedAnswer]) -> dict[str, float]:
    """Problems weigh alike."""
    by_problem = defaultdict(list)
    for answer in answers:
        by_problem[answer.problem].append(answer)
    values = {**SHARES, "reward_mean": "reward", "policy_version_mean": "version"}
    found = {
        name: statistics.fmean(statistics.fmean(getattr(a, what) for a in mine) for mine in by_problem.values())
        for name, what in values.items()
    }
    found["hack_rate"] = statistics.fmean(
        statistics.fmean(a.fault == "cheating" for a in mine) for mine in by_problem.values()
    )
    found["solved_rate"] = statistics.fmean(any(a.correct for a in mine) for mine in by_problem.values())
    logs = [math.log(a.speedup) for a in answers if a.correct and a.speedup]
    if logs:
        found["speedup_geometric_mean"] = math.exp(statistics.fmean(logs))
    return {f"eval/{name}": value for name, value in found.items()}


def funnel(archive: ArchivedTurns, answers: Sequence[LoggedAnswer]) -> dict[str, dict[str, float]] | None:
    """None where records that say it are gone."""
    entered, failed = Counter[str](), Counter[str]()
    spent: dict[str, list[float]] = defaultdict(list)
    for answer in answers:
        if answer.key not in archive.records:
            return None
        record = archive.records[answer.key]
        last = left_at(answer, record)
        steps = FUNNEL[: FUNNEL.index(last) + 1]
        entered.update(steps)
        failed[last] += not answer.correct
        cost = dict.fromkeys(steps, 0.0)
        for name, _, seconds in record.stages:
            if name in FUNNEL:
                cost[name if name in steps else last] += seconds
        for step in steps:
            spent[step].append(cost[step])
    return {
        step: {
            "entered": entered[step], "passed": entered[step] - failed[step],
            "seconds": round(sum(spent[step]), 3), "median_s": round(float(np.median(spent[step])), 5),
        }
        for step in FUNNEL if entered[step]
    }  # fmt: skip


def left_at(answer: LoggedAnswer, record: TurnRecord) -> str:
    """The step that a candidate failed; the last one where it is correct."""
    if answer.correct:
        return "full_inputs" if answer.speedup is None else "timing"
    if not record.has_kernel:
        return "format"
    if not answer.compiled:
        return "compile" if answer.fault == "compile_error" else "static"
    bench = [(name, fault) for name, fault, _ in record.stages if name in FUNNEL[3:]]
    wrong = [name for name, fault in bench if fault != "ok"]
    if wrong or len(bench) > 1:
        return wrong[0] if wrong else bench[-1][0]
    return FUNNEL[3 + len(bench)]


def _is_sound(answer: LoggedAnswer) -> bool:
    return not answer.disturbed and (answer.hi or 0) <= WIDEST * (answer.lo or 0)


def best_kernels(answers: Sequence[LoggedAnswer]) -> list[dict[str, Any]]:
    """Of each problem the one whose interval begins highest, above 1, unless the measurement was disturbed."""
    sound = [a for a in answers if a.proven and _is_sound(a)]
    first = {a.problem: a for a in sorted(sound, key=lambda a: (a.lo or 0, -a.key))}  # of equal ones the earliest
    ranked = sorted(first.values(), key=lambda a: -(a.lo or 0))[:BEST]
    return [{"problem": a.problem, "speedup": a.speedup, "lo": a.lo, "hi": a.hi} for a in ranked]
