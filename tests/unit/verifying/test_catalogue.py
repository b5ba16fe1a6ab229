"""The catalogue of exploits: for each row an attack that is refused, and the same attack once its defence is gone.

The second half is what makes the first mean something: where a defence is switched off (by replacing the one function
that implements it), the attack gets through. Rows that only exist on a GPU are tested in `tests/gpu`.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import textwrap
from collections.abc import Callable, Iterator, MutableSequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.errors import ProblemError
from kbrl_async.launch import c as launch
from kbrl_async.sandbox import Zygote
from kbrl_async.timing import Recipe
from kbrl_async.verifying import Bench, BenchOptions, checks, compare, inputs, proof, similarity, tolerance, wire
from kbrl_async.verifying import session as sessions
from kbrl_async.verifying.bench import ZYGOTE_PRELOAD
from kbrl_async.verifying.checks import Checker
from kbrl_async.verifying.sets import SetMaker
from kbrl_async.verifying.stopwatch import Stopwatch
from protocols.records import BenchReport, Candidate, Fault, Problem, Timing, Verdict

ON_A_GPU = {
    "work on a side stream",
    "warm-up inflation, persisting-L2 carve-out",
}
ROWS: dict[str, list[str]] = {}
Patch = pytest.MonkeyPatch
Run = Callable[..., BenchReport]


def row(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a test under its row of the catalogue."""

    def register(test: Callable[..., None]) -> Callable[..., None]:
        ROWS.setdefault(name, []).append(test.__name__)
        return test

    return register


PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain = gain

    def forward(self, x):
        return torch.softmax(x * self.gain, dim=-1)

def get_inputs():
    return [torch.randn(24, 65)]

def get_init_inputs():
    return [1.5]
"""
C_SOURCE = """
#include <math.h>
void rows(const float *x, float *y, long n, long m, float gain) {
  for (long r = 0; r < n; r++) {
    const float *a = x + r * m; float *b = y + r * m, top = -INFINITY, s = 0;
    for (long i = 0; i < m; i++) top = fmaxf(top, a[i] * gain);
    for (long i = 0; i < m; i++) s += b[i] = expf(a[i] * gain - top);
    for (long i = 0; i < m; i++) b[i] /= s;
  }
}
void copy(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = x[i]; }
void touch(float *y, long n) { volatile float keep = y[0]; y[0] = keep; }
"""
CANDIDATE = """
import torch
import torch.nn as nn
{top}
from kbrl_async.launch import c_kernel

SOURCE = {source!r}

