"""No problem is shown its own solution, a near-copy's, or a held-out problem's; each rule is needed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kbrl_async.lab.indexing import build_index
from kbrl_async.lab.small_policy.author import CAREFUL, Author
from kbrl_async.lab.small_policy.families.source import render_answer
from kbrl_async.lab.small_policy.specs import SPECS
from kbrl_async.rollouts.prompts import extract
from kbrl_async.rollouts.prompts.examples import render_with_examples
from kbrl_async.rollouts.retrieval import Entry, Query, Retriever, SourceOptions, open_source
from kbrl_async.rollouts.retrieval.leakage import (
    NEAR_COPY,
    SAME_CODE,
    SAME_OPERATIONS,
    SAME_PROBLEM,
    Protected,
    refused,
)
from kbrl_async.rollouts.retrieval.retriever import HELD_OUT
from kbrl_async.rollouts.retrieval.store import FACT, id_hash
from protocols.records import Problem
from tests.retrieval_corpus import mutated
from tests.suite import suite
from tests.unit.rollouts.retrieval.making import build, entry, module

SUITE = suite(1, 2, 3)
HELDOUT = [(p.problem_id, p.source) for p in SUITE if p.split == "heldout"]


def solution(problem_id: str) -> str:
    """A right kernel for a problem of the suite."""
    spec, author = SPECS[problem_id], Author(random.Random(problem_id), CAREFUL)
    return extract(render_answer(spec.module(), spec.answer(author), author)).source


SOLUTIONS = {p.problem_id: solution(p.problem_id) for p in SUITE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of a run that solved every problem, and of strangers' rewritten copies of every problem."""
    root: Path = tmp_path_factory.mktemp("leakage")
    run, copies = root / "run", root / "copies"
    (run / "kernels").mkdir(parents=True)
    copies.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump({"backend": "c", "problems": None}))
    for number, problem in enumerate(SUITE):
        kernel = SOLUTIONS[problem.problem_id]
        (run / "kernels" / f"{problem.problem_id.replace('/', '_')}.py").write_text(kernel)
        (copies / f"copy{number}.py").write_text(mutated(random.Random(number), problem.source))
        (copies / f"copy{number}_kernel.py").write_text("# a copy\n" + kernel)
    known = {p.problem_id: p.source for p in SUITE}
    sources = [open_source(str(path), SourceOptions(), lambda setting: known) for path in (run, copies)]
    manifest = build_index(sources, root / "index")
    assert manifest.count == 2 * len(SUITE), "the index holds a solution and a copy of every problem"
    return root / "index"


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Retriever:
    return Retriever.open(folder, HELDOUT)


@pytest.mark.parametrize("problem", SUITE, ids=lambda problem: problem.problem_id)
@pytest.mark.parametrize("option", ["compact", "zero_shot"])
def test_no_prompt_of_any_problem_holds_its_own_or_a_held_out_solution(
    guarded: Retriever, problem: Problem, option: str
) -> None:
    found = guarded.retrieve(Query(problem.source, problem.problem_id, "c", k=20))
    assert len(found.hits) == 20
    text = render_with_examples(option, problem, found.hits, len, 10**9).text
    forbidden = {problem.problem_id, *(problem_id for problem_id, _ in HELDOUT)}
    assert not [problem_id for problem_id in forbidden if SOLUTIONS[problem_id].strip() in text]


@settings(max_examples=60, deadline=None)
@given(which=st.sampled_from(SUITE), seed=st.integers(0, 2**32), k=st.integers(1, 12))
def test_a_rewritten_problem_under_another_name_does_not_see_its_solution_either(
    guarded: Retriever, which: Problem, seed: int, k: int
) -> None:
    disguised = mutated(random.Random(seed), which.source)
    found = guarded.retrieve(Query(disguised, "L9/other", "c", k=k))
    own = SOLUTIONS[which.problem_id].strip()
    assert not [hit.entry.uid for hit in found.hits if own in hit.kernel]


def test_without_a_guard_held_out_solutions_would_be_found(folder: Path) -> None:
    """What the guard is for: the property above would not hold without it."""
    unguarded = Retriever.open(folder)
    held = {SOLUTIONS[problem_id] for problem_id, _ in HELDOUT}
    hits = [hit for p in SUITE for hit in unguarded.retrieve(Query(p.source, p.problem_id, "c", k=20)).hits]
    assert held & {hit.kernel for hit in hits}


def test_the_reasons_are_counted_and_the_nearest_shown(guarded: Retriever) -> None:
    problem = next(p for p in SUITE if p.problem_id == "L1/01_tanh")
    found = guarded.retrieve(Query(problem.source, problem.problem_id))
    assert found.refused[SAME_PROBLEM] == 1
    assert {refusal.rule for refusal in found.nearest_refused} >= {SAME_PROBLEM}
    assert found.refused[HELD_OUT + SAME_PROBLEM] > 0


