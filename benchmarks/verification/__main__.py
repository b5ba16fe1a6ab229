"""From a candidate's source to its verdict: how fast, and whether it is the right one, whatever comes.

`python -m benchmarks.verification COMMAND`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal, Protocol

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import CORES, Commands, Halves, Result, say, verifying
from benchmarks.verification import corpus, cost, extensions, itself, lanes, level4, mix, sizes, sources
from benchmarks.verification.cuda_candidates import CPP, CUDA, NEED_FULL
from kbrl_async.kernels.problems import load_suite
from kbrl_async.lab.optimize import engine, evidence, session
from kbrl_async.lab.optimize.search import Budget
from kbrl_async.lab.optimize.targets import Given, UserModule, read_target
from kbrl_async.runs.archive.archive import ArchiveReader
from kbrl_async.runs.value import JudgedKernel, ValueModel, judged_in, pairs_of
from protocols.records import VERIFIER, BenchReport, BuildReport, Candidate, Fault, Problem, Strictness
from tests.candidates import affine, elementwise

commands = Commands("verification", __doc__)
commands(mix.mix)
commands(lanes.verdicts)
commands(itself.itself)
commands(cost.cost)
commands(corpus.honest)
commands(corpus.hostile)
commands(corpus.adapt)
commands(sizes.sizes)
commands(level4.models)
commands(sources.sources)
commands(extensions.build)
commands.inner(extensions.execute)


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
    with verifying(device=device, backend=backend) as halves:
        halves.builder.build(right[0].variant("warm-up"))
        found = _alone(halves, right[0])
        return found | _sustained(halves, right[:problems], candidates, builders, timing)


def _alone(halves: Halves, case: Case) -> Result:
    """The first also makes the problem's reference; the others find it."""
    spans: dict[str, list[float]] = {"build_s": [], "cached_build_s": [], "verify_s": [], "verify_and_time_s": []}
    whole = []
    for number in range(4):
        candidate = case.variant(f"alone {number}")
        marks = [time.perf_counter()]
        for _ in range(2):
            built = halves.builder.build(candidate, case.problem)
            marks.append(time.perf_counter())
        for timing in (False, True):
            report = halves.bench.judge(case.problem, candidate, built, timing=timing)
            assert report.verdict.fault is Fault.OK, report.verdict
            marks.append(time.perf_counter())
        for span, begin, end in zip(spans.values(), marks, marks[1:], strict=False):
            span.append(end - begin)
        whole.append(spans["build_s"][-1] + spans["verify_and_time_s"][-1])
    medians = {name: median(seconds[1:]) for name, seconds in spans.items()}
    first = spans["build_s"][0] + spans["verify_s"][0]
    return {"alone_first_s": first, "alone_s": median(whole[1:]), **medians, "isolation": report.verdict.isolation}


