"""Problems of a source on the bench: a lazy honest kernel is accepted, and a copy of the library's answer refused.

Both are made of the problem's own text, so that any problem can be asked without a kernel written for it.

::

    lazy   Model with its inputs brought to memory of their own by an own kernel          ─▶ accepted
    decoy  Model, and an own kernel that copies what the library computed                 ─▶ decoy_kernel
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.harness import CORES, Result, say
from benchmarks.harness.crew import Crew, CrewTask, Work
from kbrl_async.errors import KbrlError, ProblemError
from kbrl_async.kernels.funnel import Result as VerifyResult
from kbrl_async.kernels.funnel import Verifier, VerifyOptions
from kbrl_async.kernels.funnel.verifier import choose_device, default_bench
from kbrl_async.kernels.importing import JOURNAL, ImportedRow
from kbrl_async.kernels.problems import load_problems
from kbrl_async.kernels.verify.checks import DEGENERATE_NOTE
from kbrl_async.kernels.verify.options import ALONE_SHARE
from protocols.records import Candidate, Fault, Problem

Backend = Literal["c", "triton", "cuda-nvrtc"]
State = Literal[
    "as it should", "lazy refused", "decoy accepted", "decoy refused otherwise", "proves nothing", "problem",
    "too large", "too lazy", "no tensor", "host",
]  # fmt: skip
"""`too lazy`: the own kernel's share of a long computation is below what counts. `proves nothing`: the verdict itself
says that zeros, a constant or an input would be right.
"""
NO_TENSOR = "no tensor among the inputs"
TOO_LAZY = ("of the computing time", "of the GPU time")
DECOYS = ("decoy_kernel", "no_own_kernel")
_BODY = """

{top}

def own_copy(x, kernel):
    x = x.contiguous()
    y = torch.empty_like(x)
    if y.numel():
        {call}
    return y


class OwnCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kernel):
        ctx.kernel = kernel
        return own_copy(x, kernel)

    @staticmethod
    def backward(ctx, grad):
        return own_copy(grad, ctx.kernel), None


class ModelNew(Model):
    def __init__(self, *args, **words):
        super().__init__(*args, **words)
        self.own_kernel = {made}

    def own_copy(self, x):
        return {copy}(x, self.own_kernel)
"""
_LAZY = f"""
    def forward(self, *inputs):
        if not any(isinstance(x, torch.Tensor) for x in inputs):
            raise ValueError("{NO_TENSOR}")
        return super().forward(*[self.own_copy(x) if isinstance(x, torch.Tensor) and x.numel() else x for x in inputs])
"""
_DECOY = """
    def forward(self, *inputs):
        found = super().forward(*inputs)
        if isinstance(found, torch.Tensor):
            return self.own_copy(found)
        if isinstance(found, dict):
            return {name: self.own_copy(x) if isinstance(x, torch.Tensor) else x for name, x in found.items()}
        return type(found)(self.own_copy(x) if isinstance(x, torch.Tensor) else x for x in found)
"""
_C = "void own(const char *x, char *y, long n) { for (long i = 0; i < n; i++) y[i] = x[i]; }"
_TRITON = """
import triton
import triton.language as tl


@triton.jit
def own(x, y, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place, mask=place < n), mask=place < n)

