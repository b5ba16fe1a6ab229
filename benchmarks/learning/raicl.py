"""Does retrieval help the small policy?"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from scipy import stats

from benchmarks.harness import CORRECT_ONLY, Result, rows_of
from benchmarks.learning.study import RunStudy, right_kernel
from kbrl_async.kernels.problems import load_suite
from kbrl_async.lab.indexing import build_index
from kbrl_async.lab.small_policy.specs import SPECS
from kbrl_async.rollouts.retrieval import CorpusSource, Entry


def raicl(
    samples: Annotated[int, "answers to each problem and kind of prompt"] = 24,
    k: Annotated[int, "examples"] = 3,
    policy: Annotated[Path | None, "folder of a small policy that knows examples"] = None,
    cache: Annotated[Path | None, "where a policy that is made is kept"] = None,
) -> Result:
    """Does retrieval raise the small policy's correct rate on held-out problems? Prompts without and with examples.

    The policy is made first, unless a folder is given: by SFT alone, on a corpus of which half holds worked examples.
    The index holds a right kernel of every problem of the suite, held-out ones included, so the leak rules have work.
    Each held-out problem is answered so many times with each kind of prompt (`kbrl eval`). The anchor is the prompt
    without examples.
    """
    with tempfile.TemporaryDirectory() as name:
        study, index = RunStudy(Path(name), cache=cache), suite_index(Path(name) / "index")
        knows = [f"prompt.index={index}", "sft.shot_share=0.5", "sft.max_seconds=240"]
        start = policy or study.make_policy(settings=["prompt.option=raicl", *knows])
        kinds: dict[str, list[object]] = {
            "without": ["prompt.option=compact"],
            "with": ["--raicl", index, "--raicl-k", k, "prompt.option=raicl", "prompt.base=compact"],
        }
        for kind, words in kinds.items():
            study.evaluate(kind, start, "--heldout", "--samples", samples, *words, *CORRECT_ONLY)
        rows = {kind: rows_of(study.evaluation(kind)) for kind in kinds}
    right = {kind: sum(row.correct for row in found) for kind, found in rows.items()}
    table = [[right[kind], len(rows[kind]) - right[kind]] for kind in ("with", "without")]
    return {
        "heldout_problems": len({row.problem_id for row in rows["with"]}),
        "answers_each": len(rows["with"]),
        "examples": k,
        **{f"compile_rate_{kind}": sum(row.compiled for row in found) / len(found) for kind, found in rows.items()},
        **{f"correct_rate_{kind}": count / len(rows[kind]) for kind, count in right.items()},
        "fisher_p": float(stats.fisher_exact(table, alternative="greater").pvalue),
    }


def suite_index(folder: Path) -> Path:
    """An index of a right kernel to each problem, held-out ones included, so that the leak rules have work."""
    if not folder.exists():
        build_index([CorpusSource("suite", "run", "1", solutions)], folder)
    return folder


def solutions() -> Iterator[Entry]:
    """As a run that solved every problem of the grammar would leave them."""
    for problem in (problem for problem in load_suite() if problem.problem_id in SPECS):
        source = right_kernel(problem.problem_id, random.Random(problem.problem_id))
        uid = f"run:{problem.problem_id}"
        yield Entry(uid, "run", problem.source, source, "c", problem.problem_id, problem.level, 1.0, True)
