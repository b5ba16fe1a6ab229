"""The offline embedder finds near-copies, and is the same on every machine."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kbrl_async.errors import MissingTool, UserError
from kbrl_async.kernels.syntax import read
from kbrl_async.lab.indexing import build_index
from kbrl_async.rollouts.retrieval.embedders import Passage, make_embedder
from kbrl_async.rollouts.retrieval.embedders.lexical import LexicalEmbedder
from kbrl_async.rollouts.retrieval.store import IndexReader
from tests.retrieval_corpus import kernelbook_lines, mutated, write_lines
from tests.unit.rollouts.retrieval.making import module, open_file


def passage(*statements: str) -> Passage:
    source = module(*statements)
    return Passage(source, read(source))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> IndexReader:
    folder: Path = tmp_path_factory.mktemp("lexical")
    write_lines(folder / "book.jsonl", kernelbook_lines(3, 1500))
    build_index([open_file(folder / "book.jsonl")], folder / "index")
    return IndexReader(folder / "index")


def test_a_mutated_near_copy_finds_its_original_among_siblings(store: IndexReader) -> None:
    """At full size (20,000 rows) this is measured by benchmarks.retrieval."""
    rng, embedder = random.Random(0), store.embedder()
    rows = rng.sample(range(store.count), 200)
    found = 0
    for row in rows:
        source = mutated(rng, store.entry(row).reference)
        query = embedder.embed([Passage(source, read(source))])[0]
        found += row in store.vectors.search(query, 3)[0]
    assert found / len(rows) >= 0.97


def test_vectors_have_unit_length(store: IndexReader) -> None:
    found = store.vectors.vectors(np.arange(50))
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(50), abs=1e-5)


def test_the_same_operations_in_another_style_are_closer_than_other_operations() -> None:
    embedder = make_embedder("lexical")
    base, restyled, other = embedder.embed(
        [
            passage("x = F.relu(x)", "x = torch.softmax(x, dim=-1)"),
            passage("h = x.relu()", "return h.softmax(1)"),
            passage("x = F.gelu(x)", "x = torch.cumsum(x, dim=-1)"),
        ]
    )
    assert base @ restyled > 0.6 > base @ other + 0.1


def test_an_embedding_is_the_same_everywhere() -> None:
    """A golden value: an index built on one machine is read on another."""
    vector = make_embedder("lexical").embed([passage("x = F.relu(x)")])[0]
    assert np.flatnonzero(vector)[:4].tolist() == GOLDEN_PLACES
    assert vector[GOLDEN_PLACES] == pytest.approx(GOLDEN_VALUES, abs=1e-6)


GOLDEN_PLACES = [66, 123, 125, 135]
GOLDEN_VALUES = [-0.1074172, 0.1074172, 0.1074172, 0.1074172]


def test_rare_operations_weigh_more_than_common_ones() -> None:
    embedder = LexicalEmbedder()
    embedder.fit([*[passage("x = F.relu(x)", f"x = torch.{op}(x)") for op in ("sin", "cos", "exp", "log")]])
    both, common, rare = embedder.embed(
        [passage("x = F.relu(x)", "x = torch.sin(x)"), passage("x = F.relu(x)"), passage("x = torch.sin(x)")]
    )
    assert both @ rare > both @ common


def test_term_weights_of_another_version_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "idf.npy", np.ones(3, np.float32))
    with pytest.raises(UserError, match="no term weights"):
        LexicalEmbedder.open(tmp_path)


def test_a_model_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingTool, match=r"kbrl-async\[retrieval\].*--model lexical"):
        make_embedder("BAAI/bge-code-v1")


def test_a_model_that_cannot_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name} is not a local folder\nmore lines")

    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=load))
    with pytest.raises(UserError, match=r"some/model can't be loaded: some/model is not a local folder\. Check"):
        make_embedder("some/model")


def test_a_sentence_model_embeds_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is stood in for by what its documentation promises."""

    class Model:
        def __init__(self, name: str) -> None: ...

        def get_sentence_embedding_dimension(self) -> int:
            return 2

        def encode(self, texts: list[str], **options: object) -> np.ndarray:
            assert options["normalize_embeddings"] is True
            return np.array([[len(text), 0] for text in texts], np.float64)

    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=Model))
    embedder = make_embedder("any/model")
    one = passage("x = F.relu(x)")
    assert embedder.embed([one]).tolist() == [[len(one.source), 0]]
    assert embedder.embed([one]).dtype == np.float32