"""
_CUDA = (
    'extern "C" __global__ void own(const unsigned char *x, unsigned char *y, long long n) '
    "{ long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; if (i < n) y[i] = x[i]; }"
)


class Way(msgspec.Struct, frozen=True):
    """How a backend copies a tensor: imports, what the constructor keeps, and the call."""

    top: str
    made: str
    call: str


BYTES = "x.numel() * x.element_size()"
WAYS: dict[str, Way] = {
    "c": Way("from kbrl_async.launch import c_kernel\n", f'c_kernel("{_C}", "own")', f"kernel(x, y, {BYTES})"),
    "triton": Way(_TRITON, "own", "own[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)"),
    "cuda-nvrtc": Way(
        "from kbrl_async.launch import cuda_kernel\n",
        f"cuda_kernel({_CUDA!r}, \"own\")",
        f"kernel[({BYTES} + 255) // 256, 256](x, y, {BYTES})",
    ),
}  # fmt: skip


class SourceOutcome(msgspec.Struct, frozen=True):
    """Of one problem. `seconds`: of the lazy candidate from its source to its verdict, `stages` what they went into;
    `trust` and `evidence` are its verdict's; where a decoy is what is wrong, the decoy's.
    """

    problem_id: str
    state: State
    why: str = ""
    seconds: float = 0.0
    trust: str = ""
    evidence: str = ""
    stages: dict[str, float] = {}
    details: dict[str, str] = {}


def sources(
    *folders: Annotated[str, "folders that kbrl problems import wrote, or any source of problems"],
    backend: Backend = "c",
    sample: Annotated[int, "problems of each, drawn; 0: all"] = 150,
    jobs: Annotated[int, "processes, each with cores of its own"] = 1,
    seconds: Annotated[float, "for all of them; what is left then is not verified"] = 600.0,
    memory_share: Annotated[float, "of a GPU's memory that one may plan with; 0: as much as all others"] = 0.0,
    seed: int = 0,
    again: Annotated[tuple[str, ...], "states that are verified again all the same"] = (),
    out: Annotated[Path | None, "a file with one JSON object a problem; what is in it is not verified again"] = None,
) -> Result:
    """`ok` where every problem that could be asked came out as it should."""
    drawn = [[(folder, problem) for problem in _drawn(folder, backend, sample, seed)] for folder in folders]
    in_turn = [one for several in itertools.zip_longest(*drawn) for one in several if one is not None]
    tasks = [CrewTask(f"{Path(folder).name}/{problem.problem_id}", problem) for folder, problem in in_turn]
    found: dict[str, list[SourceOutcome]] = {Path(folder).name: [] for folder in folders}
    crew = Crew(jobs, seconds, patience_s=120.0, out=out, again=again)
    for row in crew.run(tasks, partial(verifying, backend, memory_share)):
        source, _, problem_id = row["name"].partition("/")
        found[source].append(msgspec.convert({"problem_id": problem_id, **row}, SourceOutcome))
        say(f"{row['state']:24} {row['name']} {row.get('why', '')[:140]}")
    rows = {folder: {**_imported(Path(folder)), **_counted(found[Path(folder).name])} for folder in folders}
    _show(rows)
    return {"ok": not any(row["wrong"] for row in rows.values()), "sources": rows}


def made(problem: Problem, backend: Backend, *, lazy: bool) -> Candidate:
    """Of the problem's own text."""
    way = WAYS[backend]
    copy = "OwnCopy.apply" if "BACKWARD" in problem.source else "own_copy"
    body = _BODY.format(top=way.top, made=way.made, call=way.call, copy=copy)
    return Candidate(f"{problem.source}{body}{_LAZY if lazy else _DECOY}", backend)


def judged(problem: Problem, backend: Backend, verifier: Verifier) -> SourceOutcome:
    """Both candidates; whatever a problem is, it is an outcome and no exception."""
    begun = time.monotonic()
    try:
        asked = verifier.verify(problem, made(problem, backend, lazy=True))
        lazy, told = asked.verdict, _told_of(asked)
        spent = round(time.monotonic() - begun, 2)
        if lazy.fault is not Fault.OK:
            state: State = "no tensor" if NO_TENSOR in lazy.message else "lazy refused"
            state = "too lazy" if any(words in lazy.message for words in TOO_LAZY) else state
            why = f"{lazy.fault} {lazy.rule}: {lazy.message}"[:400]
            return SourceOutcome(problem.problem_id, state, why, spent, *told)
        copied = verifier.verify(problem, made(problem, backend, lazy=False))
        decoy = copied.verdict
    except ProblemError as error:
        return SourceOutcome(
            problem.problem_id, "too large" if "does not fit" in str(error) else "problem", str(error)[:400]
        )
    except KbrlError as error:
        verifier.restart()
        return SourceOutcome(problem.problem_id, "host", f"{type(error).__name__}: {error}"[:400])
    if decoy.rule in DECOYS:
        return SourceOutcome(problem.problem_id, "as it should", "", spent, *told)
    why = f"{decoy.fault} {decoy.rule}: {decoy.message}"[:400]
    if decoy.fault is not Fault.OK:
        return SourceOutcome(problem.problem_id, "decoy refused otherwise", why, spent, *_told_of(copied))
    is_known = DEGENERATE_NOTE in decoy.evidence
    state = "proves nothing" if is_known else "decoy accepted"
    return SourceOutcome(problem.problem_id, state, why, spent, *_told_of(copied))


