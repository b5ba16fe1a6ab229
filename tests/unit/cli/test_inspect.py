"""`kbrl inspect` and the arguments of `kbrl replay` and `kbrl export`: what a person asks for is found, or named."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kbrl_async.cli import main
from kbrl_async.cli import replay as replay_command
from kbrl_async.errors import UserError
from kbrl_async.runs.archive.archive import FILE, ArchiveWriter, GroupEnd, TurnOutcome, make_row
from kbrl_async.runs.config import Config, to_yaml
from protocols.records import (
    BenchReport,
    BuildReport,
    Fault,
    StageReport,
    Verdict,
)
from protocols.rollout import Record
from tests.records import record, timing

DEADLINE_S = 30.0


def shown(rollout_id: str, speedup: float) -> Record:
    proof = "own kernels: run ×1; library operators: none"
    verdict = Verdict(Fault.OK, 4, 4, evidence=proof, max_abs_error=1e-7, tolerance=1e-4)
    found = timing(speedup, candidate_ms=2.0, reference_ms=3.0, stopped="resolved")
    code = "class ModelNew: …"
    made = record(
        rollout_id, f"```python\n{code}\n```", source=code, prompt="write relu", bench=BenchReport(verdict, found)
    )
    built = BuildReport(Fault.OK, stages=(StageReport("static", Fault.OK, 0.1), StageReport("compile", Fault.OK, 0.2)))
    return msgspec.structs.replace(made, build=built)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(Config()))
    with ArchiveWriter(folder / FILE) as archive:
        for name, speedup, reward in (("g000001.r0", 1.0, 0.825), ("g000001.r1", 8.1, 1.0), ("g000001.r10", 2.0, 0.9)):
            made = shown(name, speedup)
            archive.add(make_row(name, made, at=105.0, reward=reward), made.encode()).result(DEADLINE_S)
        archive.outcomes([TurnOutcome("g000001.r1", "batch-000000", 4, 1.0, 1.25)])
        archive.ended([GroupEnd("g000001", "L1/07_relu", "trained")])
    return folder


def test_a_rollout_is_shown_from_prompt_to_advantage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run), "g000001.r1"]) == 0
    out = capsys.readouterr().out
    for piece in (
        "L1/07_relu", "write relu", "class ModelNew", "advantage +1.2500", "batch-000000", "1 old", "static", "compile",
        "own kernels: run ×1", "8.100", "8.000 … 8.200", "4 of 4 secret input sets", "(preset stage3)", "speed",
        " r10 ", "trained", "sampler.1",
    ):  # fmt: skip
        assert piece in out, piece


def test_the_parts_of_the_reward_add_up_to_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", str(run), "g000001.r1", "--json"])
    (turn,) = json.loads(capsys.readouterr().out)["turns"]
    assert turn["preset"] == "stage3"
    assert sum(part["value"] * part["weight"] for part in turn["parts"]) == pytest.approx(turn["row"]["reward"])
    assert turn["row"]["advantage"] == 1.25


def test_an_exact_id_wins_over_those_that_begin_with_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", str(run), "g000001.r1", "--json"])
    assert json.loads(capsys.readouterr().out)["rollout_id"] == "g000001.r1"


def test_the_beginning_of_an_id_is_enough_where_it_names_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ArchiveWriter(run / FILE) as archive:
        archive.add(make_row("g000007.r4", record("g000007.r4"), at=1.0)).result(DEADLINE_S)
    main(["inspect", str(run), "g000007", "--json"])
    assert json.loads(capsys.readouterr().out)["rollout_id"] == "g000007.r4"
    assert main(["inspect", str(run), "g0"]) == 2
    assert "g000001.r0, g000001.r1, g000001.r10" in capsys.readouterr().err


def test_an_id_that_is_not_there_is_an_error_with_a_cure(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run), "g999999"]) == 2
    assert "no rollout begins with 'g999999'" in capsys.readouterr().err


def test_a_rollout_whose_record_is_gone_still_shows_its_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ArchiveWriter(run / FILE) as archive:
        lost = Record.of(record("g000002.r0").request, status="worker_lost")
        archive.add(make_row("g000002.r0", lost, at=1.0)).result(DEADLINE_S)
    assert main(["inspect", str(run), "g000002"]) == 0
    out = capsys.readouterr().out
    assert "worker_lost: never scored" in out
    assert "was not kept" in out


def test_replay_takes_a_run_a_batch_by_id_and_a_batch_by_folder(run: Path) -> None:
    kept = run / "batches" / "batch-000003"
    kept.mkdir(parents=True)
    assert replay_command.target([str(run)]) == (run, "")
    assert replay_command.target([str(run), "batch-000007"]) == (run, "batch-000007")
    assert replay_command.target(["batch-000007", str(run)]) == (run, "batch-000007")
    assert replay_command.target([str(kept)]) == (run, "batch-000003")
    with pytest.raises(UserError, match="one run and one batch at a time, not a b"):
        replay_command.target(["a", "b"])


def test_the_option_run_is_read_for_one_more_release(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["inspect", "--run", str(run), "g000001.r1"], ["inspect", "g000001.r1", "--run", str(run)]):
        assert main(argv) == 0
        out, err = capsys.readouterr()
        assert "L1/07_relu" in out
        assert err == f"warning: --run is read for one more release; write RUN alone: {run}\n"


def test_export_of_a_run_without_a_policy_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    assert "holds no policy" in capsys.readouterr().err
