"""KernelBench run folders: every candidate once, in its schema, going on after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kbrl_async.errors import InfraError, UserError
from kbrl_async.kernels.funnel import Result, Verifier, VerifyOptions
from kbrl_async.kernels.kernelbench.formats import SampleOutcome, eval_results, problems_root, samples
from kbrl_async.kernels.kernelbench.runs import JOURNAL_FILE, RESULTS_FILE, RunFolder, RunOptions, VerificationEnd
from protocols.records import Fault, Problem, StageReport, Verdict
from tests.records import timing
from tests.unit.kernels.funnel.conftest import PROBLEM, QUICK, kernel

COMPILED = (StageReport("compile", Fault.OK, 0.1),)
RIGHT = Result("L1/1_a", "c", "cpu", Verdict(Fault.OK, 5, 5), COMPILED, timing(2.0, 0.5))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Problems 1 and 2 of level 1 below `bench`; samples of problems 1, 2 and 9 in `run`."""
    (tmp_path / "bench" / "level1").mkdir(parents=True)
    for name in ("1_a.py", "2_b.py"):
        (tmp_path / "bench" / "level1" / name).write_text(PROBLEM)
    run = tmp_path / "run"
    run.mkdir()
    for problem, sample, body in ((1, 0, "2 * x[i] + 1"), (1, 1, "x[i]"), (2, 0, "x[i"), (9, 0, "x[i]")):
        (run / f"level_1_problem_{problem}_sample_{sample}_kernel.py").write_text(kernel(body))
    (run / "level_1_problem_1_sample_0_prompt.txt").write_text("not a kernel")
    return run


class Fake:
    """Stands for `Verifier`: answers at once, and remembers what it was asked."""

    asked: list[str] = []  # noqa: RUF012 - one list for all workers is the point
    broken = 0
    result = RIGHT

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def restart(self) -> None:
        Fake.asked.append("restart")

    def verify(self, problem: Problem, text: str, _backend: str | None) -> Result:
        Fake.asked.append(problem.problem_id)
        if Fake.broken:
            Fake.broken -= 1
            raise InfraError("lost")
        return Fake.result


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setattr("kbrl_async.kernels.kernelbench.runs.Verifier", Fake)
    Fake.asked, Fake.broken = [], 0
    return Fake


def bench(run: Path) -> str:
    return str(run.parent / "bench")


def verify_run(
    run: Path, problems: str, options: RunOptions | None = None, done: Callable[[SampleOutcome], None] = lambda _: None
) -> VerificationEnd:
    return RunFolder(run, problems, options or RunOptions()).verify(done)


def test_a_run_folder_gets_both_result_files(
    run_folder: Path, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verifier, "__enter__", lambda _self: verifier)
    monkeypatch.setattr(Verifier, "__exit__", lambda *_: None)
    written = verify_run(run_folder, bench(run_folder), RunOptions(verify=QUICK))
    table = json.loads((run_folder / "eval_results.json").read_text())
    assert list(table) == ["1", "2"]
    right, wrong = table["1"]
    assert set(right) == {"sample_id", "compiled", "correctness", "metadata", "runtime", "runtime_stats"}
    assert (right["compiled"], right["correctness"], right["runtime"] > 0) == (True, True, True)
    assert (wrong["sample_id"], wrong["compiled"], wrong["correctness"], wrong["runtime"]) == (1, True, False, -1.0)
    assert (table["2"][0]["compiled"], "compilation_error" in table["2"][0]["metadata"]) == (False, True)
    errors = [outcome for outcome in written.outcomes if outcome.result is None]
    assert [(o.problem, "has no problem 9" in o.error) for o in errors] == [(9, True)]
    assert len(json.loads((run_folder / RESULTS_FILE).read_text())["outcomes"]) == 4
    assert not (run_folder / JOURNAL_FILE).exists()


def test_what_is_known_is_not_verified_again(run_folder: Path, fake: type[Fake]) -> None:
    verify_run(run_folder, bench(run_folder))
    assert sorted(fake.asked) == ["L1/1_a", "L1/1_a", "L1/2_b"]
    fake.asked.clear()
    (run_folder / "level_1_problem_2_sample_0_kernel.py").write_text(kernel("3 * x[i]"))
    verify_run(run_folder, bench(run_folder))
    assert fake.asked == ["L1/2_b"]


def test_an_interrupted_run_goes_on_where_it_stopped(run_folder: Path, fake: type[Fake]) -> None:
    def stop(_outcome: SampleOutcome) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_run(run_folder, bench(run_folder), done=stop)
    assert not (run_folder / "eval_results.json").exists()
    with (run_folder / JOURNAL_FILE).open("ab") as file:
        file.write(b'{"level":1,"prob')  # a crash in the middle of a line
    known = len(list((run_folder / JOURNAL_FILE).read_bytes().splitlines())) - 1
    fake.asked.clear()
    verify_run(run_folder, bench(run_folder))
    assert known == 1
    assert len(fake.asked) == 3 - known


