"""`kbrl verify`: what is printed, and an exit code that says whose fault it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kbrl_async import cli
from kbrl_async.errors import InfraError, KbrlError, MissingTool, ProblemError, UserError
from kbrl_async.kernels.backends import backend as load_backend
from kbrl_async.kernels.backends import guess_backend
from kbrl_async.kernels.backends.sanitize.parts import Sanitized
from kbrl_async.kernels.backends.sanitize.sanitize import SanitizerFinding
from kbrl_async.kernels.funnel import Result
from kbrl_async.kernels.funnel.result import with_findings
from kbrl_async.kernels.kernelbench.formats import SampleOutcome
from kbrl_async.kernels.kernelbench.runs import RunFolder, VerificationEnd
from kbrl_async.kernels.problems import load_file
from protocols.records import Candidate, Fault, StageReport, Timing, Verdict

VERDICT = Verdict(
    Fault.OK, 5, 5, max_abs_error=1e-6, tolerance=1e-4, isolation="reduced", isolation_missing=["landlock"],
    kernelbench=True,
)  # fmt: skip
TIMING = Timing(30, 2.0, 1.5, 2.5, 1.0, 2.0, hardware="a core")
RIGHT = Result("L1/01_x", "c", "cpu", VERDICT, (StageReport("format", Fault.OK, 0.1),), TIMING)
WRONG = Result("L1/01_x", "c", "cpu", Verdict(Fault.CHEATING, rule="input_mutation", evidence="input 0"), ())
Answer = Callable[[Result | KbrlError], None]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Says what verification will give."""

    def set_(result: Result | KbrlError) -> None:
        def verify(*_: object, **__: object) -> Result:
            if isinstance(result, KbrlError):
                raise result
            return result

        monkeypatch.setattr("kbrl_async.kernels.funnel.verify", verify)

    return set_


def run(*more: str) -> int:
    return cli.main(["verify", "--problem", "L1/1", "--candidate", "x.py", *more])


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (RIGHT, 0),
        (WRONG, 1),
        (UserError("there is no problem 'x'"), 2),
        (InfraError("the zygote died"), 3),
        (MissingTool("gcc is not installed"), 3),
        (ProblemError("the reference fails"), 3),
    ],
)
def test_the_exit_code_says_whose_fault_it_was(answer: Answer, result: Result | KbrlError, code: int) -> None:
    answer(result)
    assert run() == code


