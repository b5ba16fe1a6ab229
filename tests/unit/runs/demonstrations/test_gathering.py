"""Files and runs together: everything is read in order, and nothing is left out without its place and reason."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kbrl_async.errors import MissingTool, UserError
from kbrl_async.runs.archive.archive import FILE, ArchiveWriter, make_row
from kbrl_async.runs.demonstrations import Renderer, gather
from kbrl_async.runs.demonstrations.archives import best_answers
from kbrl_async.runs.demonstrations.formats import Conversation, FormatError
from kbrl_async.runs.demonstrations.optimized import chains_of
from kbrl_async.runs.demonstrations.reading import records
from protocols.records import (
    BenchReport,
    Fault,
    Problem,
    Purpose,
    Verdict,
)
from protocols.rollout import Record
from tests.records import record

PAIR = {"prompt": "add", "response": "a + b"}


@pytest.fixture
def renderer(tokenizers: dict[str, Any]) -> Renderer:
    return Renderer(tokenizers["none"], 40)


def lines(path: Path, *content: object) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in content) + "\n")
    return str(path)


def test_bad_lines_are_named_by_file_and_line_and_the_good_ones_learned(tmp_path: Path, renderer: Renderer) -> None:
    data = lines(tmp_path / "data.jsonl", PAIR, "{broken", "", {"text": "x"}, PAIR, {**PAIR, "response": "b" * 90})
    found = gather([data], renderer, keep=3, include_eval=False)
    assert [lesson.where for lesson in found.lessons] == [f"{data}:1", f"{data}:5"]
    assert [(p.where, p.kind, p.reason[:14]) for p in found.problems] == [
        (f"{data}:2", "bad", "no JSON: Expec"),
        (f"{data}:4", "bad", "no known forma"),
        (f"{data}:6", "too_long", "94 tokens, and"),
    ]
    assert found.counts == {"read": 5, "bad": 2, "too_long": 1, "double": 0}


def test_the_account_adds_up(tmp_path: Path, renderer: Renderer) -> None:
    account = gather([lines(tmp_path / "data.jsonl", PAIR, "{", PAIR)], renderer, keep=3, include_eval=False).account()
    assert account["read"] == account["lessons"] + account["bad"] + account["too_long"] == 3
    assert account["left_out"][0]["where"].endswith("data.jsonl:2")
    assert (account["turns"], account["target_tokens"]) == (2, 12)


def test_a_json_file_is_a_list_or_holds_one(tmp_path: Path) -> None:
    for content in ([PAIR, PAIR], {"data": [PAIR, PAIR]}):
        path = tmp_path / "data.json"
        path.write_text(json.dumps(content))
        assert list(records(path)) == [(f"{path}:1", PAIR), (f"{path}:2", PAIR)]


def test_lines_in_a_json_file_are_read_as_lines(tmp_path: Path) -> None:
    path = Path(lines(tmp_path / "data.json", PAIR, PAIR))
    assert [where for where, _ in records(path)] == [f"{path}:1", f"{path}:2"]


def test_a_line_that_is_no_utf8_is_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n' + json.dumps(PAIR).encode())
    (_, first), (_, second) = records(path)
    assert isinstance(first, FormatError)
    assert second == PAIR


def test_a_folder_is_all_of_its_files_in_order(tmp_path: Path, renderer: Renderer) -> None:
    (tmp_path / "more").mkdir()
    lines(tmp_path / "b.jsonl", PAIR)
    lines(tmp_path / "a.json", [PAIR])
    lines(tmp_path / "more" / "c.ndjson", PAIR)
    (tmp_path / "notes.txt").write_text("not data")
    found = gather([str(tmp_path)], renderer, keep=3, include_eval=False)
    assert [Path(lesson.where).name for lesson in found.lessons] == ["a.json:1", "b.jsonl:1", "c.ndjson:1"]


@pytest.mark.parametrize("content", [{}, {"data.txt": "x"}])
def test_a_folder_without_data_is_refused(content: dict[str, str], tmp_path: Path, renderer: Renderer) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="holds no demonstrations"):
        gather([str(tmp_path)], renderer, keep=3, include_eval=False)


def test_a_file_that_is_not_there_or_unknown_is_refused(tmp_path: Path, renderer: Renderer) -> None:
    with pytest.raises(UserError, match="there is no file"):
        gather([str(tmp_path / "none.jsonl")], renderer, keep=3, include_eval=False)
    (tmp_path / "data.csv").write_text("a,b")
    with pytest.raises(UserError, match="Known endings"):
        gather([str(tmp_path / "data.csv")], renderer, keep=3, include_eval=False)


def test_nothing_to_learn_is_an_error_with_the_first_reason(tmp_path: Path, renderer: Renderer) -> None:
    data = lines(tmp_path / "data.jsonl", "{", "[")
    with pytest.raises(UserError, match=r"data\.jsonl:1: no JSON"):
        gather([data], renderer, keep=3, include_eval=False)


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
@pytest.mark.filterwarnings("ignore")
def test_parquet_rows_are_records_and_null_columns_are_not_there(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{**PAIR, "messages": None}, PAIR]), path)
    assert list(records(path)) == [(f"{path}:1", PAIR), (f"{path}:2", PAIR)]


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingTool, match="pip install pyarrow"):
        list(records(tmp_path / "data.parquet"))


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def answer(name: str, text: str, fault: Fault = Fault.OK, split: str = "train", finish: str = "stop") -> Record:
    problem = Problem("L1/a", 1, "a", "class Model: ...", split=split)
    bench = BenchReport(Verdict(fault, 5, 5))
    return record(name, text, source=text, problem=problem, prompt="the prompt", finish=finish, bench=bench)


def write_run(folder: Path, *turns: tuple[Record, float]) -> Path:
    folder.mkdir()
    with ArchiveWriter(folder / FILE) as archive:
        for turn, reward in turns:
            archive.add(make_row(turn.request.rollout_id, turn, reward=reward, at=0.0), turn.encode())
    return folder


def test_a_run_gives_the_best_different_verified_answers_of_each_problem(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        (answer("r0", "slow"), 0.6),
        (answer("r1", "fast"), 0.9),
        (answer("r2", "fast"), 0.9),
        (answer("r3", "wrong", Fault.INCORRECT), 0.95),
        (answer("r4", "slowest"), 0.5),
    )
    found = [c.messages[-1].content for _, c in best_answers(run, 2, include_eval=False) if isinstance(c, Conversation)]
    assert found == ["fast", "slow"]


def test_held_out_problems_and_cut_answers_of_a_run_are_left_out_by_name(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        (answer("r0", "a", split="heldout"), 0.9),
        (answer("r1", "b", finish="length"), 0.8),
        (answer("r2", "c"), 0.7),
    )
    found = dict(best_answers(run, 3, include_eval=False))
    assert "held out" in str(found[f"{run}:r0"])
    assert "cut off" in str(found[f"{run}:r1"])
    assert isinstance(found[f"{run}:r2"], Conversation)


def test_a_run_and_a_file_are_read_alike(tmp_path: Path, renderer: Renderer) -> None:
    run = write_run(tmp_path / "run", (answer("r0", "kernel"), 0.9))
    found = gather([str(run), lines(tmp_path / "more.jsonl", PAIR)], renderer, keep=3, include_eval=False)
    assert [lesson.where for lesson in found.lessons] == [f"{run}:r0", f"{tmp_path / 'more.jsonl'}:1"]


def test_answers_of_evaluations_are_taken_where_they_are_asked_for(tmp_path: Path, renderer: Renderer) -> None:
    held_out = answer("r0", "kernel", split="heldout")
    asked = msgspec.structs.replace(held_out.request, purpose=Purpose.EVAL)
    run = write_run(tmp_path / "run", (msgspec.structs.replace(held_out, request=asked), 0.9))
    with pytest.raises(UserError, match="no demonstration"):
        gather([str(run)], renderer, keep=3, include_eval=False)
    assert len(gather([str(run)], renderer, keep=3, include_eval=True).lessons) == 1


def test_weights_reach_the_lesson(tmp_path: Path, renderer: Renderer) -> None:
    data = lines(tmp_path / "data.jsonl", {**PAIR, "weight": 3}, PAIR)
    assert [lesson.weight for lesson in gather([data], renderer, keep=3, include_eval=False).lessons] == [3.0, 1.0]


def evidence(path: Path, problem: str, *kernels: tuple[str, str, float]) -> str:
    """As `kbrl optimize` leaves it: (source, fault, lower end) of each attempt."""
    tree = [
        {"number": n, "source_sha256": f"h{n}", "judgement": {"fault": fault, "lo": lo}, "source": None}
        for n, (_, fault, lo) in enumerate(kernels)
    ]
    sources = {f"h{n}": source for n, (source, _, _) in enumerate(kernels)}
    target = {"title": "mine", "problem": problem}
    search = {"prompt_option": "compact", "backend": "c"}
    path.write_text(json.dumps({"target": target, "search": search, "tree": tree, "sources": sources}))
    return str(path)


MODULE = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return torch.relu(x)\n"


def test_proven_kernels_of_a_search_are_learned_fastest_first_and_once(
    tmp_path: Path, tokenizers: dict[str, Any]
) -> None:
    found_by = [("slow", "ok", 0.5), ("wrong", "incorrect", 9.0), ("fast", "ok", 3.0), ("fastest", "ok", 4.0)]
    sources = [evidence(tmp_path / f"{name}.evidence.json", MODULE, *found_by) for name in "ab"]
    found = gather(sources, Renderer(tokenizers["none"], 4000), keep=2, include_eval=False)
    assert [lesson.where for lesson in found.lessons] == [f"{sources[0]}:3", f"{sources[0]}:2"]
    assert [(p.where, p.kind) for p in found.problems] == [(f"{sources[1]}:{n}", "double") for n in (3, 2)]
    assert found.account()["read"] == 4


def test_a_search_for_what_a_held_out_problem_does_teaches_nothing(tmp_path: Path, renderer: Renderer) -> None:
    renamed = MODULE.replace("torch.relu(x)", "torch.nn.functional.relu(x)")
    place = evidence(tmp_path / "a.evidence.json", renamed, ("k", "ok", 1.0))
    guarded = chains_of([Problem("L1/h", 1, "h", MODULE)])
    with pytest.raises(UserError, match="does what a held-out problem does"):
        gather([place], renderer, keep=2, include_eval=False, guarded=guarded)


def test_evidence_that_cannot_be_read_is_named(tmp_path: Path, renderer: Renderer) -> None:
    place = tmp_path / "a.evidence.json"
    place.write_text("{}")
    with pytest.raises(UserError, match="no evidence that can be read"):
        gather([str(place)], renderer, keep=2, include_eval=False)
