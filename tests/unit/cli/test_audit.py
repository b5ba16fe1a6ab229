"""`kbrl problems audit` writes what it found beside the problems, and `list` shows it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kbrl_async import cli
from kbrl_async.kernels.audit import Auditor
from kbrl_async.kernels.problems import audit_file, load_problems
from kbrl_async.kernels.problems.audit_file import AuditFinding, ProblemAudit, problem_hash
from protocols.records import Problem

SOURCE = "class Model: pass\ndef get_inputs(): pass\ndef get_init_inputs(): pass\n"


@pytest.fixture
def problems(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two problems; the audit finds that zeros pass the second."""
    (folder / "mine" / "level1").mkdir(parents=True)
    for number in (1, 2):
        (folder / "mine" / "level1" / f"{number}_x.py").write_text(SOURCE)

    def audit(_auditor: Auditor, problem: Problem) -> ProblemAudit:
        found = (AuditFinding("zeros", "passes on 3 of 3", "ours"),) if problem.name == "2_x" else ()
        return ProblemAudit(problem.problem_id, problem_hash(problem), "flagged" if found else "clean", findings=found)

    monkeypatch.setattr(Auditor, "audit", audit)
    return folder / "mine"


def test_the_audit_lies_beside_the_problems_and_is_shown(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["problems", "audit", str(problems)]) == 0
    out, err = capsys.readouterr()
    assert "zeros@ours" in out
    assert "passes on 3 of 3" in err
    written = audit_file.read(problems / "audit.json")
    assert [a.status for a in written.problems] == ["clean", "flagged"]
    assert cli.main(["problems", "list", str(problems)]) == 0
    assert "zeros@ours" in capsys.readouterr().out


def test_some_problems_can_be_chosen_and_another_file(problems: Path) -> None:
    assert cli.main(["problems", "audit", str(problems), "--ids", "L1/2", "--out", "some.json"]) == 0
    assert [a.problem_id for a in audit_file.read(Path("some.json")).problems] == ["L1/2_x"]
    assert not (problems / "audit.json").exists()


def test_an_audit_goes_on_where_it_was(problems: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was audited is kept, what was not is tried once more."""
    cli.main(["problems", "audit", str(problems)])
    first = audit_file.read(problems / "audit.json")
    untried = msgspec.structs.replace(first.problems[1], status="not_audited", findings=())
    audit_file.write(problems / "audit.json", msgspec.structs.replace(first, problems=[first.problems[0], untried]))
    asked: list[str] = []

    def audit(_auditor: Auditor, problem: Problem) -> ProblemAudit:
        asked.append(problem.problem_id)
        return ProblemAudit(problem.problem_id, problem_hash(problem), "clean")

    monkeypatch.setattr(Auditor, "audit", audit)
    cli.main(["problems", "audit", str(problems), "--resume"])
    assert asked == ["L1/2_x"]
    assert [a.status for a in audit_file.read(problems / "audit.json").problems] == ["clean", "clean"]


def test_our_audit_of_kernelbench_speaks_of_its_problems_wherever_they_lie(
    problems: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.main(["problems", "audit", str(problems)])
    (folder / "ours").mkdir()
    (problems / "audit.json").rename(folder / "ours" / "kernelbench-gpu.json")
    assert [p.flags for p in load_problems(str(problems))] == [(), ()]
    monkeypatch.setattr(audit_file, "OUR_AUDITS", folder / "ours")
    assert [p.flags for p in load_problems(str(problems))] == [(), ("zeros@ours",)]


def test_what_is_shipped_of_kernelbench_flags_its_problems(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many as docs/sources.md says; a problem of the same name and another text has none of it."""
    shipped = {path.stem: audit_file.read(path).problems for path in audit_file.OUR_AUDITS.glob("kernelbench-*.json")}
    assert set(shipped) == {"kernelbench-cpu", "kernelbench-gpu"}
    of_gpu = shipped["kernelbench-gpu"]
    assert len({one.problem_id for one in of_gpu}) == len(of_gpu) == 250
    assert sum(bool(one.flags) for one in of_gpu) == 23
    (known,) = (one for one in of_gpu if one.problem_id == "L2/80_Gemm_Max_Subtract_GELU")
    (folder / "level2").mkdir()
    (folder / "level2" / "80_Gemm_Max_Subtract_GELU.py").write_text(SOURCE)
    assert [p.flags for p in load_problems(str(folder))] == [()]
    monkeypatch.setattr(audit_file, "problem_hash", lambda _: known.problem_hash)
    for shapes in ("cpu", "gpu"):
        (problem,) = load_problems(str(folder), shapes=shapes)
        assert set(known.flags) <= set(problem.flags)
        assert audit_file.usable([problem]) == []
    cli.main(["problems", "list", str(folder)])
    assert "zeros@ours" in "".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("more", "words"), [(["--ids", "L1/7"], "no problem 'L1/7'"), (["--level", "9"], "has level [9]")]
)
def test_what_is_not_there_is_wrong_usage(
    problems: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    assert cli.main(["problems", "audit", str(problems), *more]) == 2
    assert words in capsys.readouterr().err