def test_several_workers_share_the_work(run_folder: Path, fake: type[Fake]) -> None:
    written = verify_run(run_folder, bench(run_folder), RunOptions(workers=3))
    assert len(fake.asked) == 3
    assert len(written.outcomes) == 4


def test_a_host_fault_is_tried_again_and_never_becomes_a_score(run_folder: Path, fake: type[Fake]) -> None:
    fake.broken = 1
    verify_run(run_folder, bench(run_folder))
    assert fake.asked.count("restart") == 1
    fake.broken = 99
    written = verify_run(run_folder, bench(run_folder), RunOptions(overwrite=True, verify=VerifyOptions(timing=False)))
    assert all(outcome.error.startswith(("InfraError", "ProblemError")) for outcome in written.outcomes)
    assert json.loads((run_folder / "eval_results.json").read_text()) == {}


def test_a_file_that_was_there_is_left_alone_unless_told(run_folder: Path, fake: type[Fake]) -> None:
    theirs = run_folder / "eval_results.json"
    theirs.write_text("{}")
    written = verify_run(run_folder, bench(run_folder))
    assert (theirs.read_text(), written.kept) == ("{}", [str(theirs)])
    assert verify_run(run_folder, bench(run_folder), RunOptions(overwrite=True)).kept == []
    assert theirs.read_text() != "{}"


def test_levels_do_not_share_a_file_because_their_numbers_do(run_folder: Path, fake: type[Fake]) -> None:
    (run_folder / "level_2_problem_1_sample_0_kernel.py").write_text(kernel())
    (run_folder.parent / "bench" / "level2").mkdir()
    (run_folder.parent / "bench" / "level2" / "1_c.py").write_text(PROBLEM)
    verify_run(run_folder, bench(run_folder))
    assert not (run_folder / "eval_results.json").exists()
    assert list(json.loads((run_folder / "level_2_eval_results.json").read_text())) == ["1"]


def test_problems_come_from_an_argument_or_the_environment(run_folder: Path) -> None:
    root = run_folder.parent
    (root / "checkout").mkdir()
    (root / "checkout" / "KernelBench").symlink_to(root / "bench")
    assert problems_root(str(root / "bench"), {"KERNELBENCH_ROOT": "/nowhere"}) == str(root / "bench")
    assert problems_root("", {"KERNELBENCH_ROOT": str(root / "checkout")}) == str(root / "checkout" / "KernelBench")
    with pytest.raises(UserError, match="KERNELBENCH_ROOT"):
        problems_root("", {})
    with pytest.raises(UserError, match="holds no level"):
        problems_root(str(root), {})


def test_only_kernels_are_samples_in_the_order_of_numbers(run_folder: Path) -> None:
    (run_folder / "level_1_problem_10_sample_0_kernel.py").write_text("")
    assert [(s.problem, s.sample) for s in samples(run_folder)] == [(1, 0), (1, 1), (2, 0), (9, 0), (10, 0)]


@pytest.mark.parametrize(
    ("fault", "key"),
    [
        (Fault.COMPILE_ERROR, "compilation_error"),
        (Fault.INCORRECT, "correctness_issue"),
        (Fault.TIMEOUT, "runtime_error"),
    ],
)
def test_a_fault_is_told_in_their_words(fault: Fault, key: str) -> None:
    result = Result("x", "c", "cpu", Verdict(fault, message="why"), ())
    entry = eval_results([SampleOutcome(1, 1, 0, "k", result)])["1"][0]
    assert key in entry["metadata"]
    assert entry["metadata"]["fault"] == fault.value


def test_pass_at_k_is_written_beside_the_results(run_folder: Path, fake: type[Fake]) -> None:
    written = verify_run(run_folder, bench(run_folder), RunOptions())
    assert str(run_folder / "pass_at_k_results.json") in written.files
    found = json.loads((run_folder / "pass_at_k_results.json").read_text())
    assert found["problems"]["1"] == {"total_samples": 2, "correct_samples": 2, "pass@1": 1.0, "pass@2": 1.0}
    assert found["averages"]["avg_pass@1"] == 1.0


def test_problems_are_verified_in_the_asked_precision(
    run_folder: Path, fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def verify(_self: Fake, problem: Problem, _text: str, _backend: str | None) -> Result:
        seen.append(problem.source)
        return RIGHT

    monkeypatch.setattr(Fake, "verify", verify)
    verify_run(run_folder, bench(run_folder), RunOptions(precision="bf16"))
    assert seen
    assert all("bfloat16" in source for source in seen)
