"""`kbrl index build` and `kbrl index query`, as one types them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

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
    ("has_package", "has_gpu", "model"),
    [(False, True, "lexical"), (True, False, "lexical"), (True, True, "BAAI/bge-code-v1")],
)
def test_the_dense_model_is_the_default_where_it_can_run(
    monkeypatch: pytest.MonkeyPatch, has_package: bool, has_gpu: bool, model: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_package else None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    assert default_model() == model


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