def _told_of(result: VerifyResult) -> tuple[str, str, dict[str, float], dict[str, str]]:
    """Trust, evidence, and the stages' seconds and details."""
    verdict, stages = result.verdict, result.stages
    return (
        f"{verdict.trust} {verdict.trust_reason}".strip(),
        verdict.evidence[:300],
        {stage.name: round(stage.seconds, 2) for stage in stages},
        {stage.name: stage.detail for stage in stages if stage.detail},
    )


def _drawn(folder: str, backend: Backend, sample: int, seed: int) -> list[Problem]:
    shapes = "cpu" if choose_device(backend, None) == "cpu" else "gpu"
    try:
        problems = load_problems(folder, shapes=shapes)
    except ProblemError as error:
        say(f"left out: {error}")
        return []
    return random.Random(seed).sample(problems, min(sample or len(problems), len(problems)))


@contextlib.contextmanager
def verifying(backend: Backend, memory_share: float, number: int, jobs: int) -> Iterator[Work]:
    """What a worker does with a problem."""
    own = tuple(CORES[number::jobs]) or (CORES[number % len(CORES)],)
    share = memory_share or 1 / jobs
    bench = msgspec.structs.replace(
        default_bench(own), memory_share=share, deadline_s=30.0, references=1, alone_share=ALONE_SHARE
    )
    limits = msgspec.structs.replace(bench.limits, memory_bytes=int(bench.limits.memory_bytes / jobs))
    options = VerifyOptions(timing=False, cores=own, bench=msgspec.structs.replace(bench, limits=limits))
    with Verifier(None, options) as verifier:

        def verify(problem: Problem) -> Result:
            told: Result = msgspec.to_builtins(judged(problem, backend, verifier))
            del told["problem_id"]
            return told

        yield verify


def _imported(folder: Path) -> Result:
    """What its import made of the rows; nothing where it is no imported folder."""
    journal = folder / JOURNAL
    if not journal.is_file():
        return {}
    rows = [msgspec.json.decode(line, type=ImportedRow) for line in journal.read_bytes().splitlines()]
    counted = Counter(row.outcome for row in rows)
    return {"read": len(rows), "taken": counted["taken"], "untried": counted["taken, not tried"]}


def _counted(outcomes: Sequence[SourceOutcome]) -> Result:
    seconds = sorted(one.seconds for one in outcomes if one.seconds)
    wrong = [one for one in outcomes if one.state in ("lazy refused", "decoy accepted", "decoy refused otherwise")]
    return {
        "verified": sum(one.seconds > 0 for one in outcomes),
        "as_it_should": sum(one.state == "as it should" for one in outcomes),
        "median_s": median(seconds) if seconds else 0.0,
        "p90_s": seconds[int(0.9 * (len(seconds) - 1))] if seconds else 0.0,
        "states": dict(Counter(one.state for one in outcomes)),
        "trust": dict(Counter(one.trust[:100] for one in outcomes if one.trust)),
        "wrong": [f"{one.problem_id}: {one.state}: {one.why[:200]}" for one in wrong],
        "not_asked": [
            f"{o.problem_id}: {o.why[:120]}" for o in outcomes if o.state in ("problem", "too large", "host")
        ],
    }


def _show(rows: dict[str, Result]) -> None:
    columns = ("read", "taken", "untried", "verified", "as_it_should", "median_s", "p90_s")
    table = Table("source", *columns)
    for folder, row in rows.items():
        table.add_row(
            Path(folder).name, *(f"{row.get(name, ''):.4g}" if row.get(name, "") != "" else "" for name in columns)
        )
    Console(stderr=True).print(table)
