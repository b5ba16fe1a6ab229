"""Builds survive kills, never harm the index that is there, and what they write is checked when it is opened."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kbrl_async.errors import AddressTaken, UserError
from kbrl_async.lab.indexing import IndexOptions, build_index
from kbrl_async.rollouts.retrieval import CorpusSource, Entry, Query, Retriever
from kbrl_async.rollouts.retrieval.embedders import Passage, Vectors
from kbrl_async.rollouts.retrieval.embedders.lexical import LexicalEmbedder
from kbrl_async.rollouts.retrieval.entries import Skip
from kbrl_async.rollouts.retrieval.store import IndexReader
from tests.unit.rollouts.retrieval.making import build, entry, module, source

ACTIVATIONS = [
    "relu",
    "gelu",
    "silu",
    "elu",
    "selu",
    "celu",
    "mish",
    "tanh",
    "sigmoid",
    "softplus",
    "hardtanh",
    "relu6",
]
ROWS: list[Entry | Skip] = [
    entry(n, module(f"x = F.{name}(x)", f"x = F.{other}(x)"))
    for n, (name, other) in enumerate((a, b) for a in ACTIVATIONS for b in ACTIVATIONS)
]
SMALL = IndexOptions(chunk=20)


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def test_the_same_rows_give_the_same_build(tmp_path: Path) -> None:
    one, two = build(tmp_path / "one", ROWS), build(tmp_path / "two", ROWS)
    assert (one.build, one.files) == (two.build, two.files)


@pytest.mark.parametrize("phase", ["read", "embed", "write"])
def test_a_build_that_was_killed_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path, phase: str) -> None:
    reads: list[int] = []

    def kill(now: str, done: int, total: int | None) -> None:
        if now.startswith(phase) and (done >= 60 or now == "write"):
            raise Killed

    def counted() -> Iterator[Entry | Skip]:
        for number, row in enumerate(ROWS):
            reads.append(number)
            yield row

    rows = msgspec.structs.replace(source(ROWS), read=counted)
    with pytest.raises(Killed):
        build_index([rows], tmp_path / "killed", SMALL, kill)
    phases: dict[str, int] = {}
    manifest = build_index([rows], tmp_path / "killed", SMALL, lambda now, done, total: phases.setdefault(now, done))
    whole = build_index([source(ROWS)], tmp_path / "whole", SMALL)
    assert (manifest.build, manifest.count) == (whole.build, whole.count)
    assert _content(tmp_path / "killed") == _content(tmp_path / "whole")
    assert phases.get("read test", 80) == 80, "what was harvested is not harvested again"


def _content(path: Path) -> list[bytes]:
    folder = path / json.loads((path / "manifest.json").read_text())["folder"]
    return [file.read_bytes() for file in sorted(folder.iterdir())]


def test_embeddings_that_were_saved_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded: list[int] = []

    class Counting(LexicalEmbedder):
        def embed(self, passages: Any) -> Vectors:
            embedded.append(len(passages))
            if len(embedded) == 4:
                raise Killed
            return super().embed(passages)

    monkeypatch.setattr("kbrl_async.rollouts.retrieval.embedders.lexical.LexicalEmbedder", Counting)
    for expected in (Killed, None):
        if expected:
            with pytest.raises(Killed):
                build_index([source(ROWS)], tmp_path, SMALL)
        else:
            build_index([source(ROWS)], tmp_path, SMALL)
    assert sum(embedded) == len(ROWS) + 20, "only the chunk in work was lost"


def test_another_plan_throws_unfinished_work_away(tmp_path: Path) -> None:
    def kill(now: str, done: int, total: int | None) -> None:
        raise Killed

    with pytest.raises(Killed):
        build_index([source(ROWS)], tmp_path, SMALL, kill)
    assert build(tmp_path, ROWS[:7]).count == 7


def test_the_old_index_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    def kill(now: str, done: int, total: int | None) -> None:
        if now == "write":
            raise Killed

    build(tmp_path, ROWS[:9])
    with pytest.raises(Killed):
        build_index([source(ROWS)], tmp_path, SMALL, kill)
    assert IndexReader(tmp_path).count == 9


def test_a_reader_keeps_its_index_while_a_new_one_replaces_it(tmp_path: Path) -> None:
    build(tmp_path, ROWS[:9])
    old = Retriever.open(tmp_path)
    build(tmp_path, ROWS)
    assert old.retrieve(Query(module("x = torch.sin(x)"))).hits[0].entry.uid in {f"test:{n}" for n in range(9)}
    assert IndexReader(tmp_path).count == len(ROWS)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1, "the old folder is gone"


def test_two_builds_of_one_folder_at_once_are_refused(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(AddressTaken, match="another build"):
            build(tmp_path, ROWS)


def test_nothing_usable_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 × not JSON, 1 × reference does not parse"):
        build(tmp_path, [Skip("not JSON"), Skip("not JSON"), entry(1, "def (")])


def test_of_one_reference_only_the_best_verified_kernels_are_kept(tmp_path: Path) -> None:
    speeds = [None, 0.5, 3.0, 9.0, 2.0]
    rows = [
        entry(n, module("x = F.relu(x)"), speedup=speed, verified=speed is not None and speed < 9)
        for n, speed in enumerate(speeds)
    ]
    manifest = build(tmp_path, rows, per_reference=2)
    store = IndexReader(tmp_path)
    assert {store.entry(row).speedup for row in range(2)} == {3.0, 2.0}
    assert manifest.sources[0].skipped == {"better kernels of the same reference": 3}


def test_a_row_that_came_before_is_counted_not_kept(tmp_path: Path) -> None:
    first = entry(1, module("x = F.relu(x)"))
    same_uid = entry(1, module("x = F.gelu(x)"))
    same_content = msgspec.structs.replace(first, uid="test:2")
    assert build(tmp_path, [first, same_uid, same_content]).sources[0].skipped == {
        "uid seen before": 1,
        "same example seen before": 1,
    }


def test_above_the_limit_lists_are_searched_and_still_find_what_is_there(tmp_path: Path) -> None:
    assert build(tmp_path, ROWS, exact_below=100).kind == "ivf"
    store = IndexReader(tmp_path)
    row = 100
    rows, scores = store.vectors.search(store.vectors.vectors(np.array([row]))[0], 3)
    assert rows[0] == row
    assert scores[0] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["vectors.faiss", "facts.npy", "entries.jsonl", "offsets.npy", "idf.npy"])
def test_a_damaged_file_is_named_when_the_index_is_opened(tmp_path: Path, name: str) -> None:
    manifest = build(tmp_path, ROWS)
    path = tmp_path / manifest.folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=name):
        IndexReader(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 0}, "format 0"),
        ({"folder": "../elsewhere"}, "names the folder"),
        ({"count": 3}, "do not belong together"),
        ({"dimension": 7}, "do not belong together"),
        ({"kind": None}, "can't be read"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    build(tmp_path, ROWS)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        IndexReader(tmp_path)


def test_no_index_is_an_error_that_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kbrl index build"):
        IndexReader(tmp_path)


def test_an_index_of_another_embedder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, ROWS)
    with pytest.raises(UserError, match="built with the embedder lexical, not BAAI/bge-code-v1"):
        Retriever.open(tmp_path, embedder="BAAI/bge-code-v1")
    monkeypatch.setattr(LexicalEmbedder, "dimension", 64)
    with pytest.raises(UserError, match="64 dimensions, the index has 512"):
        Retriever.open(tmp_path)


class Constant:
    dimension, near_copy = 3, 2.0
    name = f"{__name__}:Constant"

    @classmethod
    def open(cls, _folder: Path) -> Constant:
        return cls()

    def fit(self, passages: Any) -> None: ...

    def save(self, folder: Path) -> None: ...

    def embed(self, passages: list[Passage]) -> Vectors:
        return np.tile(np.array([1, 0, 0], np.float32), (len(passages), 1))


def test_an_embedder_of_your_own_is_named_by_its_place(tmp_path: Path) -> None:
    assert build(tmp_path, ROWS[:5], embedder=Constant.name).dimension == 3
    opened = Retriever.open(tmp_path, embedder=Constant.name)
    assert len(opened.retrieve(Query(module("x = torch.sin(x)"), k=2)).hits) == 2


@pytest.mark.parametrize("named", ["stranger_s_code:Words", "a-stranger/model", "."])
def test_an_index_does_not_choose_what_is_imported(tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's manifest may name a module that lies here, or a folder of a model with code in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stranger_s_code.py").write_text("raise SystemExit('it was imported')")
    build(tmp_path / "index", ROWS[:5])
    path = tmp_path / "index" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "embedder": named}))
    with pytest.raises(UserError, match=rf"nobody here has named\. If you trust it: prompt\.embedder={named}"):
        Retriever.open(tmp_path / "index")
    assert "stranger_s_code" not in sys.modules


def test_the_source_of_a_build_is_a_plain_value() -> None:
    assert isinstance(source(ROWS), CorpusSource)
