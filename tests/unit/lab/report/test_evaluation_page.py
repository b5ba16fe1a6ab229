"""The report of an evaluation: its figures with intervals, pass@k, and nothing that only training has."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kbrl_async.evaluation import document
from kbrl_async.evaluation.metrics import Sample
from kbrl_async.lab.report import compare_page, comparing, read_run, report_page
from kbrl_async.runs import summary
from tests.unit.lab.report.conftest import HOSTILE


def evaluation(folder: Path, right: int) -> Path:
    """Four answers to each of six problems, of which the first `right` are correct."""
    samples = [
        Sample(
            problem_id=f"L1/{p}", level=1, sample=n, compiled=True, correct=n < min(right, p),
            fault="ok" if n < min(right, p) else "incorrect",
            speedups={"eager": (1.4, 1.2, 1.6)} if n < min(right, p) else {},
        )
        for p in range(6)
        for n in range(4)
    ]  # fmt: skip
    made = document.build(samples, policy={"label": HOSTILE[:200]}, settings={})
    folder.mkdir()
    (folder / "config.yaml").write_text("model_name: small\n")
    document.write(folder / document.FILE, made)
    summary.write(folder / "summary.json", {"kind": document.KIND, "run": folder.name})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("evals")
    return {"weak": evaluation(folder / "weak", 1), "strong": evaluation(folder / "strong", 4)}


def test_it_has_pass_at_k_with_its_interval(folders: dict[str, Path]) -> None:
    page = report_page(read_run(folders["weak"])).replace("\u00a0", " ")
    assert ">pass@4<" in page
    assert 'aria-label="pass@k"' in page
    assert "Correct 21 % (" in page, "5 of 24 answers"
    assert "The aggregator&#39;s journal" not in page, "an evaluation has none"
    assert "<script>document" not in page


def test_a_document_that_somebody_edited_costs_its_part_of_the_page(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model_name: small\n")
    (tmp_path / document.FILE).write_text("{")
    assert read_run(tmp_path).evaluation is None


def test_evaluations_are_compared_problem_by_problem(folders: dict[str, Path]) -> None:
    rows = {row.name: row.cells for row in comparing.rows(comparing.read(folders))}
    weak, strong = rows["correct"]
    assert (weak.value, weak.difference) == ("21\u00a0%", "")
    assert strong.difference.startswith("+37 points, +10 … +65") or strong.difference.startswith("+38 points, +")
    assert strong.is_told
    assert rows["pass@4"][1].difference.startswith("+0 points"), "the same problems are solved at all"
    assert "pass@4" in compare_page(folders, comparing.read(folders))


def test_settings_that_differ_are_named_and_secrets_are_not_told(folders: dict[str, Path], tmp_path: Path) -> None:
    sides = comparing.read(folders)
    sides = [
        msgspec.structs.replace(sides[0], config={"learner.epochs": "1", "name": "a", "seed": "0"}),
        msgspec.structs.replace(sides[1], config={"learner.epochs": "2", "name": "b", "seed": "0"}),
    ]
    assert comparing.settings(sides) == [("learner.epochs", ["1", "2"])]
    (tmp_path / "config.yaml").write_text("learner:\n  epochs: 1\napi_key: hidden-value\n")
    summary.write(tmp_path / "summary.json", {})
    assert "hidden-value" not in str(comparing.read({"one": tmp_path})[0].config)
