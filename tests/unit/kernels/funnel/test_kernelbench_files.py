"""KernelBench's files: what we write is what its own analysis reads, and prints the figures that we compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kbrl_async.errors import UserError
from kbrl_async.kernels.funnel import Result
from kbrl_async.kernels.funnel.records import result_of
from kbrl_async.kernels.kernelbench import analysis
from kbrl_async.kernels.kernelbench.files import (
    NOT_TIMED,
    Baseline,
    KernelFile,
    baselines_of,
    file_name,
    numbers,
    pass_at_k_results,
    write_baselines,
    write_run_folders,
)
from kbrl_async.kernels.kernelbench.formats import SampleOutcome
from protocols.records import (
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    Problem,
    RolloutRequest,
    SamplingParams,
    StageReport,
    Timing,
    Verdict,
)
from protocols.rollout import Record

COMPILED = (StageReport("compile", Fault.OK, 0.1),)


def problem(name: str, level: int = 1) -> Problem:
    return Problem(f"L{level}/{name}", level, name, "")


PROBLEMS = [problem("1_a"), problem("02_b"), problem("3_c"), problem("4_d"), problem("1_e", 2)]


def answer(
    level: int, number: int, sample: int, times: tuple[float, float] | None, *, compiled: bool = True
) -> KernelFile:
    """`times`: reference and candidate in ms; None: wrong."""
    timing = Timing(9, 9.0, 8.0, 10.0, times[1], times[0], hardware="host") if times else None
    verdict = Verdict(Fault.OK if times else Fault.INCORRECT if compiled else Fault.COMPILE_ERROR)
    result = Result("", "c", "cpu", verdict, COMPILED if compiled else (), timing)
    return KernelFile(SampleOutcome(level, number, sample, "", result), f"# {number}.{sample}")


ANSWERS = [
    answer(1, 1, 0, (2.0, 1.0)),
    answer(1, 1, 1, (2.2, 4.0)),
    answer(1, 2, 0, (3.0, 4.0)),
    answer(1, 2, 1, None),
    answer(1, 3, 0, None, compiled=False),
    answer(1, 3, 1, (1.0, 0.1)),
    answer(2, 1, 0, (5.0, 2.5)),
]


def theirs(folder: Path, baseline: dict[str, dict[str, Any]], names: dict[int, str]) -> dict[str, Any]:
    """The figures by the definitions of KernelBench's analysis, from the files alone, with NumPy as there."""
    table = json.loads((folder / "eval_results.json").read_text())
    first = {key: next(e for e in entries if e["sample_id"] == 0) for key, entries in table.items()}
    wrong = {"correctness": False, "compiled": False, "runtime": -1.0}
    rows = [(first.get(str(n), wrong), baseline[name]["mean"]) for n, name in names.items() if name in baseline]
    correct = np.array([row["correctness"] for row, _ in rows])
    ratio = np.array([mean for _, mean in rows])[correct] / np.array([row["runtime"] for row, _ in rows])[correct]
    return {
        "correct_count": sum(row["correctness"] for row in first.values()),
        "geo_mean_speedup": float(np.prod(ratio) ** (1 / correct.sum())),
        "fast_p": {str(p): float((ratio > p).sum() / len(rows)) for p in analysis.THRESHOLDS},
    }


def test_the_official_figures_of_our_folder_are_ours(tmp_path: Path) -> None:
    write_run_folders(tmp_path, ANSWERS, [1, 2])
    write_baselines(tmp_path / "baseline.json", baselines_of(ANSWERS, PROBLEMS))
    baseline = json.loads((tmp_path / "baseline.json").read_text())
    names = {n: file_name(p, n) for p in PROBLEMS if p.level == 1 for n in [numbers(PROBLEMS)[p.problem_id]]}
    expected = theirs(tmp_path / "level1", baseline["level1"], names)
    ours = msgspec.convert(baseline["level1"], dict[str, Baseline])
    found = analysis.analyse(analysis.read(tmp_path / "level1"), names, ours, 1)
    assert (found.total_count, found.total_eval, found.compiled_count) == (4, 3, 2)
    assert found.correct_count == expected["correct_count"] == 2
    assert found.geo_mean_speedup == pytest.approx(expected["geo_mean_speedup"], rel=1e-12)
    assert found.fast_p == expected["fast_p"]
    assert found.geo_mean_speedup == pytest.approx(((2.1 / 1.0) * (3.0 / 4.0)) ** 0.5)
    assert found.fast_p == {"0.0": 0.5, "0.5": 0.5, "0.8": 0.25, "1.0": 0.25, "1.5": 0.25, "2.0": 0.25}


def test_a_level_has_a_folder_of_its_own_with_its_kernels(tmp_path: Path) -> None:
    assert [path.name for path in write_run_folders(tmp_path, ANSWERS, [1])] == ["level1", "level2"]
    assert (tmp_path / "level1" / "level_1_problem_3_sample_1_kernel.py").read_text() == "# 3.1"
    assert list(json.loads((tmp_path / "level2" / "eval_results.json").read_text())) == ["1"]


