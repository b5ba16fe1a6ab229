"""What an index of examples costs, and what it finds. `python -m benchmarks.retrieval index`"""

from __future__ import annotations

import math
import random
import re
import resource
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Annotated

import faiss
import numpy as np

from benchmarks.harness import Commands, Result, percentiles
from kbrl_async.kernels.syntax import read
from kbrl_async.lab.indexing import build_index
from kbrl_async.rollouts.retrieval import Query, Retriever, SourceOptions, open_source
from kbrl_async.rollouts.retrieval.embedders import Passage, Vectors
from kbrl_async.rollouts.retrieval.store import IndexReader
from tests.retrieval_corpus import kernelbook_lines, mutated, sakana_lines, write_lines

commands = Commands("retrieval", __doc__)
WORD = re.compile(r"\w+|[^\w\s]")


@commands
def index(
    rows: Annotated[int, "in KernelBook's format; the real one has so many"] = 18_000,
    archive_rows: Annotated[int, "in the AI-CUDA-Engineer-Archive's format; the real one has so many"] = 30_000,
    queries: Annotated[int, "mutated near-copies to look up"] = 500,
) -> Result:
    """Building and asking an index with the offline embedder: seconds, milliseconds, memory, recall, leaks.

    The rows are made first, hostile ones included. A query is a mutated near-copy of an indexed reference: other names,
    constants, comments and layout, and its members in another order; three rows in ten have a sibling that differs in
    one operation. The anchor is TF-IDF over the words of the same texts, hashed into as many dimensions.
    """
    with tempfile.TemporaryDirectory() as name:
        return _measured(Path(name), rows, archive_rows, queries)


def _measured(folder: Path, rows: int, archive_rows: int, queries: int) -> Result:
    # of the archive kernels of unwanted levels and surplus ones are left out
    book, archive = folder / "book.jsonl", folder / "archive.jsonl"
    written = write_lines(book, kernelbook_lines(0, rows)) + write_lines(archive, sakana_lines(1, archive_rows))
    begun, cpu = time.perf_counter(), time.process_time()
    sources = [open_source(str(path), SourceOptions(), lambda setting: {}) for path in (book, archive)]
    manifest = build_index(sources, folder / "index")
    build_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    build_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    store, retriever, rng = IndexReader(folder / "index"), Retriever.open(folder / "index"), random.Random(2)
    embedder = store.embedder()
    chosen = [row for row in rng.sample(range(store.count), 2 * queries) if store.entry(row).corpus == "kernelbook"]
    chosen = chosen[:queries]
    asked = [mutated(rng, store.entry(row).reference) for row in chosen]
    found, took, used, leaked = 0, list[float](), list[float](), 0
    for row, source in zip(chosen, asked, strict=True):
        vector = embedder.embed([Passage(source, read(source))])[0]
        found += row in store.vectors.search(vector, 3)[0]
        begun, cpu = time.perf_counter(), time.process_time()
        answer = retriever.retrieve(Query(source, "L1/asked", "triton", k=3))
        took.append(1000 * (time.perf_counter() - begun))
        used.append(1000 * (time.process_time() - cpu))
        leaked += store.entry(row).uid in {hit.entry.uid for hit in answer.hits} or not answer.refused
    p50, p99 = percentiles(took, 50, 99)
    return {
        "rows_read": written,
        "rows_indexed": manifest.count,
        "skipped": {source.corpus: source.skipped for source in manifest.sources},
        "build_s": build_s,
        "build_cpu_s": cpu_s,
        "build_peak_mb": build_mb,
        "index_mb": sum(manifest.files.values()) / 1e6,
        "queries": len(chosen),
        "query_p50_ms": p50,
        "query_cpu_p50_ms": percentiles(used, 50)[0],
        "query_p99_ms": p99,
        "recall_at_3": found / len(chosen),
        "anchor_recall_at_3": _anchor_recall(store, chosen, asked),
        "leaked": leaked,
    }


def _tf_idf(sources: list[str], weights: dict[str, float], dimension: int = 512) -> Vectors:
    rows = np.zeros((len(sources), dimension), np.float32)
    for row, source in enumerate(sources):
        for word, count in Counter(WORD.findall(source)).items():
            hashed = zlib.crc32(word.encode())
            weight = weights.get(word, 0.0) * (1 + math.log(count))
            rows[row, hashed % dimension] += weight if hashed >> 31 else -weight
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(norms, 1e-9), np.float32)


def _anchor_recall(store: IndexReader, rows: list[int], queries: list[str]) -> float:
    texts = [store.entry(row).reference for row in range(store.count)]
    documents = Counter(word for text in texts for word in set(WORD.findall(text)))
    weights = {word: math.log(len(texts) / count) for word, count in documents.items()}
    index = faiss.IndexFlatIP(512)
    index.add(_tf_idf(texts, weights))
    found = index.search(_tf_idf(queries, weights), 3)[1]
    return fmean(row in hits for row, hits in zip(rows, found, strict=True))


if __name__ == "__main__":
    commands.main()
