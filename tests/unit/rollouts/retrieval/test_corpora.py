"""Rows of strangers: what is right is taken, what is broken is counted, and nothing stops a build."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kbrl_async.errors import MissingTool, UserError
from kbrl_async.lab.indexing import build_index
from kbrl_async.rollouts.retrieval import Entry
from kbrl_async.rollouts.retrieval.entries import Skip
from tests.retrieval_corpus import kernelbook_lines, sakana_lines, write_lines
from tests.unit.rollouts.retrieval.making import module, open_file, write_rows

BOOK = {
    "uuid": 7,
    "entry_point": "Net",
    "python_code": module("x = F.relu(x)").replace("Model", "Net").replace("return []", "return [[], {}]"),
    "triton_code": "import triton\n@triton.jit\ndef k(): ...\nclass NetNew(torch.nn.Module): ...\n",
    "licenses": ["MIT", "BSD"],
    "repo_link": "https://example.org/a",
}
ARCHIVE = {
    "Op_Name": "relu", "Level_ID": 2, "Kernel_Name": "relu_1", "CUDA_Code": "__global__ void k() {}", "Correct": True,
    "PyTorch_Code_Module": module("x = F.relu(x)"), "CUDA_Speedup_Native": 2.5,
}  # fmt: skip


def rows_of(path: Path, **options: Any) -> list[Entry | Skip]:
    return list(open_file(path, **options).read())


def reasons(rows: list[Entry | Skip]) -> list[str]:
    return [row.reason for row in rows if isinstance(row, Skip)]


def test_a_kernelbook_row_becomes_an_example_in_the_contract(tmp_path: Path) -> None:
    (row,) = rows_of(write_rows(tmp_path / "book.jsonl", [BOOK]))
    assert isinstance(row, Entry)
    assert (row.uid, row.backend, row.license, row.verified) == ("kernelbook:7", "triton", "MIT, BSD", False)
    assert "class Model(nn.Module)" in row.reference
    assert "class ModelNew(torch.nn.Module)" in row.kernel


def test_an_archive_row_becomes_a_verified_example_with_its_speedup(tmp_path: Path) -> None:
    (row,) = rows_of(write_rows(tmp_path / "archive.jsonl", [ARCHIVE]))
    assert isinstance(row, Entry)
    assert (row.backend, row.level, row.speedup, row.verified, row.problem_id) == ("cuda", 2, 2.5, True, "L2/relu")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"triton_code": None}, "triton_code is null"),
        ({"python_code": 3}, "python_code is no text"),
        ({"python_code": ["x"]}, "python_code is no text"),
        ({"entry_point": "not a name"}, "entry_point is no name"),
        ({"entry_point": "class"}, "entry_point is no name"),
    ],
)
def test_a_broken_field_is_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = write_rows(tmp_path / "book.jsonl", [BOOK, {**BOOK, **change}])
    assert reasons(rows_of(path)) == [reason]


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    broken = {name: value for name, value in BOOK.items() if name != "triton_code"}
    assert reasons(rows_of(write_rows(tmp_path / "book.jsonl", [BOOK, broken]))) == ["no column triton_code"]


def test_lines_that_are_no_rows_are_counted_in_their_place(tmp_path: Path) -> None:
    path = tmp_path / "book.jsonl"
    good = json.dumps(BOOK).encode()
    lines = [good, b"{", b"[1]", b"\xff\xfe", b"null", b'"' + b"a" * 5_000_000 + b'"', b"[" * 100_000, good]
    path.write_bytes(b"\n".join(lines))
    expected = ["not JSON", "not an object", "not UTF-8", "not an object", "line is too long", "not JSON"]
    rows = rows_of(path)
    assert reasons(rows) == expected
    assert isinstance(rows[-1], Entry)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({"Correct": False}, {}, "not correct"),
        ({"Correct": None}, {}, "not correct"),
        ({"Correct": "False"}, {}, "not correct"),
        ({"Level_ID": 4}, {}, "another level"),
        ({"Level_ID": None}, {}, "another level"),
        ({"Level_ID": 3}, {"sakana_levels": frozenset({1, 2})}, "another level"),
        ({}, {"backends": frozenset({"triton"})}, "another backend"),
    ],
)
def test_options_leave_rows_of_the_archive_out(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    assert reasons(rows_of(write_rows(tmp_path / "a.jsonl", [{**ARCHIVE, **change}]), **options)) == [reason]


@pytest.mark.parametrize("change", [{"Correct": "True"}, {"Correct": 1}, {"Level_ID": "level_2"}, {"Level_ID": 2.0}])
def test_values_in_other_types_are_understood(tmp_path: Path, change: dict[str, Any]) -> None:
    assert reasons(rows_of(write_rows(tmp_path / "a.jsonl", [{**ARCHIVE, **change}]))) == []


def test_incorrect_kernels_can_be_included_but_are_never_verified(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{**ARCHIVE, "Correct": False}])
    (row,) = rows_of(path, include_incorrect=True)
    assert isinstance(row, Entry)
    assert not row.verified
    assert row.speedup is None


@pytest.mark.parametrize("speedup", ["NaN", "fast", None, True, 1e400, -3.0, 10**400])
def test_a_senseless_speedup_is_no_speedup(tmp_path: Path, speedup: Any) -> None:
    from kbrl_async.rollouts.retrieval.entries import checked

    (row,) = rows_of(write_rows(tmp_path / "a.jsonl", [{**ARCHIVE, "CUDA_Speedup_Native": speedup}]))
    assert isinstance(row, Entry)
    assert checked(row).speedup is None


def test_every_row_of_a_hostile_file_ends_as_kept_or_as_one_counted_reason(tmp_path: Path) -> None:
    book, archive = tmp_path / "book.jsonl", tmp_path / "archive.jsonl"
    written = [
        write_lines(book, kernelbook_lines(1, 250, hostile_share=0.4)),
        write_lines(archive, sakana_lines(2, 150, problems=5, hostile_share=0.4)),
    ]
    manifest = build_index([open_file(book), open_file(archive)], tmp_path / "index")
    assert [report.rows for report in manifest.sources] == written
    assert all(report.rows == report.kept + sum(report.skipped.values()) for report in manifest.sources)
    assert manifest.count == sum(report.kept for report in manifest.sources)
    found = {reason for report in manifest.sources for reason in report.skipped}
    assert {"not UTF-8", "not JSON", "kernel is too long", "reference is too long", "kernel is empty"} <= found


def test_a_folder_gives_pairs_and_files_with_both_classes(tmp_path: Path) -> None:
    kernel = "from kbrl_async.launch import c_kernel\nclass ModelNew: kernel = c_kernel('', 'run')\n"
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "relu.py").write_text(module("x = F.relu(x)"))
    (tmp_path / "deep" / "relu_kernel.py").write_text(kernel)
    (tmp_path / "both.py").write_text(module("x = F.gelu(x)") + kernel)
    (tmp_path / "alone.py").write_text(module("x = F.elu(x)"))
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe")
    rows = rows_of(tmp_path)
    taken = [row for row in rows if isinstance(row, Entry)]
    assert {(row.origin, row.backend) for row in taken} == {("both.py", "c"), ("deep/relu.py", "c")}
    assert all("ModelNew" not in row.reference for row in taken)
    assert sorted(reasons(rows)) == ["no kernel beside it", "not UTF-8"]


def test_a_file_of_no_known_corpus_is_an_error_that_names_the_columns(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="triton_code"):
        open_file(write_rows(tmp_path / "other.jsonl", [{"a": 1}]))


@pytest.mark.parametrize("name", ["missing.jsonl", "folder/missing/deeper", "just-a-word"])
def test_a_source_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(UserError, match="does not exist"):
        open_file(Path(name))


@pytest.mark.parametrize(("place", "package"), [("x.parquet", "pyarrow"), ("GPUMODE/KernelBook", "datasets")])
def test_what_needs_an_extra_says_which_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = Path(place)
    if path.suffix:
        path = tmp_path / place
        path.write_bytes(b"PAR1")
    with pytest.raises(MissingTool, match=rf"{package}.*kbrl-async\[retrieval\]"):
        list(open_file(path).read())


def test_parquet_and_hub_rows_are_read_like_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages are stood in for: what they return is what their documentation promises."""
    path = tmp_path / "book.parquet"
    path.write_bytes(b"PAR1")
    batch = SimpleNamespace(to_pylist=lambda: [BOOK])
    file = SimpleNamespace(iter_batches=lambda batch_size: iter([batch]))
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(ParquetFile=lambda path: file))
    bare = {name: value for name, value in ARCHIVE.items() if name != "Level_ID"}
    hub = SimpleNamespace(
        get_dataset_split_names=lambda name: ["level_1", "level_4"],
        load_dataset=lambda name, split, streaming: iter([bare]),
    )
    monkeypatch.setitem(sys.modules, "datasets", hub)
    (local,) = rows_of(path)
    first, second = rows_of(Path("SakanaAI/AI-CUDA-Engineer-Archive"))
    assert isinstance(local, Entry)
    assert isinstance(first, Entry)
    assert first.level == 1
    assert isinstance(second, Skip)
