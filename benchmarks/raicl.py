"""Does retrieval raise the small policy's correct rate on held-out problems? One policy, prompts without and with it.

    python benchmarks/raicl.py [--samples 24] [-k 3] [--policy FOLDER] [--cache FOLDER]

The policy is made first, unless a folder is given: by SFT alone, on a corpus of which half holds worked examples. The
index holds a right kernel of every problem of the suite, held-out ones included, so the leak rules have work. Each
held-out problem is answered so many times at temperature 1 with each kind of prompt; every answer is compiled and
verified. The anchor is the prompt without examples, in the same run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.problems import load_suite
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import Bench, bench_options
from kbrl_async.kernels.verify.bench import zygote_for
from kbrl_async.lab.indexing import build_index
from kbrl_async.lab.small_policy.author import CAREFUL, Author
from kbrl_async.lab.small_policy.families.source import render_answer
from kbrl_async.lab.small_policy.making import SmallPolicyOptions, ensure_small_policy
from kbrl_async.lab.small_policy.specs import SPECS
from kbrl_async.learning.policies.models import load_tokenizer
from kbrl_async.rollouts.prompts import extract, render_prompt
from kbrl_async.rollouts.prompts.examples import render_with_examples
from kbrl_async.rollouts.retrieval import Entry, Query, Retriever, Source
from protocols.records import Candidate, Fault, Problem

CONTEXT, ANSWER = 768, 256
Judge = Callable[[Problem, str], tuple[bool, bool]]


def solutions() -> Iterator[Entry]:
    """A right kernel of every problem, as a run that solved them all would leave them."""
    for problem in load_suite():
        spec = SPECS[problem.problem_id]
        author = Author(random.Random(problem.problem_id), msgspec.structs.replace(CAREFUL, fast=0.5))
        source = extract(render_answer(spec.module(), spec.answer(author), author)).source
        uid = f"run:{problem.problem_id}"
        yield Entry(uid, "run", problem.source, source, "c", problem.problem_id, problem.level, 1.0, True)


class Policy:
    """Draws answers at temperature 1."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = load_tokenizer(str(folder))
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()

    def tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    @torch.no_grad()
    def answers(self, prompt: str, count: int) -> list[str]:
        ids = torch.tensor([self._tokenizer.encode(prompt, add_special_tokens=False)] * count)
        drawn = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=ANSWER, pad_token_id=self._tokenizer.pad_token_id,
        )  # fmt: skip
        return [self._tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True) for row in drawn]


@contextlib.contextmanager
def judge(folder: Path) -> Iterator[Judge]:
    """(compiled, correct) of an answer; equal answers are judged once."""
    store, seen = ArtifactStore(folder / "store"), dict[tuple[str, str], tuple[bool, bool]]()
    with (
        Builder(store) as builder,
        zygote_for("cpu") as zygote,
        contextlib.closing(Bench(zygote, bench_options(TimingBench(deadline_s=10.0)))) as bench,
    ):

        def verdict(problem: Problem, source: str) -> tuple[bool, bool]:
            report = builder.build(Candidate(source, "c"))
            if report.fault is not Fault.OK:
                return False, False
            paths = {unit: store.path(address) for unit, address in report.artifacts.items()}
            found = {unit: path for unit, path in paths.items() if path is not None}
            checked = bench.evaluate(problem, Candidate(source, "c"), found, timing=False)
            return True, checked.verdict.fault is Fault.OK

        def judged(problem: Problem, answer: str) -> tuple[bool, bool]:
            source = extract(answer).source
            if not source:
                return False, False
            key = problem.problem_id, source
            if key not in seen:
                seen[key] = verdict(problem, source)
            return seen[key]

        yield judged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=24, help="answers to each problem and kind of prompt")
    parser.add_argument("-k", type=int, default=3, help="examples")
    parser.add_argument("--policy", type=Path, help="folder of a small policy that knows examples")
    parser.add_argument("--cache", type=Path, help="where a policy that is made is kept")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = SmallPolicyOptions(shot_share=0.5, max_seconds=240.0)
        made = args.policy or ensure_small_policy(args.cache or folder / "cache", options)
        report = measure(folder, Policy(made), args.samples, args.k)
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(json.dumps(report))


def measure(folder: Path, policy: Policy, samples: int, k: int) -> dict[str, Any]:
    build_index([Source("suite", "run", "1", solutions)], folder / "index")
    heldout = [problem for problem in load_suite() if problem.split == "heldout"]
    retriever = Retriever.open(folder / "index", [(p.problem_id, p.source) for p in heldout])
    counts = {"without": [0, 0], "with": [0, 0]}
    with judge(folder) as judged:
        for problem in heldout:
            hits = retriever.retrieve(Query(problem.source, problem.problem_id, "c", only_backend=True, k=k)).hits
            shown = render_with_examples("compact", problem, hits, policy.tokens, CONTEXT - ANSWER)
            for kind, prompt in (("without", render_prompt("compact", problem)), ("with", shown.text)):
                results = [judged(problem, answer) for answer in policy.answers(prompt, samples)]
                for place in (0, 1):
                    counts[kind][place] += sum(result[place] for result in results)
    total = samples * len(heldout)
    table = [[counts[kind][1], total - counts[kind][1]] for kind in ("with", "without")]
    return {
        "benchmark": "raicl",
        "heldout_problems": len(heldout),
        "answers_each": total,
        "examples": k,
        **{f"compile_rate_{kind}": round(found[0] / total, 4) for kind, found in counts.items()},
        **{f"correct_rate_{kind}": round(found[1] / total, 4) for kind, found in counts.items()},
        "fisher_p": round(float(stats.fisher_exact(table, alternative="greater").pvalue), 5),
    }


if __name__ == "__main__":
    main()