def test_writing_again_replaces_results(tmp_path: Path) -> None:
    write_run_folders(tmp_path, ANSWERS, [1])
    write_run_folders(tmp_path, ANSWERS[:1], [1])
    assert list(json.loads((tmp_path / "level1" / "eval_results.json").read_text())) == ["1"]


def test_pass_at_k_has_their_fields_and_values() -> None:
    table = {
        "1": [{"correctness": True, "compiled": True}, {"correctness": False, "compiled": True}],
        "2": [{"correctness": False, "compiled": False}] * 2,
    }
    found = pass_at_k_results(table, [1, 2])
    assert found["averages"] == {"avg_pass@1": 0.25, "avg_pass@2": 0.5}
    assert found["problems"]["1"] == {"total_samples": 2, "correct_samples": 1, "pass@1": 0.5, "pass@2": 1.0}
    assert found["metadata"] == {
        "total_problems": 2,
        "problems_with_samples": 2,
        "total_evaluated_samples": 4,
        "total_correct_samples": 1,
        "pass@1_count": 2,
        "pass@2_count": 2,
    }
    assert "pass@3" not in pass_at_k_results(table, [3])["problems"]["1"]


def test_every_problem_has_a_baseline_entry_timed_or_not(tmp_path: Path) -> None:
    """One without would leave their analysis with fewer problems, and higher figures."""
    table = baselines_of(ANSWERS, PROBLEMS)
    assert set(table["level1"]) == {"1_a.py", "02_b.py", "3_c.py", "4_d.py"}
    assert table["level1"]["4_d.py"].mean == NOT_TIMED
    one = table["level1"]["1_a.py"]
    assert (one.mean, one.min, one.max, one.num_trials, one.hardware) == (pytest.approx(2.1), 2.0, 2.2, 18, "host")


def test_problems_without_a_number_get_the_next_free_one() -> None:
    listed = [problem("relu"), problem("2_b"), problem("gelu"), problem("2_again")]
    found = numbers(listed)
    assert sorted(found.values()) == [2, 3, 4, 5]
    assert (found["L1/2_b"], file_name(listed[1], 2)) == (2, "2_b.py")
    assert file_name(listed[0], found["L1/relu"]) == f"{found['L1/relu']}_relu.py"


@pytest.mark.parametrize(
    ("frames", "fault", "compiled"),
    [
        ([], Fault.FORMAT_ERROR, False),
        ([BuildReport(Fault.COMPILE_ERROR, stages=(StageReport("compile", Fault.COMPILE_ERROR, 0.1),))], None, False),
        ([BuildReport(Fault.OK, stages=COMPILED), BenchReport(Verdict(Fault.INCORRECT))], Fault.INCORRECT, True),
        (
            [BuildReport(Fault.OK, stages=COMPILED), BenchReport(Verdict(Fault.OK), Timing(1, 2, 1, 3, 1, 2))],
            None,
            True,
        ),
    ],
)
def test_a_record_becomes_the_result_that_verify_would_give(
    frames: list[Any], fault: Fault | None, compiled: bool
) -> None:
    asked = RolloutRequest("r", "g", problem("1_a"), "prompt", "c", SamplingParams(8))
    candidate = Candidate("k", "c") if frames else None
    wrote = Generation(0, [], [], [], "", "stop", candidate, Fault.OK if frames else Fault.FORMAT_ERROR)
    result = result_of(Record.of(asked, wrote, *frames))
    assert result.compiled is compiled
    assert result.fault is (fault or (Fault.OK if compiled else Fault.COMPILE_ERROR))
    assert (result.timing is not None) == (compiled and fault is None)


def test_a_timing_of_a_wrong_kernel_is_no_timing() -> None:
    asked = RolloutRequest("r", "g", problem("1_a"), "prompt", "c", SamplingParams(8))
    wrote = Generation(0, [], [], [], "", "stop", Candidate("k", "c"))
    bench = BenchReport(Verdict(Fault.CHEATING), Timing(1, 2, 1, 3, 1, 2))
    assert result_of(Record.of(asked, wrote, BuildReport(Fault.OK), bench)).timing is None
    with pytest.raises(ValueError, match="without a generation"):
        result_of(Record.of(asked))


def test_results_of_another_program_need_no_field_of_ours(tmp_path: Path) -> None:
    (tmp_path / "eval_results.json").write_text(
        json.dumps({"1": [{"sample_id": 0, "compiled": True, "correctness": True, "metadata": {}, "runtime": 0.5}]})
    )
    found = analysis.analyse(analysis.read(tmp_path), {1: "1_a.py"}, {"1_a.py": Baseline(1.0)}, 1)
    assert msgspec.structs.asdict(found)["geo_mean_speedup"] == 2.0
    with pytest.raises(UserError, match="run folder with results"):
        analysis.read(tmp_path / "nowhere")
