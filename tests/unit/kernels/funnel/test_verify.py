"""Verifying one candidate: each stage ends early or goes on, and what comes out can be read by people and programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

import kbrl_async
from kbrl_async.errors import MissingTool, ProblemError, UserError
from kbrl_async.kernels.backends import guess_backend
from kbrl_async.kernels.funnel import Result, Verifier, read_candidate
from kbrl_async.kernels.funnel.verifier import choose_device
from kbrl_async.kernels.problems import parse_problem
from protocols.records import Fault, Problem, Timing, Verdict
from tests.unit.kernels.funnel.conftest import PROBLEM, QUICK, kernel


def names(result: Result) -> list[str]:
    return [stage.name for stage in result.stages]


def test_a_right_kernel_passes_every_stage_in_order(verifier: Verifier, problem: Problem) -> None:
    result = verifier.verify(problem, kernel())
    assert result.ok
    assert result.exit_code == 0
    assert names(result) == [
        "format", "static", "compile", "reference", "small_inputs", "full_inputs", "timing",
    ]  # fmt: skip
    assert result.timing is not None
    assert result.credit == 1.0
    assert all(stage.seconds >= 0 for stage in result.stages)


@pytest.mark.parametrize(
    ("text", "fault", "last"),
    [
        ("I can't do this.\n```\nno kernel\n```\n", Fault.FORMAT_ERROR, "format"),
        ("import os\n" + kernel(), Fault.STATIC_VIOLATION, "static"),
        (kernel("x[i"), Fault.COMPILE_ERROR, "compile"),
        (kernel("3 * x[i]"), Fault.INCORRECT, "full_inputs"),
        (kernel(extra="for (volatile int i = 0; ; i++) ;"), Fault.TIMEOUT, "small_inputs"),
    ],
)
def test_a_fault_ends_the_funnel_at_its_stage(
    verifier: Verifier, problem: Problem, text: str, fault: Fault, last: str
) -> None:
    result = verifier.verify(problem, text)
    assert (result.fault, names(result)[-1]) == (fault, last)
    assert result.stages[-1].fault is fault
    assert result.exit_code == 1
    assert result.verdict.message


def test_a_wrong_kernel_gets_credit_for_the_sets_that_it_passes(verifier: Verifier, problem: Problem) -> None:
    result = verifier.verify(problem, kernel("(x[i] > 3 || x[i] < -3) ? 0 : 2 * x[i] + 1"))
    assert result.fault is Fault.INCORRECT
    assert 0 < result.credit < 1


def test_a_response_is_unwrapped_before_it_is_judged(verifier: Verifier, problem: Problem) -> None:
    answer = f"<think>first ```python\nbroken\n``` </think>Here it is:\n```python\n{kernel()}\n```\n"
    result = verifier.verify(problem, answer, timing=False)
    assert result.ok
    assert result.origin == "response"


def test_a_python_file_that_mentions_fences_is_not_taken_for_a_response() -> None:
    text = kernel() + '\nNOTE = """\n```python\nclass ModelNew: pass\n```\n"""\n'
    reading = read_candidate(text)
    assert reading.origin == "file"
    assert reading.candidate is not None
    assert reading.candidate.source == text


def test_what_is_said_about_the_file_wins_over_its_looks() -> None:
    assert read_candidate(kernel(), response=True).origin == "response"
    assert read_candidate("```python\nx\n```\n", response=False).candidate is not None


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("from kbrl_async.launch import c_kernel", "c"),
        ("import triton\nimport triton.language as tl", "triton"),
        ("from torch.utils.cpp_extension import load_inline\nload_inline(name='a', cuda_sources=s)", "cuda"),
        ("from torch.utils.cpp_extension import load_inline\nload_inline(name='a', cpp_sources=s)", "cpp"),
        ("k = torch.cuda._compile_kernel(SOURCE, 'f')", "cuda-nvrtc"),
        ("import torch", "c"),
    ],
)
def test_the_backend_is_guessed_from_what_the_file_calls(text: str, backend: str) -> None:
    assert guess_backend(text) == backend


def test_one_call_does_it_all_in_a_thread_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before, children = set(os.listdir("/proc/self/fd")), set(psutil.Process().children(recursive=True))
    file = tmp_path / "mine.py"
    file.write_text(kernel())
    results: list[Result] = []
    thread = threading.Thread(
        target=lambda: results.append(kbrl_async.verify(PROBLEM, file, timing=False, options=QUICK))
    )
    thread.start()
    thread.join()
    assert results[0].ok
    assert set(os.listdir("/proc/self/fd")) <= before
    assert os.listdir(tmp_path) == ["mine.py"]
    assert set(psutil.Process().children(recursive=True)) <= children


def test_the_result_reads_well_in_a_notebook(verifier: Verifier, problem: Problem) -> None:
    result = verifier.verify(problem, kernel("3 * x[i]"))
    assert repr(result).startswith("<L1/01_double · c · incorrect")
    assert "<th>verdict</th><td>incorrect</td>" in result._repr_html_()
    assert "&lt;" in verifier.verify(problem, "import b\n" + kernel("x[i] <")).__class__._repr_html_(
        Result("<a>", "c", "cpu", result.verdict, ())
    )


def test_the_document_holds_what_a_program_needs(verifier: Verifier, problem: Problem) -> None:
    document = json.loads(json.dumps(verifier.verify(problem, kernel(), timing=False).document()))
    assert (document["ok"], document["fault"], document["exit_code"], document["compiled"]) == (True, "ok", 0, True)
    assert document["verdict"]["isolation"] in ("full", "reduced", "none")
    assert [stage["name"] for stage in document["stages"]][:3] == ["format", "static", "compile"]


def test_a_reference_that_fails_is_never_the_candidates_fault(verifier: Verifier) -> None:
    broken = parse_problem(PROBLEM.replace("x * 2 + 1", "x @ x"), "L1/02_broken")
    with pytest.raises(ProblemError, match="reference of L1/02_broken fails"):
        verifier.verify(broken, kernel())


def test_a_gpu_that_is_not_there_is_the_hosts_fault_and_found_only_after_compiling(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kbrl_async.kernels.funnel.verifier.NVIDIA_DEVICE", Path("/nowhere"))
    with Verifier("cuda", QUICK) as verifier:
        assert verifier.verify(problem, kernel("x[i")).fault is Fault.COMPILE_ERROR
        with pytest.raises(MissingTool, match="no NVIDIA GPU"):
            verifier.verify(problem, kernel())


def test_a_kernel_for_gpus_is_not_run_on_a_cpu() -> None:
    with pytest.raises(UserError, match="kernels of cuda run on a GPU, not on cpu"):
        choose_device("cuda", "cpu")
    assert (choose_device("triton", "cpu"), choose_device("", "cpu")) == ("cpu", "cpu")


def test_a_device_that_is_none_is_wrong_usage(problem: Problem) -> None:
    with pytest.raises(UserError, match="'abacus' is no device"), Verifier("abacus", QUICK) as verifier:
        verifier.verify(problem, kernel())


@pytest.mark.parametrize("candidate", ["nowhere.py", b"\xff\xfe"])
def test_a_candidate_that_cant_be_read_is_wrong_usage(tmp_path: Path, candidate: str | bytes) -> None:
    path = tmp_path / "x.py"
    if isinstance(candidate, bytes):
        path.write_bytes(candidate)
    with pytest.raises(UserError, match="candidate"):
        kbrl_async.verify(PROBLEM, path)


def test_importing_the_package_stays_light() -> None:
    program = "import sys, kbrl_async; assert 'torch' not in sys.modules and 'verify' in dir(kbrl_async)"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[4]).returncode == 0


def test_a_name_that_the_package_lacks_is_still_an_error() -> None:
    with pytest.raises(AttributeError, match="verifi"):
        kbrl_async.verifi  # noqa: B018 - looking it up is the test


_THREADS = """
int threads = 0, *count = &threads;
{
#pragma omp parallel num_threads(4)
#pragma omp atomic
    (*count)++;
}
for (long i = 0; i < n; i++) y[i] = 2 * x[i] + threads;
"""


def test_a_kernel_and_its_reference_have_one_core_each(verifier: Verifier, problem: Problem) -> None:
    """The right answer is 2x + 1: it is right because four threads were asked for, and one came."""
    result = verifier.verify(problem, kernel(extra=_THREADS))
    assert result.ok, result.verdict.message
    assert dict(result.rows())["cores"].startswith("candidate 1, reference 1")


def test_the_module_of_a_candidate_may_have_another_name(verifier: Verifier, problem: Problem) -> None:
    assert verifier.verify(problem, kernel().replace("class ModelNew", "class Other") + "\nModelNew = Other\n").ok


def test_options_that_change_arithmetic_are_said(verifier: Verifier, problem: Problem) -> None:
    loose = kernel().replace("#include <math.h>", '#pragma GCC optimize("Ofast")\\n#include <math.h>')
    result = verifier.verify(problem, loose)
    assert result.ok, result.verdict.message
    assert dict(result.rows())["arithmetic"].startswith("-Ofast: ")
    assert "arithmetic" not in dict(verifier.verify(problem, kernel()).rows())


@pytest.mark.parametrize(
    ("lo", "hi", "stopped", "claim"),
    [
        (1.01, 2.0, "resolved", "proven faster"),
        (0.5, 0.99, "resolved", "proven slower"),
        (0.5, 1.0, "cap", "not shown to be faster"),
        (0.5, 0.99, "disturbed", "nothing is proven, others had the core"),
    ],
)
def test_what_the_interval_proves_is_said(lo: float, hi: float, stopped: str, claim: str) -> None:
    timing = Timing(8, (lo + hi) / 2, lo, hi, 1.0, 1.0, stopped=stopped)
    result = Result("L1/01_x", "c", "cpu", Verdict(Fault.OK), (), timing)
    assert dict(result.rows())["speedup"].endswith(f"): {claim}")
