"""Building and asking an index of 20,000 rows with the offline embedder: seconds, milliseconds, memory, recall, leaks.

    python benchmarks/retrieval.py [--rows 20000] [--queries 500]

The rows are made first (see `retrieval_corpus`), hostile ones included. A query is a mutated near-copy of an indexed
reference: other names, constants, comments and layout, and its members in another order; three rows in ten have a
sibling that differs in one operation. The anchor of the same run is TF-IDF over the words of the same texts, hashed
into as many dimensions. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import re
import resource
import statistics
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path

import faiss
import numpy as np
from retrieval_corpus import kernelbook_lines, mutated, sakana_lines, write_lines

from kbrl_async.lab.indexing import build_index
from kbrl_async.rollouts.retrieval import Query, Retriever, SourceOptions, open_source
from kbrl_async.rollouts.retrieval.code import read
from kbrl_async.rollouts.retrieval.embedders import Passage, Vectors
from kbrl_async.rollouts.retrieval.store import Store

WORD = re.compile(r"\w+|[^\w\s]")


def tf_idf(sources: list[str], weights: dict[str, float], dimension: int = 512) -> Vectors:
    rows = np.zeros((len(sources), dimension), np.float32)
    for row, source in enumerate(sources):
        for word, count in Counter(WORD.findall(source)).items():
            hashed = zlib.crc32(word.encode())
            weight = weights.get(word, 0.0) * (1 + math.log(count))
            rows[row, hashed % dimension] += weight if hashed >> 31 else -weight
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.maximum(norms, 1e-9)


def anchor_recall(store: Store, rows: list[int], queries: list[str]) -> float:
    texts = [store.entry(row).reference for row in range(store.count)]
    documents = Counter(word for text in texts for word in set(WORD.findall(text)))
    weights = {word: math.log(len(texts) / count) for word, count in documents.items()}
    index = faiss.IndexFlatIP(512)
    index.add(tf_idf(texts, weights))
    found = index.search(tf_idf(queries, weights), 3)[1]
    return statistics.fmean(row in hits for row, hits in zip(rows, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="usable rows, about")
    parser.add_argument("--queries", type=int, default=500, help="mutated near-copies to look up")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), args.rows, args.queries)
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(json.dumps(report))


def measure(folder: Path, rows: int, queries: int) -> dict[str, object]:
    # an eighth comes from the archive, of which kernels of unwanted levels and surplus ones are left out
    book, archive = folder / "book.jsonl", folder / "archive.jsonl"
    written = write_lines(book, kernelbook_lines(0, rows)) + write_lines(archive, sakana_lines(1, rows // 4))
    begun, cpu = time.perf_counter(), time.process_time()
    sources = [open_source(str(path), SourceOptions(), lambda setting: {}) for path in (book, archive)]
    manifest = build_index(sources, folder / "index")
    build_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    build_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    store, retriever, rng = Store(folder / "index"), Retriever.open(folder / "index"), random.Random(2)
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
    return {
        "benchmark": "retrieval",
        "rows_read": written,
        "rows_indexed": manifest.count,
        "skipped": {source.corpus: source.skipped for source in manifest.sources},
        "build_s": round(build_s, 1),
        "build_cpu_s": round(cpu_s, 1),
        "load_1m": round(os.getloadavg()[0], 1),
        "build_peak_mb": round(build_mb),
        "index_mb": round(sum(manifest.files.values()) / 1e6, 1),
        "queries": len(chosen),
        "query_p50_ms": round(statistics.median(took), 2),
        "query_cpu_p50_ms": round(statistics.median(used), 2),
        "query_p99_ms": round(statistics.quantiles(took, n=100)[98], 2),
        "recall_at_3": round(found / len(chosen), 4),
        "anchor_recall_at_3": round(anchor_recall(store, chosen, asked), 4),
        "leaked": leaked,
    }


if __name__ == "__main__":
    main()
