"""From a candidate's source to its verdict: how fast, and whether it is the right one, whatever comes.

`python -m benchmarks.verification COMMAND`
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Literal, Protocol

from benchmarks.harness import CORES, Commands, Result
from benchmarks.verification import corpus, extensions, itself, lanes, level4, mix, second, sizes, sources
from benchmarks.verification.cuda_candidates import CPP, CUDA, NEED_FULL
from kbrl_async.kernels.funnel import Verifier, VerifyOptions
from kbrl_async.kernels.settings import CompileFarm, TimingBench
from kbrl_async.kernels.verify import bench_options
from kbrl_async.runs.archive.archive import ArchiveReader
from kbrl_async.runs.value import JudgedKernel, ValueModel, judged_in, pairs_of
from protocols.records import VERIFIER, BenchReport, BuildReport, Candidate, Fault, Problem, Strictness
from tests.candidates import affine, elementwise

commands = Commands("verification", __doc__)
commands(mix.mix)
commands(lanes.verdicts)
commands(itself.itself)
commands(corpus.honest)
commands(corpus.hostile)
commands(corpus.adapt)
commands(sizes.sizes)
commands(second.second)
commands(level4.models)
commands(sources.sources)
commands(extensions.build)
commands.inner(extensions.execute)


Build = Callable[..., BuildReport]
Bench = Callable[..., BenchReport]


# ── candidates a second ───────────────────────────────────────────────────────────────────────────────────────────


class Case(Protocol):
    @property
    def problem(self) -> Problem: ...

    def variant(self, mark: str) -> Candidate: ...


class InC:
    """One right C kernel, made different by a comment."""

    problem = Problem("corpus/affine", 1, "affine", affine(2, "128, 512"))

    def variant(self, mark: str) -> Candidate:
        return Candidate(elementwise("2 * x[i] + 1", before=f"/* {mark} */"), "c")


@commands
def throughput(
    backend: Literal["cuda", "cpp", "c"] = "cuda",
    candidates: int = 200,
    builders: int = max(1, len(CORES) - 2),
    problems: int = 13,
    timing: bool = True,
) -> Result:
    """From source to verdict: one candidate alone, half by half, and many distinct ones sustained.

    Builders in threads feed one bench, as farm and bench do in a run; candidates come grouped by problem.
    """
    device = "cuda:0" if backend == "cuda" else "cpu"
    corpus = {"cuda": CUDA, "cpp": CPP}.get(backend, [])
    right: list[Case] = [c for c in corpus if c.compiles and not c.raises and c.name not in NEED_FULL] or [InC()]
    with Verifier(device, as_in_a_run(device)) as verifier:
        build, judge = verifier.builder.build, verifier.judge(device, backend).judge
        build(right[0].variant("warm-up"))
        return _alone(build, judge, right[0]) | _sustained(build, judge, right[:problems], candidates, builders, timing)


def as_in_a_run(device: str) -> VerifyOptions:
    """As farm and bench have it; a person's verification has other rules and more room."""
    return VerifyOptions(farm=CompileFarm(deadline_s=60.0), bench=bench_options(TimingBench(), device))


def _alone(build: Build, judge: Bench, case: Case) -> Result:
    """The first also makes the problem's reference; the others find it."""
    spans: dict[str, list[float]] = {"build_s": [], "cached_build_s": [], "verify_s": [], "verify_and_time_s": []}
    whole = []
    for number in range(4):
        candidate = case.variant(f"alone {number}")
        marks = [time.perf_counter()]
        for _ in range(2):
            built = build(candidate, case.problem)
            marks.append(time.perf_counter())
        for timing in (False, True):
            report = judge(case.problem, candidate, built, timing=timing)
            assert report.verdict.fault is Fault.OK, report.verdict
            marks.append(time.perf_counter())
        for span, begin, end in zip(spans.values(), marks, marks[1:], strict=False):
            span.append(end - begin)
        whole.append(spans["build_s"][-1] + spans["verify_and_time_s"][-1])
    medians = {name: median(seconds[1:]) for name, seconds in spans.items()}
    first = spans["build_s"][0] + spans["verify_s"][0]
    return {"alone_first_s": first, "alone_s": median(whole[1:]), **medians, "isolation": report.verdict.isolation}