def _sustained(halves: Halves, cases: list[Case], count: int, builders: int, timing: bool) -> Result:
    each = -(-count // len(cases))
    work = [(case, case.variant(f"{place} {number}")) for place, case in enumerate(cases) for number in range(each)]
    ready: queue.Queue[tuple[Case, Candidate, BuildReport]] = queue.Queue(64)

    def build(case: Case, candidate: Candidate) -> None:
        ready.put((case, candidate, halves.builder.build(candidate, case.problem)))

    begin, verdicts, spent = time.perf_counter(), Counter[str](), 0.0
    with ThreadPoolExecutor(builders) as pool:
        for case, candidate in work[:count]:
            pool.submit(build, case, candidate)
        for _ in work[:count]:
            case, candidate, built = ready.get()
            began = time.perf_counter()
            if built.fault is not Fault.OK:
                verdicts[f"{built.fault}: {built.message[:80]}"] += 1
                continue
            verdicts[halves.bench.judge(case.problem, candidate, built, timing=timing).verdict.fault] += 1
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
    with verifying() as halves:
        for number, record in enumerate(records):
            assert record.candidate is not None
            problem, built = record.request.problem, halves.builder.build(record.candidate, record.request.problem)
            halves.bench.judge(problem, record.candidate, built, timing=False)  # its reference is made
            verdicts = {}
            for kind in kinds if number % 2 else reversed(kinds):
                began = time.perf_counter()
                report = halves.bench.judge(problem, record.candidate, built, timing=False, strictness=kinds[kind])
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


# ── exclusive seconds of a GPU ────────────────────────────────────────────────────────────────────────────────────

IN_TRITON = Path(__file__).parent / "triton_candidates"
CASES = {"level1/1_*.py": "matmul.py", "level2/12_*.py": "linear_leaky.py", "level3/1_*.py": "mlp.py"}


@commands
def exclusive(kernelbench: Annotated[Path, "a KernelBench checkout"], rounds: int = 6) -> Result:
    """Exclusive GPU seconds for one Triton candidate, from its start to its verdict and timing.

    The anchor is the same candidate in this process, without isolation, by KernelBench's own recipe (inputs and weights
    drawn on the CPU, five correctness trials, a hundred timed calls).
    """
    found: Result = {}
    texts = {file: next((kernelbench / "KernelBench").glob(pattern)).read_text() for pattern, file in CASES.items()}
    with verifying(device="cuda:0", backend="triton") as halves:
        for file, text in texts.items():
            problem, candidate = Problem(file, 1, file, text), Candidate((IN_TRITON / file).read_text(), "triton")
            found[file] = _exclusive(halves, problem, candidate, rounds)
            say(file, found[file])
    torch.set_num_threads(len(CORES))
    for file, text in texts.items():
        found[file]["anchor_in_process"] = _in_process(text, IN_TRITON / file)
    return {"exclusive_seconds": found}


def _exclusive(halves: Halves, problem: Problem, candidate: Candidate, rounds: int) -> Result:
    built = halves.builder.build(candidate, problem)

    def timed(timing: bool = True) -> tuple[float, BenchReport]:
        begin = time.perf_counter()
        report = halves.bench.judge(problem, candidate, built, timing=timing)
        return time.perf_counter() - begin, report

    first, runs = timed()[0], [timed() for _ in range(rounds)]
    report = runs[-1][1]
    assert report.timing is not None, report.verdict
    return {
        "seconds": median(seconds for seconds, _ in runs),
        "worst": max(seconds for seconds, _ in runs),
        "without_timing": median(timed(False)[0] for _ in range(3)),
        "first_of_a_problem": first,
        "stages": {stage.name: stage.seconds for stage in report.stages},
        "speedup": report.timing.speedup,
    }


def _in_process(problem: str, candidate: Path) -> float:
    """Seconds of KernelBench's recipe."""
    begin = time.perf_counter()
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {"__name__": "anchor"}
    exec(compile(problem, "problem.py", "exec"), theirs)  # the benchmark's own files
    exec(compile(candidate.read_text(), str(candidate), "exec"), ours)
    with torch.no_grad():
        for trial in range(5):
            outputs = []
            for model in (theirs["Model"], ours["ModelNew"]):
                torch.manual_seed(trial)
                made = model(*theirs["get_init_inputs"]()).cuda()
                torch.manual_seed(trial)
                inputs = [x.cuda() for x in theirs["get_inputs"]()]
                outputs.append(made(*inputs))
            torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
        for _ in range(100):
            made(*inputs)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


# ── kbrl optimize ─────────────────────────────────────────────────────────────────────────────────────────────────

OWN = Path(__file__).with_name("user_modules.py")
MODULES = (
    ("bias_gelu_residual", Given("torch.randn(512, 1024), torch.randn(1024), torch.randn(512, 1024)")),
    ("MaskedSoftmax", Given("torch.randn(512, 512), torch.randn(512, 512)", init="2.0")),
    ("huber_rows", Given(inputs_from="make_pairs")),
)


@commands
async def optimize(
    *overrides: str,
    policy: str = "",
    seconds: Annotated[float, "for the search of one module"] = 40.0,
    turns: int = 4,
    heldout: Annotated[int, "problems of the suite"] = 10,
    examples: str = "",
) -> Result:
    """`kbrl optimize` on held-out problems of the suite and on three modules that are in no suite.

    The anchor of each row is the module itself under PyTorch, timed in pairs with the kernel.
    """
    found, config = engine.resolve(policy, "newest", [], list(overrides))
    wanted = session.Wanted(Budget(seconds), turns, examples)
    suite = [UserModule(p, p, "file", "Model", p.problem_id) for p in load_suite(split="heldout")[:heldout]]
    console, rows = Console(stderr=True), []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        threads = stack.enter_context(session.pinned(config))
        verifiers = stack.enter_context(session.open_verifiers(config))
        published = stack.enter_context(engine.published(found, config, lambda _what, _share: None))
        async with engine.open_engine(found, config, threads, published) as opened:
            for target in [*suite, *(read_target(f"{OWN}:{name}", given) for name, given in MODULES)]:
                began = time.monotonic()
                output = folder / f"optimized_{target.stem}.py"
                done = await session.search(wanted, config, target, opened, verifiers.quick, lambda _search: None)
                done = await asyncio.to_thread(session.prove, done, verifiers.careful, output, wanted.allow_slower)
                rows.append(_row(target.title, done, time.monotonic() - began))
                say(json.dumps(rows[-1]))
    _show(rows, console)
    return {"rows": rows}


def _row(title: str, done: Any, seconds: float) -> Result:
    """What one module came to; `by_policy` counts the kernels that the policy itself was proven right with."""
    tree = done.search.tree
    final = done.proof.winner if done.proof else max(done.finals, key=lambda f: f.result.ok, default=None)
    timing = final.result.timing if final else None
    by_policy = [a.judgement.lo or 0.0 for a in tree.proven() if a.origin == "policy"]
    return {
        "module": title,
        "proven": bool(tree.proven()),
        "written": done.proof is not None,
        "speedup": None if timing is None else [timing.speedup, timing.lo, timing.hi],
        "stopped": timing.stopped if timing else "",
        "origin": tree[final.attempt].origin if final else "",
        "by_policy": len(by_policy),
        "best_of_policy_lo": max(by_policy, default=None),
        "refined": sum(a.parent is not None for a in tree.proven()),
        "attempts": len(tree),
        "verified": evidence.counts(done.search)["distinct"],
        "seconds": seconds,
    }


def _show(rows: list[Result], console: Console) -> None:
    table = Table("module", "proven", "speedup", "by", "policy's own", "attempts", "seconds")
    for r in rows:
        speed = "" if r["speedup"] is None else "{:.2f}× [{:.2f}, {:.2f}]".format(*r["speedup"])
        own = f"{r['by_policy']} ({r['best_of_policy_lo']:.2f}×)" if r["by_policy"] else "0"
        said = "yes" if r["written"] else "not faster" if r["proven"] else "no"
        table.add_row(r["module"], said, speed, r["origin"], own, str(r["attempts"]), f"{r['seconds']:.0f}")
    console.print(table)


if __name__ == "__main__":
    commands.main()
