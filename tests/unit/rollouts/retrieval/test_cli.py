"""`kbrl index build` and `kbrl index query`, as one types them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kbrl_async import cli
from kbrl_async.cli.index import default_model
from tests.retrieval_corpus import kernelbook_lines, sakana_lines, write_lines
from tests.unit.rollouts.retrieval.making import module


@pytest.fixture
def book(tmp_path: Path) -> Path:
    write_lines(tmp_path / "book.jsonl", kernelbook_lines(5, 60))
    return tmp_path / "book.jsonl"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    write_lines(tmp_path / "archive.jsonl", sakana_lines(6, 60, problems=8))
    return tmp_path / "archive.jsonl"


def corpora(index: Path) -> dict[str, int]:
    manifest = json.loads((index / "manifest.json").read_text())
    return {source["corpus"]: source["kept"] for source in manifest["sources"]}


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = cli.main([str(word) for word in argv])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_build_reports_what_was_kept_and_what_was_left_out(
    book: Path, archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(capsys, "index", "build", book, archive, "--output", tmp_path / "index")
    assert code == 0
    assert "another level" in said
    assert "lexical in 512 dimensions" in said
    assert set(corpora(tmp_path / "index")) == {"kernelbook", "sakana"}


@pytest.mark.parametrize(("option", "gone"), [("--triton-only", "sakana"), ("--cuda-only", "kernelbook")])
def test_build_can_be_narrowed_to_a_backend(book: Path, archive: Path, tmp_path: Path, option: str, gone: str) -> None:
    cli.main(["index", "build", str(book), str(archive), "--output", str(tmp_path / "index"), option])
    assert corpora(tmp_path / "index")[gone] == 0


def test_build_takes_the_levels_and_the_incorrect_ones_that_were_asked_for(archive: Path, tmp_path: Path) -> None:
    kept = []
    for words in ([], ["--include-incorrect"], ["--sakana-levels", "1"]):
        cli.main(["index", "build", str(archive), "--output", str(tmp_path / "index"), *words])
        kept.append(corpora(tmp_path / "index")["sakana"])
    assert kept[2] < kept[0] <= kept[1]


def test_query_shows_examples_scores_and_reasons(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["index", "build", str(book), "--output", str(tmp_path / "index")])
    problem = tmp_path / "level1" / "01_copy.py"
    problem.parent.mkdir()
    rows = [json.loads(line) for line in book.read_bytes().splitlines()[:1]]
    problem.write_text(rows[0]["python_code"].replace(rows[0]["entry_point"], "Model"))
    capsys.readouterr()
    code, said = run(capsys, "index", "query", problem, "--index", tmp_path / "index", "-k", 2, "--why")
    assert code == 0
    assert said.count("kernelbook:") == 3, "two examples, and the problem itself among the refused"
    assert "1 kept out: same code" in said
    assert "diversity" in said


@pytest.mark.parametrize(
    ("has_package", "has_gpu", "model", "why"),
    [
        (False, True, "lexical", "sentence-transformers is not installed"),
        (True, False, "lexical", "there is no GPU"),
        (True, True, "BAAI/bge-code-v1", "there is a GPU"),
    ],
)
def test_the_dense_model_is_the_default_where_it_can_run(
    monkeypatch: pytest.MonkeyPatch, has_package: bool, has_gpu: bool, model: str, why: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_package else None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    chosen, said = default_model()
    assert chosen == model
    assert why in said


class Hub:
    """Stands for the library `datasets`: both corpora, or no network."""

    def __init__(self, book: Path, archive: Path, *, is_away: bool = False) -> None:
        self._rows = {"GPUMODE/KernelBook": ("train", book), "SakanaAI/AI-CUDA-Engineer-Archive": ("level_1", archive)}
        self._is_away = is_away

    def get_dataset_split_names(self, name: str) -> list[str]:
        if self._is_away:
            raise ConnectionError("Couldn't reach the Hub\nlong story")
        return [self._rows[name][0]]

    def load_dataset(self, name: str, *, split: str, streaming: bool) -> list[dict[str, Any]]:
        assert streaming
        assert split == self._rows[name][0]
        rows = []
        for line in self._rows[name][1].read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict)]


def test_without_a_source_both_corpora_are_indexed_and_the_choice_of_embedder_is_said(
    book: Path, archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(sys.modules, "datasets", Hub(book, archive))  # type: ignore[arg-type]
    code, said = run(capsys, "index", "build", "--output", tmp_path / "index")
    assert code == 0
    assert set(corpora(tmp_path / "index")) == {"kernelbook", "sakana"}
    assert "sources: GPUMODE/KernelBook and SakanaAI/AI-CUDA-Engineer-Archive" in said
    assert "embedder: lexical, as there is no GPU" in said


def test_a_hub_that_is_not_reached_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", Hub(tmp_path, tmp_path, is_away=True))  # type: ignore[arg-type]
    code, said = run(capsys, "index", "build", "--output", tmp_path / "index")
    assert code == 2
    assert "the hub does not give GPUMODE/KernelBook: Couldn't reach the Hub" in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("build", "missing.jsonl", "--output", "{tmp}/index"), "does not exist"),
        (("build", "{tmp}", "--output", "{tmp}/index"), "no row could be used"),
        (("build", "{tmp}", "--output", "{tmp}/index", "--sakana-levels", "one"), "no list of levels"),
        (("query", "{tmp}/problem.py", "--index", "{tmp}/nowhere"), "holds no index"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    (tmp_path / "problem.py").write_text(module("x = F.relu(x)"))
    code, said = run(capsys, "index", *(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert code == 2
    assert message in said.splitlines()[-1]