NOTHING = np.zeros(0, np.uint64)


def judged(**fact: int) -> list[str]:
    """One example against a protected problem with id 1, code 2, chain 3 and the vector (1, 0)."""
    facts = np.zeros(1, FACT)
    vector = np.array([[0.0, 1.0]], np.float32)
    for name, value in fact.items():
        facts[name] = value
    protected = Protected(*(np.array([value], np.uint64) for value in (1, 2, 3)), np.array([[1, 0]], np.float32))
    return refused(facts, vector, protected, 0.9)


@pytest.mark.parametrize(
    ("fact", "rule"),
    [({"problem": 1}, SAME_PROBLEM), ({"code": 2}, SAME_CODE), ({"chain": 3}, SAME_OPERATIONS), ({"code": 9}, "")],
)
def test_each_identity_is_a_rule_of_its_own(fact: dict[str, int], rule: str) -> None:
    assert judged(**fact) == [rule]


def test_similar_embeddings_are_a_rule_of_their_own() -> None:
    protected = Protected(NOTHING, np.array([2], np.uint64), NOTHING, np.array([[1, 0]], np.float32))
    facts, vectors = np.zeros(2, FACT), np.array([[0.91, 0.41], [0.89, 0.45]], np.float32)
    assert refused(facts, vectors, protected, 0.9) == [NEAR_COPY, ""]


def test_unknown_problems_and_empty_chains_are_never_the_same() -> None:
    zero = np.zeros(1, np.uint64)
    protected = Protected(zero, np.array([5], np.uint64), zero, np.array([[1, 0]], np.float32))
    assert refused(np.zeros(1, FACT), np.array([[0, 1]], np.float32), protected, 0.9) == [""]
    assert id_hash("") == 0


LONG = [f"x = F.{name}(x)" for name in ("relu", "gelu", "elu", "silu", "mish", "selu", "celu", "tanh", "softplus")]


def leaks() -> Iterator[tuple[str, str, Entry]]:
    problem = module("x = F.relu(x)", "x = torch.sin(x)")
    yield SAME_PROBLEM, problem, entry(1, module("x = F.mish(x)"), problem_id="L1/p")
    shapes = module("x = x.reshape(4, 2)", "x = x.view(8)")
    yield SAME_CODE, shapes, entry(1, shapes.replace("x", "other"))
    yield SAME_OPERATIONS, problem, entry(1, module("return self.act(x).sin()").replace(
        "__init__()\n", "__init__()\n        self.act = nn.ReLU()\n"))  # fmt: skip
    yield NEAR_COPY, module(*LONG), entry(1, module(*LONG, "x = x * 1.0"))


@pytest.mark.parametrize(("rule", "problem", "leak"), list(leaks()), ids=lambda value: str(value)[:15])
def test_each_rule_keeps_out_what_no_other_rule_would(tmp_path: Path, rule: str, problem: str, leak: Entry) -> None:
    others = [entry(10 + n, module(f"x = F.{op}(x)")) for n, op in enumerate(("glu", "hardswish", "logsigmoid"))]
    build(tmp_path, [leak, *others])
    found = Retriever.open(tmp_path).retrieve(Query(problem, "L1/p", k=10))
    assert dict(found.refused) == {rule: 1}
    assert leak.uid not in {hit.entry.uid for hit in found.hits}


def test_a_held_out_near_copy_is_kept_from_every_problem(tmp_path: Path) -> None:
    leak = entry(1, module(*LONG, "x = x * 1.0"))
    build(tmp_path, [leak, *(entry(10 + n, module(f"x = torch.{op}(x)")) for n, op in enumerate(("sin", "cos")))])
    asked = Query(module(*LONG[:5]), "L1/other", k=10)
    assert leak.uid in {hit.entry.uid for hit in Retriever.open(tmp_path).retrieve(asked).hits}
    held = Retriever.open(tmp_path, [("L1/held", module(*LONG))])
    assert leak.uid not in {hit.entry.uid for hit in held.retrieve(asked).hits}


def test_the_search_widens_until_enough_examples_may_be_shown(tmp_path: Path) -> None:
    same = module("x = F.relu(x)")
    copies = [entry(n, same.replace("8, 8", f"8, {n}")) for n in range(300)]
    build(tmp_path, [*copies, entry(1000, module("x = torch.sin(x)", "x = x + 1"))], per_reference=1)
    found = Retriever.open(tmp_path).retrieve(Query(same, k=1))
    assert [hit.entry.uid for hit in found.hits] == ["test:1000"]
    assert found.refused[SAME_CODE] == 300