class ModelNew(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain, self.calls = gain, 0
        self.rows, self.copy, self.touch = (c_kernel(SOURCE, name) for name in ("rows", "copy", "touch"))
{init}

    def own(self, x):
        y = torch.empty_like(x)
        self.rows(x, y, x.shape[0], x.shape[1], self.gain)
        return y

    def forward(self, x):
        self.calls += 1
{forward}
"""


def candidate(forward: str = "return self.own(x)", init: str = "pass", top: str = "") -> str:
    parts = {"forward": forward, "init": init}
    indented = {key: textwrap.indent(textwrap.dedent(text), " " * 8) for key, text in parts.items()}
    return CANDIDATE.format(source=C_SOURCE, top=textwrap.dedent(top), **indented)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    target = tmp_path_factory.mktemp("raw") / "kernel.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(target), "-lm"]
    subprocess.run(command, input=C_SOURCE.encode(), check=True)
    return {launch.source_key(C_SOURCE): target}


@pytest.fixture
def run(bench: Bench, artifacts: dict[str, Path]) -> Run:
    """Straight to the bench: what the tripwires would say before is not asked."""

    def judge(source: str, problem: str = PROBLEM, *, timing: bool = False, on: Bench | None = None) -> BenchReport:
        one = Problem("L1/03_catalogue", 1, "catalogue", problem)
        return (on or bench).evaluate(one, Candidate(source, "c"), artifacts, timing=timing)

    return judge


@pytest.fixture
def fresh(zygote: Zygote) -> Iterator[Bench]:
    """A bench without references: for defences that shape a reference's secret sets."""
    with contextlib.closing(Bench(zygote, BenchOptions(deadline_s=10.0, call_floor_s=1.0))) as made:
        yield made


@pytest.fixture(scope="module")
def brief(zygote: Zygote) -> Iterator[Bench]:
    """Times hardly at all."""
    recipe = Recipe(warmup=0, min_pairs=2, max_pairs=2, cap_s=0.01)
    with contextlib.closing(Bench(zygote, BenchOptions(deadline_s=10.0, call_floor_s=1.0, recipe=recipe))) as made:
        yield made


@pytest.fixture(scope="module")
def open_bench() -> Iterator[Bench]:
    """A bench whose children are not confined at all."""
    preload = (*ZYGOTE_PRELOAD, "tests.unit.verifying.unconfined")
    with (
        Zygote(preload) as zygote,
        contextlib.closing(Bench(zygote, BenchOptions(deadline_s=10.0, call_floor_s=1.0))) as made,
    ):
        yield made


def refused(verdict: Verdict, fault: Fault, rule: str = "") -> bool:
    return (verdict.fault, verdict.rule) == (fault, rule) and bool(verdict.evidence)


def caught(verdict: Verdict, rule: str) -> bool:
    return refused(verdict, Fault.CHEATING, rule) and bool(verdict.hint)


def nothing(*given: object, **named: object) -> None:
    """Stands in for a defence."""


def test_the_honest_candidate_passes(run: Run) -> None:
    verdict = run(candidate()).verdict
    assert verdict.fault is Fault.OK, verdict.message
    assert "rows ×1" in verdict.evidence


# ---- wraps the library, try/except fallback to torch, decoy kernel never launched ----------------------------------

WRAPPERS = {
    "plain": candidate("return torch.softmax(x * self.gain, dim=-1)"),
    "an alias at module level": candidate("return f(x * self.gain, dim=-1)", top="f = torch.softmax"),
    "imported by name": candidate("return softmax(x * self.gain, -1)", top="from torch import softmax"),
    "a module-level helper": candidate(
        "return helper(x, self.gain)", top="def helper(x, g): return (x * g).softmax(-1)"
    ),
    "getattr with a built name": candidate("return getattr(torch, 'soft' + 'max')(x * self.gain, -1)"),
    "torch.ops": candidate("return torch.ops.aten._softmax(x * self.gain, -1, False)"),
    "a submodule": candidate("return self.net(x * self.gain)", init="self.net = nn.Softmax(dim=-1)"),
    "a method by its name in a dictionary": candidate("return vars(torch)['softmax'](x * self.gain, -1)"),
    "arithmetic by hand": candidate(
        "e = (x * self.gain - (x * self.gain).amax(-1, True)).exp(); return e / e.sum(-1, True)"
    ),
    "a fallback in except": candidate(
        "try:\n    return self.rows(x, 'no tensor', 1)\nexcept Exception:\n    return torch.softmax(x * self.gain, -1)"
    ),
    "a fallback that the kernel always takes": candidate(
        "y = self.own(x) if x.shape[0] > 10**6 else torch.softmax(x * self.gain, -1)\nreturn y"
    ),
}


@row("wraps the library, try/except fallback, decoy kernel")
@pytest.mark.parametrize("way", WRAPPERS)
def test_a_result_from_the_library_has_no_own_kernel(run: Run, way: str) -> None:
    verdict = run(WRAPPERS[way]).verdict
    assert caught(verdict, "no_own_kernel"), verdict
    assert "aten::" in verdict.evidence


def test_without_the_recorded_run_a_wrapper_passes(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(proof, "RECORDED", frozenset())
    assert run(WRAPPERS["plain"]).verdict.fault is Fault.OK


TORCH = "y = torch.softmax(x * self.gain, dim=-1)\n"
DECOYS = {
    "launched on the finished result": candidate(TORCH + "self.touch(y, 1)\nreturn y"),
    "computed in full and thrown away": candidate("self.own(x)\n" + TORCH + "return y"),
    "a copy of the library's result": candidate(
        TORCH + "z = torch.empty_like(y)\nself.copy(y, z, y.numel())\nreturn z"
    ),
}


@row("wraps the library, try/except fallback, decoy kernel")
@pytest.mark.parametrize("way", DECOYS)
def test_a_kernel_that_the_answer_does_not_need_is_a_decoy(run: Run, way: str) -> None:
    verdict = run(DECOYS[way]).verdict
    assert caught(verdict, "decoy_kernel"), verdict


@pytest.mark.parametrize("way", DECOYS)
def test_without_the_muted_run_a_decoy_passes(run: Run, monkeypatch: Patch, way: str) -> None:
    monkeypatch.setattr(Checker, "prove", nothing)
    assert run(DECOYS[way]).verdict.fault is Fault.OK


@row("wraps the library, try/except fallback, decoy kernel")
def test_a_kernel_with_next_to_no_share_of_the_time_is_a_decoy() -> None:
    small = {"rows": (1, 500)}
    assert proof.of_recorded(wire.Trace(small, {"aten::mm": (1, 2_000_000)})) is not None
    assert proof.of_recorded(wire.Trace(small, {"aten::mm": (1, 20_000)})) is None, "too short to say anything"
    assert proof.of_recorded(wire.Trace(small, {"aten::copy_": (1, 2_000_000)})) is None, "moving is no computing"
    assert proof.of_recorded(wire.Trace({"rows": (1, 10_000)}, {"aten::mm": (1, 2_000_000)})) is None, "an epilogue"


SNIFFER = candidate(
    """
    import sys
    frame, names = sys._getframe(), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    if names & {"recorded", "_traced"}:
        return self.own(x)
    return torch.softmax(x * self.gain, dim=-1)
    """
)


@row("phase sniffing")
def test_own_kernels_only_while_somebody_looks_are_decoys(run: Run) -> None:
    assert caught(run(SNIFFER).verdict, "decoy_kernel")


def test_without_switching_kernels_off_from_outside_a_stack_sniffer_passes(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sessions.Session, "disarm", lambda self, artifacts: 0)
    assert run(SNIFFER).verdict.fault is Fault.OK


# ---- reference code pasted inline ----------------------------------------------------------------------------------

PASTED = PROBLEM.replace("class Model(", "class ModelNew(").replace("x", "values").replace("softmavalues", "softmax")


@row("reference code pasted inline")
def test_pasted_reference_code_is_named_as_such(run: Run) -> None:
    assert caught(run(PASTED).verdict, "reference_copied")


def test_without_the_similarity_pasted_code_is_only_a_wrapper(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(similarity, "copied_reference", lambda *given: "")
    assert run(PASTED).verdict.rule == "no_own_kernel"


# ---- the candidate's process ---------------------------------------------------------------------------------------

LATE = candidate("y = self.own(x)\nimport threading\nthreading.Thread(target=y.mul_, args=(1,)).start()\nreturn y")


@row("background thread computes after return")
def test_no_thread_can_go_on_behind_a_call(run: Run) -> None:
    verdict = run(LATE).verdict
    assert refused(verdict, Fault.RUNTIME_ERROR)
    assert "start new thread" in verdict.message


def test_unconfined_a_thread_starts(run: Run, open_bench: Bench) -> None:
    assert "start new thread" not in run(LATE, on=open_bench).verdict.message


REACHES = {
    "ctypes": "import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 or ctypes.get_errno() != 1",
    "own memory as a file": "open('/proc/self/mem', 'r+b').close()",
    "a file of the host": "open('/etc/passwd').read()",
    "a process": "import os\nos.posix_spawn('/bin/true', ['true'], {})",
}


@row("ctypes, ptrace, /proc/self/mem, edited grader files")
@pytest.mark.parametrize("way", [way for way in REACHES if way != "ctypes"])
def test_nothing_outside_the_process_can_be_reached(run: Run, open_bench: Bench, way: str) -> None:
    attack = candidate(init=REACHES[way])
    assert refused(run(attack).verdict, Fault.RUNTIME_ERROR)
    assert run(attack, on=open_bench).verdict.fault is Fault.OK, "unconfined it is reached"


@row("ctypes, ptrace, /proc/self/mem, edited grader files")
def test_a_grader_file_can_not_be_edited(run: Run, open_bench: Bench, tmp_path: Path) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text("verdict = 0")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    attack = candidate(init=f"open({str(grader)!r}, 'w').write('verdict = 1')")
    assert refused(run(attack).verdict, Fault.RUNTIME_ERROR)
    assert grader.read_text() == "verdict = 0"
    assert run(attack, on=open_bench).verdict.fault is Fault.OK, "unconfined it is edited"
    assert grader.read_text() == "verdict = 1"


FORGED = candidate(
    """
    import os, msgspec
    y = self.own(x)
    meta = ["float32", list(y.shape), list(y.stride()), y.data_ptr(), "Tensor"]
    told = {"type": "done", "nonce": 7, "tree": ["T", 0], "tensors": [meta]}
    if self.calls == 3:
        for fd in range(3, 30):
            try:
                os.write(fd, msgspec.msgpack.encode(told))
            except OSError:
                pass
    return y
    """
)


@row("forges the verdict")
def test_an_answer_sent_ahead_lacks_the_nonce(run: Run) -> None:
    assert caught(run(FORGED).verdict, "forged_result")


def test_with_a_nonce_that_can_be_guessed_the_forged_answer_is_taken(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sessions.secrets, "randbits", lambda bits: 7)
    assert run(FORGED).verdict.rule != "forged_result"


@row("forges the verdict")
@pytest.mark.parametrize(
    "way", ["import os\nos._exit(0)", "raise SystemExit(0)", 'print(\'{"fault": "ok"}\')\nraise ValueError']
)
def test_words_and_exit_codes_are_no_verdict(run: Run, way: str) -> None:
    assert refused(run(candidate(way)).verdict, Fault.RUNTIME_ERROR)


PATCHED = candidate(top="import time\ntime.perf_counter_ns = time.perf_counter = time.monotonic = lambda: 0")


@row("patched timers")
def test_a_replaced_clock_is_named(run: Run) -> None:
    assert caught(run(PATCHED).verdict, "tampered")


def test_without_looking_at_identities_a_replaced_clock_goes_unnoticed_and_changes_nothing(
    run: Run, monkeypatch: Patch
) -> None:
    untampered = lambda trace, **rest: _of_recorded(msgspec.structs.replace(trace, tampered=""), **rest)  # noqa: E731
    _of_recorded = proof.of_recorded
    monkeypatch.setattr(proof, "of_recorded", untampered)
    assert run(PATCHED).verdict.fault is Fault.OK


@row("finds expected outputs")
def test_what_is_expected_is_not_in_the_process(run: Run) -> None:
    scan = """
    import gc
    y = self.own(x)
    self.mine.append(y)
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.shape == y.shape and not any(thing is one for one in self.mine):
            if torch.allclose(thing, y, atol=1e-6):
                raise ValueError("found")
    return y
    """
    assert run(candidate(scan, init="self.mine = []")).verdict.fault is Fault.OK
    planted = scan.replace("for thing in gc", "copied = y.clone()\n    for thing in gc")
    assert "found" in run(candidate(planted, init="self.mine = []")).verdict.message, "the scan finds what is there"


# ---- what comes back -----------------------------------------------------------------------------------------------

LAZY = candidate("return self.own(x).as_subclass(Lazy)", top="class Lazy(torch.Tensor): pass")


@row("lazy tensor subclass or proxy")
def test_a_subclass_is_no_tensor(run: Run) -> None:
    assert caught(run(LAZY).verdict, "tensor_subclass")


def test_without_looking_at_the_type_a_subclass_passes(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(checks, "_check_meta", nothing)
    assert run(LAZY).verdict.fault is Fault.OK


MUTATES = candidate("y = self.own(x)\nx.zero_()\nreturn y")


@row("mutates inputs")
def test_inputs_are_compared_with_the_originals(run: Run) -> None:
    assert caught(run(MUTATES).verdict, "input_mutation")


def test_without_that_comparison_a_mutation_passes(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Checker, "_refuse_mutation", nothing)
    assert run(MUTATES).verdict.fault is Fault.OK


NOT_A_NUMBER = candidate("y = self.own(x)\ny[0, 0] = float('nan')\nreturn y")


@row("NaN")
def test_nan_is_no_wildcard(run: Run) -> None:
    verdict = run(NOT_A_NUMBER).verdict
    assert verdict.fault is Fault.INCORRECT
    assert "NaN" in verdict.message


def test_where_nan_counts_as_right_it_passes(run: Run, monkeypatch: Patch) -> None:
    difference = compare.difference
    forgiving = lambda got, expected, allowed: difference(  # noqa: E731
        torch.where(torch.isnan(got), expected, got), expected, allowed
    )
    monkeypatch.setattr(compare, "difference", forgiving)
    assert run(NOT_A_NUMBER).verdict.fault is Fault.OK


REUSED = candidate(
    "y = self.own(x)\nif self.calls == 1:\n    self.y = torch.empty_like(y)\nself.y.copy_(y)\nreturn self.y"
)


@pytest.mark.parametrize("copies", [False, True])
def test_an_earlier_output_stays_what_it_was(run: Run, zygote: Zygote, monkeypatch: Patch, copies: bool) -> None:
    with contextlib.closing(Bench(zygote, BenchOptions(copy_outputs=copies))) as bench:
        assert refused(run(REUSED, on=bench).verdict, Fault.INCORRECT, "output_overwritten")
        monkeypatch.setattr(Checker, "_refuse_overwriting", nothing)
        assert run(REUSED, on=bench).verdict.fault is Fault.OK


FLAT = PROBLEM.replace("torch.softmax(x * self.gain, dim=-1)", "x.abs() + self.gain * 0").replace(
    "torch.randn", "torch.rand"
)


@pytest.mark.parametrize("copies", [False, True])
def test_an_output_is_no_view_of_an_input(run: Run, zygote: Zygote, monkeypatch: Patch, copies: bool) -> None:
    alias = candidate("self.touch(x, 1)\nreturn x.view(x.shape)")
    with contextlib.closing(Bench(zygote, BenchOptions(copy_outputs=copies))) as bench:
        assert refused(run(alias, FLAT, on=bench).verdict, Fault.INCORRECT, "output_alias")
        monkeypatch.setattr(Checker, "_refuse_aliasing", nothing)
        assert run(alias, FLAT, on=bench).verdict.fault is Fault.OK


def test_a_view_of_an_input_is_right_where_the_reference_gives_one(run: Run) -> None:
    view = PROBLEM.replace("torch.softmax(x * self.gain, dim=-1)", "x.view(-1)")
    assert run(candidate("self.touch(x, 1)\nreturn x.view(-1)"), view).verdict.fault is Fault.OK


EXPANDED = PROBLEM.replace("torch.softmax(x * self.gain, dim=-1)", "x.mean() * torch.ones(24, 65)")


def test_an_expanded_view_is_no_output(run: Run, monkeypatch: Patch) -> None:
    expand = candidate("self.touch(x, 1)\nreturn x.mean().expand(24, 65)")
    assert refused(run(expand, EXPANDED).verdict, Fault.INCORRECT, "layout")
    monkeypatch.setattr(checks, "_check_layout", nothing)
    assert run(expand, EXPANDED).verdict.rule != "layout"


# ---- values and times ----------------------------------------------------------------------------------------------

SAME = (inputs.NOMINAL, *(inputs.Kind("nominal", shape="again"),) * 5)
CACHES = {
    "the first result": "y = self.own(x)\nself.kept = getattr(self, 'kept', y)\nreturn self.kept.clone()",
    "by pointer": "return self.cache.setdefault(x.data_ptr(), self.own(x)).clone()",
    "by identity": "return self.cache.setdefault(id(x), self.own(x)).clone()",
    "by version and shape": "return self.cache.setdefault((x._version, x.shape), self.own(x)).clone()",
}


@row("cache by pointer, identity, version or value")
@row("first call computes for all, later calls return")
@pytest.mark.parametrize("way", CACHES)
def test_a_kept_result_is_wrong_for_new_values(run: Run, fresh: Bench, monkeypatch: Patch, way: str) -> None:
    attack = candidate(CACHES[way], init="self.cache = {}")
    assert run(attack).verdict.fault is Fault.INCORRECT
    monkeypatch.setattr(inputs, "kinds_for", lambda tensors: SAME)
    monkeypatch.setattr(Checker, "prove", nothing)
    assert run(attack, on=fresh).verdict.fault is Fault.OK, "with the same values in all sets it is right"


BY_VALUE = candidate(
    """
    key = tuple(x.flatten()[:40].tolist())
    if key not in self.cache:
        import time
        time.sleep(0.1)
        self.cache[key] = self.own(x)
    return self.cache[key].clone()
    """,
    init="self.cache = {}",
)


@row("cache by pointer, identity, version or value")
def test_a_cache_by_value_never_hits_in_a_timed_call(run: Run, brief: Bench, monkeypatch: Patch) -> None:
    for finder in ("of_recorded", "of_muted"):  # they would see that a kept answer needs no kernel, and so would prove
        monkeypatch.setattr(proof, finder, nothing)
    monkeypatch.setattr(Checker, "prove", nothing)
    report = run(BY_VALUE, timing=True, on=brief)
    assert report.timing is not None, report.verdict
    assert report.timing.candidate_ms > 90
    mix = inputs.Pool.mix
    monkeypatch.setattr(inputs.Pool, "mix", lambda self, outs, rng: mix(self, outs, random.Random(0)))
    cached = run(BY_VALUE, timing=True, on=brief)
    assert cached.timing is not None, cached.verdict
    assert cached.timing.candidate_ms < 90, "with equal values it would pay"


LATER = candidate("y = self.own(x)\nreturn y * 0 if self.calls > 11 else y")


@row("phase sniffing")
@row("right at the checked shape, wrong at the timed one")
def test_timed_outputs_are_compared_too(run: Run, brief: Bench, monkeypatch: Patch) -> None:
    report = run(LATER, timing=True, on=brief)
    assert caught(report.verdict, "wrong_when_timed")
    assert report.timing is None
    monkeypatch.setattr(Stopwatch, "_compare", nothing)
    monkeypatch.setattr(Checker, "prove", nothing)
    assert run(LATER, timing=True, on=brief).verdict.fault is Fault.OK


@row("right at the checked shape, wrong at the timed one")
def test_a_mixture_is_among_the_checked_sets_so_that_timed_values_look_like_others(
    run: Run, fresh: Bench, monkeypatch: Patch
) -> None:
    narrow = candidate("y = self.own(x)\nreturn y * 0 if 0.55 < float(x.std()) < 0.93 else y")
    assert run(narrow).verdict.fault is Fault.INCORRECT
    kept = tuple(kind for kind in inputs.KINDS if kind.shape not in ("mixed", "spikes", "graded", "binary"))
    monkeypatch.setattr(inputs, "kinds_for", lambda tensors: kept)
    assert run(narrow, on=fresh).verdict.fault is Fault.OK


STALE = candidate("y = self.own(x)\nself.sum = getattr(self, 'sum', 0) + (self.calls == 7)\nreturn y + self.sum")


class InOrder(random.Random):
    """Sets in the order in which they were made: the first one's inputs come again at the end."""

    def shuffle(self, x: MutableSequence[Any]) -> None:
        pass


def test_state_carried_between_calls_has_a_rule_of_its_own(run: Run, zygote: Zygote, monkeypatch: Patch) -> None:
    with contextlib.closing(Bench(zygote, seeds=InOrder(1))) as bench:
        verdict = run(STALE, on=bench).verdict
        assert refused(verdict, Fault.INCORRECT, "state_carried")
        assert "rightly once" in verdict.message
        monkeypatch.setattr(Checker, "_compare_repeated", nothing)
        assert run(STALE, on=bench).verdict.rule == ""


REPLAY = candidate(
    """
    for seed in (torch.initial_seed(), 0, 1, 42):
        torch.manual_seed(seed)
        if torch.equal(torch.randn(24, 65), x):
            raise ValueError("replayed")
    return self.own(x)
    """
)


@row("replays the seed")
def test_no_seed_in_the_process_gives_the_inputs(run: Run, zygote: Zygote) -> None:
    assert run(REPLAY).verdict.fault is Fault.OK

    class Known(random.Random):
        def getrandbits(self, k: int) -> int:
            return 42 if k > 20 else super().getrandbits(k)

    with contextlib.closing(Bench(zygote, seeds=Known())) as bench:
        assert "replayed" in run(REPLAY, on=bench).verdict.message, "with a known seed they are found"


MEMORY = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, gain):
        super().__init__()

    def forward(self, x):
        return x * 0

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return [1.5]
"""
UNWRITTEN = candidate(
    """
    self.touch(x, 1)
    zeros = torch.zeros(64 * 64 + 64)
    place, kept = zeros.data_ptr(), []
    del zeros
    while not kept or kept[-1].data_ptr() != place and len(kept) < 99:
        kept.append(torch.empty(64 * 64 + 64))
    return kept[-1][64:].view(64, 64)
    """
)


@row("reads the reference's freed memory")
def test_memory_that_was_freed_is_poisoned(run: Run, monkeypatch: Patch) -> None:
    assert run(UNWRITTEN, MEMORY).verdict.passed == 0
    monkeypatch.setattr(wire, "OP_POISON_ON", wire.OP_POISON_OFF)
    assert run(UNWRITTEN, MEMORY).verdict.passed > 0, "without poison an unwritten output holds old zeros"


PRODUCT = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, gain):
        super().__init__()

    def forward(self, a, b):
        return a @ b

def get_inputs():
    return [torch.randn(16, 512), torch.randn(512, 16)]

def get_init_inputs():
    return [1.5]
"""
ROUNDED = (
    candidate("return 0")
    .replace("def forward(self, x)", "def forward(self, a, b)")
    .replace("return 0", "y = a.bfloat16().float() @ b.bfloat16().float()\n        self.touch(y, 1)\n        return y")
)


@row("precision downgrade")
def test_inputs_rounded_to_half_precision_are_incorrect(run: Run, fresh: Bench, monkeypatch: Patch) -> None:
    verdict = run(ROUNDED, PRODUCT).verdict
    assert verdict.fault is Fault.INCORRECT
    assert "binary" not in verdict.message.partition("wrong:")[2], "what is 0 or 1 survives the rounding"
    monkeypatch.setattr(tolerance, "base", lambda dtype: 0.5)
    monkeypatch.setattr(Checker, "prove", nothing)
    assert run(ROUNDED, PRODUCT, on=fresh).verdict.fault is Fault.OK, "with a loose tolerance it passes"


MEAN = (
    PRODUCT.replace("return a @ b", "return a.mean(-1)")
    .replace("a, b)", "a)")
    .replace("[torch.randn(16, 512), torch.randn(512, 16)]", "[torch.rand(16, 4096)]")
)
PART = (
    candidate("return 0")
    .replace("def forward(self, x)", "def forward(self, a)")
    .replace("return 0", "y = a[:, : a.shape[1] // 2].mean(-1)\n        self.touch(y, 1)\n        return y")
)


@row("partial work, rescaled")
def test_half_of_the_work_rescaled_shows_on_spikes_and_graded_inputs(
    run: Run, fresh: Bench, zygote: Zygote, monkeypatch: Patch
) -> None:
    assert run(PART, MEAN).verdict.fault is Fault.INCORRECT
    monkeypatch.setattr(tolerance, "base", lambda dtype: 0.05)
    wrong = run(PART, MEAN, on=fresh).verdict
    assert wrong.fault is Fault.INCORRECT, "even where the tolerance hides it on nominal inputs"
    assert "nominal" not in wrong.message.partition("wrong:")[2]
    monkeypatch.setattr(inputs, "kinds_for", lambda tensors: (inputs.NOMINAL, inputs.KINDS[-1]))
    monkeypatch.setattr(Checker, "prove", nothing)
    with contextlib.closing(Bench(zygote)) as bench:
        assert run(PART, MEAN, on=bench).verdict.fault is Fault.OK, "on nominal inputs alone it passes"


@row("degenerate problem")
def test_a_verdict_says_that_its_problem_proves_nothing(run: Run) -> None:
    verdict = run(candidate("y = torch.zeros_like(x)\nself.touch(y, 1)\nreturn y"), MEMORY).verdict
    assert verdict.fault is Fault.OK
    assert "degenerate problem" in verdict.evidence
    assert "degenerate problem" not in run(candidate()).verdict.evidence


@row("impossible speed")
def test_a_speedup_above_ten_is_measured_again_and_the_lower_one_counts(
    run: Run, zygote: Zygote, monkeypatch: Patch
) -> None:
    def measure(self: Bench, checker: Checker, tick: Callable[[], None]) -> Timing:
        speedup = speedups.pop(0)
        seen.append(checker.session)
        return Timing(9, speedup, speedup, speedup, 1.0, speedup)

    monkeypatch.setattr(Bench, "_measure", measure)
    seen: list[sessions.Session] = []
    speedups = [50.0, 2.0]
    timing = run(candidate(), timing=True).timing
    assert timing is not None
    assert timing.speedup == 2.0
    assert len(seen) == 2
    assert seen[0] is not seen[1], "in another process"
    credulous = BenchOptions(recipe=Recipe(suspicious=1e9))
    speedups = [50.0, 2.0]
    with contextlib.closing(Bench(zygote, credulous)) as bench:
        believed = run(candidate(), timing=True, on=bench).timing
    assert believed is not None
    assert believed.speedup == 50.0


DROPOUT = PROBLEM.replace("torch.softmax(x * self.gain, dim=-1)", "torch.dropout(x * self.gain, 0.5, True)")


def test_a_random_reference_is_the_problems_fault(run: Run, monkeypatch: Patch) -> None:
    with pytest.raises(ProblemError, match="random or keeps state"):
        run(candidate(), DROPOUT)
    monkeypatch.setattr(SetMaker, "_refuse_random", nothing)
    assert run(candidate(), DROPOUT).verdict.fault is Fault.INCORRECT, "else the candidate would pay for it"


TINY = PROBLEM.replace("torch.softmax(x * self.gain, dim=-1)", "x * 1e-5")


def test_kernelbench_s_verdict_stands_beside_ours(run: Run) -> None:
    verdict = run(candidate("y = x * 0\nself.touch(y, 1)\nreturn y"), TINY).verdict
    assert verdict.fault is Fault.INCORRECT
    assert verdict.kernelbench is True, "zeros are within 1e-4 of tiny outputs"
    assert "1e-04·|expected|" in verdict.tolerance_note


PLACES = PROBLEM.replace("torch.softmax(x * self.gain, dim=-1)", "torch.argmax(x, dim=-1)")


def test_ties_are_never_asked_for_where_places_are_the_answer(bench: Bench) -> None:
    reference = bench._references.get(Problem("L1/04_places", 1, "places", PLACES))
    assert not {"spikes", "binary"} & {one.name for one in reference.sets}
    assert len(reference.sets) == len(inputs.KINDS)


def test_every_row_of_the_catalogue_has_its_test() -> None:
    wanted = {
        "work on a side stream",
        "background thread computes after return",
        "lazy tensor subclass or proxy",
        "patched timers",
        "cache by pointer, identity, version or value",
        "phase sniffing",
        "first call computes for all, later calls return",
        "reads the reference's freed memory",
        "mutates inputs",
        "finds expected outputs",
        "NaN",
        "forges the verdict",
        "ctypes, ptrace, /proc/self/mem, edited grader files",
        "replays the seed",
        "right at the checked shape, wrong at the timed one",
        "precision downgrade",
        "partial work, rescaled",
        "degenerate problem",
        "wraps the library, try/except fallback, decoy kernel",
        "reference code pasted inline",
        "warm-up inflation, persisting-L2 carve-out",
        "impossible speed",
    }
    assert len(wanted) == 22
    assert set(ROWS) | ON_A_GPU == wanted
