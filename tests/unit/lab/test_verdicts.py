"""Verdicts of runs and services as a data set: one row a candidate, nothing of what the infrastructure lost."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kbrl_async import cli
from kbrl_async.errors import CheckpointError, UserError
from kbrl_async.lab.verdicts import export_verdicts
from kbrl_async.runs.archive.archive import FILE, ArchiveWriter, make_row
from kbrl_async.serving.documents import Ask, Job, Outcome, Trouble
from kbrl_async.serving.journal import FILE as JOBS
from kbrl_async.serving.journal import JobJournal
from protocols.records import BenchReport, Fault, Timing, Verdict
from protocols.rollout import Record
from tests.records import record
from tests.suite import suite

SUITE = suite()
RIGHT = BenchReport(Verdict(Fault.OK, 10, 10), Timing(9, 2.1, 2.0, 2.2, 1.0, 2.1, hardware="a chip"))
WRONG = BenchReport(Verdict(Fault.INCORRECT, 4, 10, "differs"))


def run_of(folder: Path, records: Sequence[Record]) -> Path:
    folder.mkdir()
    with ArchiveWriter(folder / FILE) as archive:
        for number, one in enumerate(records):
            reward = 0.5 if one.is_scorable else None
            row = make_row(f"t{number}", one, at=1.0, clock=1.0, purpose="train", reward=reward)
            archive.add(row, one.encode()).result()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    right, wrong = record(bench=RIGHT), record(bench=WRONG)
    ours = replace(right.request, problem=SUITE[0])
    lost = replace(right, status="worker_lost")
    return run_of(tmp_path / "one", [right, wrong, replace(right, request=ours), lost])


def service_of(folder: Path) -> Path:
    from tests.unit.serving.making import result

    folder.mkdir()
    journal = JobJournal(folder / JOBS, keep=100)
    for name, outcome in {
        "verified": Outcome(result()),
        "lost": Outcome(owner="host", trouble=Trouble("died")),
        "waits": None,
    }.items():
        journal.put(Job(name, "alice", Ask("class ModelNew: ...", problem="L1/13"), 0.0, 1.0, 2.0, 1, outcome))
    journal.close()
    return folder


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_has_sources_verdict_times_and_licences(run: Path, tmp_path: Path) -> None:
    assert export_verdicts([run], tmp_path / "v.jsonl") == 3
    right, wrong, ours = read(tmp_path / "v.jsonl")
    assert (right["fault"], right["correct"], right["speedup_lo"], right["hardware"]) == ("ok", True, 2.0, "a chip")
    assert (wrong["fault"], wrong["message"], wrong["passed"], wrong["speedup"]) == ("incorrect", "differs", 4, None)
    assert all(right[name] for name in ("kernel", "reference", "compiled"))
    assert (right["problem_licence"], ours["problem_licence"]) == ("unknown", "Apache-2.0")


def test_a_services_jobs_are_verdicts_too(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="the extra kbrl-async[serve] is not installed")
    service = service_of(tmp_path / "serve")
    assert export_verdicts([run, service], tmp_path / "v.jsonl") == 4
    last = read(tmp_path / "v.jsonl")[-1]
    assert (last["id"], last["author"], last["correct"], last["run"]) == ("verified", "alice", True, "serve")
    assert (last["problem_licence"], last["level"]) == ("Apache-2.0", 1)
    assert "softmax" in last["reference"]


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_datasets_reads_it(run: Path, tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra kbrl-async[retrieval] is not installed")
    target = tmp_path / f"v.{'jsonl' if kind == 'json' else kind}"
    export_verdicts([run], target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = datasets.load_dataset(kind, data_files=str(target), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(found) == 3
    assert found[0]["speedup_lo"] == 2.0
    assert found[1]["speedup_lo"] is None
    assert found[1]["correct"] is False


def test_a_file_appears_whole_or_not_at_all(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no verdicts"):
        export_verdicts([run, tmp_path / "empty"], tmp_path / "v.jsonl")
    assert [path.name for path in tmp_path.glob("*v.jsonl*")] == []
    with pytest.raises(UserError, match="neither JSONL nor Parquet"):
        export_verdicts([run], tmp_path / "v.csv")


def test_the_command_writes_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (run / "config.yaml").write_text("")
    assert cli.main(["export", "verdicts", str(run), "v.jsonl"]) == 0
    assert "v.jsonl: 3 verdicts; datasets.load_dataset('json'" in capsys.readouterr().out
    assert cli.main(["export", "verdicts"]) == 2
    assert cli.main(["export", "a", "b", "c"]) == 2
    assert "kbrl export has no argument c" in capsys.readouterr().err