def _sustained(build: Build, judge: Bench, cases: list[Case], count: int, builders: int, timing: bool) -> Result:
    each = -(-count // len(cases))
    work = [(case, case.variant(f"{place} {number}")) for place, case in enumerate(cases) for number in range(each)]
    ready: queue.Queue[tuple[Case, Candidate, BuildReport]] = queue.Queue(64)

    def make(case: Case, candidate: Candidate) -> None:
        ready.put((case, candidate, build(candidate, case.problem)))

    begin, verdicts, spent = time.perf_counter(), Counter[str](), 0.0
    with ThreadPoolExecutor(builders) as pool:
        for case, candidate in work[:count]:
            pool.submit(make, case, candidate)
        for _ in work[:count]:
            case, candidate, built = ready.get()
            began = time.perf_counter()
            if built.fault is not Fault.OK:
                verdicts[f"{built.fault}: {built.message[:80]}"] += 1
                continue
            verdicts[judge(case.problem, candidate, built, timing=timing).verdict.fault] += 1
            spent += time.perf_counter() - began
    return {
        "candidates": count, "problems": len(cases), "builders": builders, "timing": timing,
        "each_s": (time.perf_counter() - begin) / count, "bench_each_s": spent / count, "verdicts": verdicts,
    }  # fmt: skip


@commands
def strictness(
    run: Annotated[Path, "a run whose archive holds records"],
    /,
    sets: Annotated[int, "after which a wrong kernel is done with"] = 3,
    tolerance: float = 10.0,
    candidates: Annotated[int, "of the archive that reached the bench"] = 60,
) -> Result:
    """What bench time curriculum.strictness=rising saves: kernels of a run that reached the bench, judged both ways.

    The anchor is the full check of the same kernel; which of the two comes first alternates. Nothing is timed.
    """
    with ArchiveReader(run / "rollouts.sqlite") as archive:
        reached = [row.task_id for row in archive.rows() if row.compiled and row.role != VERIFIER][:candidates]
        records = [record for task in reached if (record := archive.record(task)) is not None]
    kinds = {"full": None, "early": Strictness(sets, tolerance)}
    spent: dict[str, dict[str, list[float]]] = {kind: {"wrong": [], "right": []} for kind in kinds}
    near = changed = 0
    with Verifier("cpu", as_in_a_run("cpu")) as verifier:
        judge = verifier.judge("cpu").judge
        for number, record in enumerate(records):
            assert record.candidate is not None
            problem, built = record.request.problem, verifier.build(record.candidate, record.request.problem)
            judge(problem, record.candidate, built, timing=False)  # its reference is made
            verdicts = {}
            for kind in kinds if number % 2 else reversed(kinds):
                began = time.perf_counter()
                report = judge(problem, record.candidate, built, timing=False, strictness=kinds[kind])
                verdicts[kind] = report.verdict
                is_right = report.verdict.fault is Fault.OK
                spent[kind]["right" if is_right else "wrong"].append(time.perf_counter() - began)
            near += verdicts["early"].near > 0
            changed += (verdicts["early"].fault is Fault.OK) != (verdicts["full"].fault is Fault.OK)
    seconds = {kind: {what: sum(each) for what, each in found.items()} for kind, found in spent.items()}
    total = {kind: sum(found.values()) for kind, found in seconds.items()}
    return {
        "ok": not changed, "candidates": len(records), "wrong": len(spent["full"]["wrong"]), "seconds": seconds,
        "saved": 1 - total["early"] / total["full"], "near": near, "other_verdicts": changed,
    }  # fmt: skip


@commands
def value(
    runs: Annotated[tuple[Path, ...], "runs to learn from"],
    test: Annotated[Path, "a run whose kernels are ordered"],
) -> Result:
    """What a value model's order is worth: benches until a group's first right kernel, among those that compiled.

    The anchor is the order in which they were written. Only groups with right and wrong kernels count.
    """
    model = ValueModel().fit(judged_in(runs))
    asked = judged_in([test])
    scores = {one: model.value(one.module, one.kernel) for one in set(asked)}
    ties = [(scores[a], scores[b]) for a, b in pairs_of(asked)]
    groups: dict[str, list[JudgedKernel]] = {}
    for one in asked:
        groups.setdefault(one.group_id, []).append(one)
    mixed = [of for of in groups.values() if len({one.worth[0] for one in of}) == 2]

    def first_right(ordered: list[JudgedKernel]) -> int:
        return next(place for place, one in enumerate(ordered, 1) if one.worth[0])

    return {
        "learned_pairs": model.pairs, "test_pairs": len(ties), "groups": len(mixed),
        "pairs_right": fmean(a > b for a, b in ties),
        "benches_as_written": fmean(map(first_right, mixed)),
        "benches_by_value": fmean(first_right(sorted(of, key=lambda one: -scores[one])) for of in mixed),
    }  # fmt: skip


if __name__ == "__main__":
    commands.main()