def test_a_table_for_people_says_everything_there_is(answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    answer(RIGHT)
    run()
    out = capsys.readouterr().out
    for words in (
        "format",
        "ok: correct",
        "5 of 5",
        "1e-06",
        "2.000×",
        "1.500 … 2.500",
        "a core",
        "landlock",
        "KernelB",
    ):
        assert words in out


def test_the_rule_and_the_evidence_are_shown(answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    answer(WRONG)
    run()
    out = capsys.readouterr().out
    assert "input_mutation" in out
    assert "input 0" in out


def test_json_is_one_document_on_stdout(answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    answer(WRONG)
    assert run("--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["fault"], document["verdict"]["rule"]) == (False, "cheating", "input_mutation")


def test_our_fault_is_a_document_too(answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    answer(InfraError("the zygote died", "Try again"))
    assert run("--json") == 3
    document = json.loads(capsys.readouterr().out)
    assert document["error"] == {"kind": "InfraError", "cause": "the zygote died", "cure": "Try again"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs --problem and --candidate"),
        (["--problem", "L1/1"], "needs --problem and --candidate"),
        (["--run", "x", "--problem", "L1/1"], "--run verifies a whole folder"),
        (["--run", "x", "--workers", "0"], "--workers 0"),
        (["--run", "nowhere", "--problems", "."], "holds no level"),
        (["--problem", "sofmax", "--candidate", "x.py"], "Nearest: L1/13_softmax"),
        (["--problem", "nowhere.py", "--candidate", "x.py"], "no problem file nowhere.py"),
        (["--problem", "L1/1", "--candidate", "nowhere.py"], "nowhere.py can't be read"),
        (["--problem", "L1/1", "--candidate", "x.py", "--backend", "cobol"], "none of the backends is called 'cobol'"),
        (["--problem", "L1/1", "--candidate", "x.py", "--device", "abacus"], "'abacus' is no device"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (folder / "x.py").write_text("class ModelNew:\n    def forward(self): pass\n")
    assert cli.main(["verify", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("name", "backend"), [("x.c", "c"), ("x.cpp", "cpp"), ("x.cu", "cuda")])
@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_kernel_alone_is_told_what_a_candidate_is(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, backend: str, command: str
) -> None:
    (folder / name).write_text("void f(float *x) {}\n")
    assert cli.main([command, "--problem", "L1/1", "--candidate", name]) == 2
    error = capsys.readouterr().err
    assert f"{name} is a kernel alone; a candidate is a Python file whose class ModelNew launches the kernel" in error
    assert f"kbrl verify --example {backend}" in error


@pytest.mark.parametrize("backend", ["c", "cpp"])
def test_the_example_is_right_as_it_is_written(folder: Path, capsys: pytest.CaptureFixture[str], backend: str) -> None:
    assert cli.main(["verify", "--example", backend]) == 0
    said = capsys.readouterr().out.splitlines()[-1].split()
    assert said[:2] == ["kbrl", "verify"]
    assert cli.main([*said[1:], "--no-timing"]) == 0
    out = capsys.readouterr().out
    assert "ok: correct" in out
    assert "sm_" not in out  # the architecture of a GPU says nothing of a CPU
    assert cli.main(["verify", "--example", backend]) == 2
    assert "example_problem.py is there already" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["cuda", "cuda-nvrtc", "triton"])
def test_the_example_of_every_backend_passes_its_checks(folder: Path, backend: str) -> None:
    assert cli.main(["verify", "--example", backend]) == 0
    text = (folder / "example_kernel.py").read_text()
    assert guess_backend(text) == backend
    assert load_backend(backend).check(Candidate(text, backend)) is None
    load_file(folder / "example_problem.py")


def test_a_run_folder_without_problems_says_how_to_name_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--run", str(folder)]) == 2
    assert "KERNELBENCH_ROOT" in capsys.readouterr().err


@pytest.mark.parametrize(("outcome", "code"), [(WRONG, 0), (None, 3)])
def test_a_run_folder_is_done_when_every_candidate_has_a_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch, outcome: Result | None, code: int
) -> None:
    (folder / "level1").mkdir()
    (folder / "level1" / "1_x.py").write_text(
        "class Model: pass\ndef get_inputs(): pass\ndef get_init_inputs(): pass\n"
    )
    (folder / "level_1_problem_1_sample_0_kernel.py").write_text("x\n")
    written = VerificationEnd(
        [SampleOutcome(1, 1, 0, "key", outcome, "" if outcome else "InfraError: lost")], ["a"], ["b"]
    )
    monkeypatch.setattr(RunFolder, "verify", lambda _self, _done: written)
    assert cli.main(["verify", "--run", str(folder), "--problems", str(folder)]) == code


def test_a_sanitizers_finding_turns_a_right_candidate_into_a_wrong_one() -> None:
    finding = SanitizerFinding("sanitizer:heap-buffer-overflow", "write of 4 bytes", "line 5", Fault.ILLEGAL_ACCESS)
    result = with_findings(RIGHT, Sanitized((finding,), ("asan",)), ())
    assert (result.fault, result.verdict.rule, result.timing) == (Fault.ILLEGAL_ACCESS, finding.rule, None)


def test_a_sanitizer_that_could_not_run_changes_no_verdict() -> None:
    result = with_findings(RIGHT, Sanitized(not_run="no compute-sanitizer"), ())
    assert result.ok
    assert ("sanitizers", "none ran; no compute-sanitizer") in result.rows()
