"""The importer: every row accounted for, nothing twice, nothing near what is held out, hostile rows cost themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbrl_async.errors import AddressTaken
from kbrl_async.kernels.audit import Auditor, Limits
from kbrl_async.kernels.importing import JOURNAL, Found, ImportedRow, Importer
from kbrl_async.kernels.problems import load_problems, parse_problem
from kbrl_async.kernels.problems.audit_file import ProblemAudit, problem_hash
from protocols.records import Problem

LIMITS = Limits("cpu", 20.0, 4.0)


def found(name: str, forward: str = "torch.relu(x)", shape: str = "16, 16", head: str = "") -> Found:
    text = (
        f"import torch\n{head}\n\n"
        f"class Model(torch.nn.Module):\n    def forward(self, x):\n        return {forward}\n\n\n"
        f"def get_inputs():\n    return [torch.randn({shape})]\n\n\ndef get_init_inputs():\n    return []\n"
    )
    return Found(name, text, origin=f"{name}.py", license="MIT")


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ImportedRow]]:
    out = tmp_path_factory.mktemp("imported") / "out"
    rows = [
        found("sound"),
        found("sound", "torch.tanh(x)"),
        found("other_names", shape="32, 8"),
        found("more_dimensions", shape="4, 8, 8"),
        found("silent", "x * 0.0"),
        found("broken", "x @ torch.zeros(3, 3)"),
        found("hostile", "x", head="import os\nos._exit(0)"),
        found("near", "torch.sigmoid(x) * 3"),
        found("first_call", "x / self.__dict__.setdefault('peak', x.amax())"),
        found("on_a_cpu_only", "torch.cos(x) + torch.ones(16)"),
        Found("odd", "", left_out="no source in it"),
        Found("empty", "import torch\n"),
    ]
    held = parse_problem(found("held", "2 * torch.sigmoid(x)").source, "L1/held")
    importer = Importer(out, LIMITS, [held], jobs=2)
    return out, list(importer.run(rows))


def test_every_row_has_a_fate_and_a_reason(imported: tuple[Path, list[ImportedRow]]) -> None:
    fates = {row.problem_id: (row.outcome, row.reason) for row in imported[1]}
    assert fates["L1/sound"] == fates["L1/sound_2"] == fates["L1/more_dimensions"] == ("taken", "")
    assert fates["L1/other_names"] == ("left out", "the same as another row, but for names and constants")
    assert fates["L1/near"] == ("left out", "near a held-out problem")
    assert fates["L1/odd"] == ("left out", "no source in it")
    assert fates["L1/silent"][0] == fates["L1/broken"][0] == fates["L1/empty"][0] == "left out"
    assert "cannot_run" in fates["L1/broken"][1]
    assert "lacks" in fates["L1/empty"][1]
    assert fates["L1/first_call"][1].startswith("keeps_state: answers to the same inputs differ by ")
    assert fates["L1/first_call"][1].endswith(" with the inputs of the first call: forward changes peak")
    assert fates["L1/on_a_cpu_only"][1].startswith("fixed_device")
    assert fates["L1/hostile"] == ("left out", "its process ended itself, or for want of memory")


def test_what_is_taken_is_a_folder_of_problems_with_licences_in_the_journal(
    imported: tuple[Path, list[ImportedRow]],
) -> None:
    out, rows = imported
    kept = {row.problem_id for row in rows if row.outcome != "left out"}
    assert {problem.problem_id for problem in load_problems(str(out))} == kept
    journal = (out / JOURNAL).read_text().splitlines()
    assert len(journal) == len(rows)
    assert all('"license":"MIT"' in line for line in journal if "sound" in line)


def test_the_next_run_goes_on_behind_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that a kill cut off is done again; the others are not."""
    tried: list[str] = []

    def counted(_: Auditor, asked: Problem) -> ProblemAudit:
        tried.append(asked.name)
        return ProblemAudit(asked.problem_id, problem_hash(asked), "clean")

    monkeypatch.setattr(Auditor, "audit", counted)
    first = tmp_path / "out"
    list(Importer(first, LIMITS, jobs=1).run([found("a"), found("b", "torch.tanh(x)")]))
    assert tried == ["a", "b"]
    text = (first / JOURNAL).read_text()
    (first / JOURNAL).write_text(text[: len(text) - 20])

    tried.clear()
    importer = Importer(first, LIMITS, jobs=1)
    rows = list(importer.run([found("a"), found("b", "torch.tanh(x)"), found("c", "torch.cos(x)")]))
    assert [row.outcome for row in rows] == ["taken"] * 3
    assert tried == ["b", "c"]
    assert len(load_problems(str(first))) == 3


def left_out(name: str) -> Found:
    return Found(name, "", origin=f"{name}.py", left_out="no source in it")


def test_a_second_import_into_a_folder_is_refused_and_finds_what_the_first_has_decided(tmp_path: Path) -> None:
    out, rows = tmp_path / "out", [left_out(f"row{number}") for number in range(9)]
    first, second = Importer(out, LIMITS, jobs=1), Importer(out, LIMITS, jobs=1)
    going = first.run(rows)
    next(going)
    said = rf"out is held by process {os.getpid()}: an import is going on. Wait for its end, .* another folder"
    with pytest.raises(AddressTaken, match=said):
        list(second.run(rows))
    list(going)
    list(second.run(rows))
    assert second.rows == first.rows
    assert len((out / JOURNAL).read_text().splitlines()) == len(rows)


def test_an_import_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    text = (
        "import sys; from pathlib import Path\n"
        "from kbrl_async.kernels.audit import Limits\n"
        "from kbrl_async.kernels.importing import Found, Importer\n"
        "going = Importer(Path(sys.argv[1]), Limits('cpu', 1.0, 1.0), jobs=1).run([Found('a', '', left_out='x')] * 9)\n"
        "next(going); print(flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    with pytest.raises(AddressTaken, match=f"process {process.pid}"):
        list(Importer(tmp_path, LIMITS, jobs=1).run([left_out("b")]))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(list(Importer(tmp_path, LIMITS, jobs=1).run([left_out("b")]))) == 1


@pytest.mark.parametrize(
    ("ours", "outcome"),
    [
        ("", "taken"),
        ("not tried: it would need about 9.1 GiB", "taken, not tried"),
        ("not tried: the reference of L1/a fails: a call took longer than 20 s", "taken, not tried"),
        ("not tried: the reference of L1/a fails: RuntimeError: not enough memory", "taken, not tried"),
        ("not tried: the reference of L1/a fails: no result after 0.09 s", "taken, not tried"),
        ("not tried: the reference of L1/a fails: LinAlgError: the input matrix is singular", "left out"),
        ("not tried: the reference of L1/a is random or keeps state: the same inputs gave two answers", "left out"),
    ],
)  # fmt: skip
def test_what_our_inputs_break_is_left_out_and_what_has_no_room_for_them_is_untried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: str, outcome: str
) -> None:
    def audited(_: Auditor, asked: Problem) -> ProblemAudit:
        return ProblemAudit(asked.problem_id, problem_hash(asked), "clean", ours=ours)

    monkeypatch.setattr(Auditor, "audit", audited)
    (row,) = Importer(tmp_path / "out", LIMITS, jobs=1).run([found("a")])
    assert row.outcome == outcome
    assert bool(row.reason) == bool(ours)
    assert ("singular" in row.reason) == ("singular" in ours)


def test_rows_are_read_as_they_are_needed(tmp_path: Path) -> None:
    """A data set of any size takes the memory of a few rows."""
    read = 0

    def rows() -> Iterator[Found]:
        nonlocal read
        for number in range(1000):
            read += 1
            yield Found(f"row{number}", "", left_out="no source in it")

    results = Importer(tmp_path / "out", LIMITS, jobs=1).run(rows())
    next(results)
    assert read < 10
    results.close()  # type: ignore[attr-defined]
