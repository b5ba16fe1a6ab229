"""The small policy's corpus: what it may hold, and what it must never hold."""

from __future__ import annotations

import itertools
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.problems.writing import render_problem
from kbrl_async.kernels.syntax.reading import read
from kbrl_async.lab.small_policy.author import CAREFUL, SLOW, Author, Habits
from kbrl_async.lab.small_policy.corpus import error_of, examples, write_example, write_turn
from kbrl_async.lab.small_policy.families.rows import RowReduce
from kbrl_async.lab.small_policy.families.source import render_answer
from kbrl_async.lab.small_policy.languages import respond
from kbrl_async.lab.small_policy.making import MadeOnce, Pair, bucketed, tokenize, train_tokenizer
from kbrl_async.lab.small_policy.ops import chain
from kbrl_async.lab.small_policy.specs import HELDOUT, SPECS, difficulty, random_spec
from kbrl_async.rollouts.prompts import Feedback, extract, render_prompt
from kbrl_async.rollouts.prompts.feedback import named_line
from kbrl_async.rollouts.prompts.roles import OUTCOMES
from protocols.records import Fault
from tests.suite import suite

SUITE = {problem.problem_id: problem for problem in suite(1, 2, 3)}


def test_every_file_of_the_suite_is_what_its_grammar_renders() -> None:
    rendered = {key: parse_problem(render_problem(spec.module()), key).source for key, spec in SPECS.items()}
    assert rendered == {key: problem.source for key, problem in SUITE.items()}


def test_the_index_of_the_suite_says_which_problems_are_held_out() -> None:
    assert {key for key, problem in SUITE.items() if problem.split == "heldout"} == HELDOUT


def test_difficulty_rises_with_the_level() -> None:
    means = [
        sum(difficulty(s) for k, s in SPECS.items() if k.startswith(level)) / sum(k.startswith(level) for k in SPECS)
        for level in ("L1", "L2", "L3")
    ]
    assert means == sorted(means)


def test_no_prompt_of_the_corpus_is_that_of_a_held_out_problem() -> None:
    forbidden = {render_prompt("compact", SUITE[key]) for key in HELDOUT}
    prompts = {e.prompt for e in examples(3, 4000, habits=Habits(), prompt_option="compact")}
    assert not prompts & forbidden


def test_random_problems_never_equal_a_held_out_one_even_when_only_those_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heldout, other = SPECS["L1/11_silu"], SPECS["L1/01_tanh"]
    draws = iter([heldout, heldout, other])
    monkeypatch.setattr("kbrl_async.lab.small_policy.specs.draw_spec", lambda rng: next(draws))
    assert random_spec(random.Random(0)) is other


def test_no_problem_of_the_corpus_computes_what_a_held_out_one_does_whatever_its_constants() -> None:
    held = [read(render_problem(SPECS[key].module())) for key in HELDOUT]
    rng = random.Random(5)
    drawn = [read(render_problem(random_spec(rng).module())) for _ in range(1500)]
    assert not {one.chain_hash for one in drawn} & {one.chain_hash for one in held}
    assert not {one.code_hash for one in drawn} & {one.code_hash for one in held}


def test_a_held_out_problem_with_another_constant_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    near = RowReduce("mean", before=chain("tanh"), after=chain("scale:0.5"))  # of L2/15_tanh_mean_scale
    draws = iter([near, SPECS["L1/01_tanh"]])
    monkeypatch.setattr("kbrl_async.lab.small_policy.specs.draw_spec", lambda rng: next(draws))
    assert random_spec(random.Random(0)) is SPECS["L1/01_tanh"]


def test_every_operation_and_every_member_of_a_held_out_problem_is_drawn_elsewhere() -> None:
    rng = random.Random(1)
    modules = [random_spec(rng).module() for _ in range(1500)]
    drawn = {line for module in modules for line in (*module.forward, *module.members)}
    held = {line for key in HELDOUT for line in (*SPECS[key].module().forward, *SPECS[key].module().members)}
    assert held <= drawn


def test_an_operation_is_one_line_wherever_it_stands() -> None:
    rng, lines = random.Random(2), set[str]()
    for _ in range(400):
        spec = random_spec(rng)
        lines |= {line for line in spec.answer(Author(rng, CAREFUL)).kernel if line.strip() == "v = tanhf(v);"}
    assert lines == {"    v = tanhf(v);"}


def test_what_a_kernel_says_of_an_operation_is_the_token_that_the_problem_has() -> None:
    example = write_example(SPECS["L2/15_tanh_mean_scale"], Author(random.Random(0), CAREFUL), "compact")
    tokenizer = train_tokenizer([example.prompt, example.answer] * 3, 2048)
    prompt, answer = (tokenizer(text)["input_ids"] for text in (example.prompt, example.answer))
    (tanh,) = tokenizer("torch.tanh(x)\n")["input_ids"]
    assert (prompt.count(tanh), answer.count(tanh)) == (1, 1)


def test_the_corpus_is_the_same_for_the_same_seed() -> None:
    first, second = (list(examples(7, 50, habits=Habits(), prompt_option="compact")) for _ in range(2))
    assert first == second


def test_the_corpus_holds_right_and_wrong_answers_so_that_there_is_something_to_find() -> None:
    corpus = list(examples(1, 1000, habits=Habits(), prompt_option="compact"))
    assert 0.1 < sum(not e.slips for e in corpus) / len(corpus) < 0.5


def test_an_author_with_a_slip_writes_another_text_than_a_careful_one() -> None:
    always = Habits(bound=1.0, fast=1.0)
    spec = SPECS["L1/01_tanh"]
    careful = write_example(spec, Author(random.Random(0), CAREFUL), "compact")
    sloppy = write_example(spec, Author(random.Random(0), always), "compact")
    assert careful.answer != sloppy.answer
    assert "bound" in sloppy.slips


@pytest.mark.parametrize("key", sorted(SPECS))
def test_careful_answers_are_candidates_that_can_be_extracted(key: str) -> None:
    spec = SPECS[key]
    for habits in (CAREFUL, SLOW):
        answer = render_answer(
            spec.module(), spec.answer(Author(random.Random(0), habits)), Author(random.Random(0), habits)
        )
        assert extract(answer).source


def test_the_tokenizer_restores_every_text_exactly() -> None:
    corpus = list(examples(2, 300, habits=Habits(), prompt_option="compact"))
    tokenizer = train_tokenizer((e.answer for e in corpus), 1024)
    assert all(tokenizer.decode(tokenizer(e.answer)["input_ids"]) == e.answer for e in corpus[:100])


def test_a_line_of_the_corpus_is_one_token_and_no_token_is_never_written() -> None:
    corpus = list(examples(2, 1500, habits=Habits(), prompt_option="compact"))
    texts = [text for example in corpus for text in (example.prompt, example.answer)]
    tokenizer = train_tokenizer(texts, 2048)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    assert sum(len(one) for one in ids) < 1.03 * sum(text.count("\n") for text in texts)
    written = {token for one in ids for token in one}
    assert len(tokenizer) - len(written) < 256 + 20


def test_a_text_that_the_tokenizer_never_saw_comes_back_whole() -> None:
    tokenizer = train_tokenizer(["v = tanhf(v);\n"] * 9, 300)
    text = "    float ε = 1e-5f;\n\n\tv += ε; // never seen"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_bucketing_loses_and_doubles_nothing() -> None:
    corpus = list(examples(2, 700, habits=Habits(), prompt_option="compact"))
    tokenizer = train_tokenizer((e.answer for e in corpus), 1024)
    pairs = list(tokenize(corpus, tokenizer))
    assert sorted(bucketed(pairs, 0)) == sorted(pairs)


def test_of_the_corpus_only_what_is_wanted_is_made_and_only_once() -> None:
    made: list[int] = []

    def source() -> Iterator[Pair]:
        for number in range(5):
            made.append(number)
            yield [number], []

    kept = MadeOnce(source())
    assert [pair[0][0] for pair in itertools.islice(kept, 2)] == [0, 1]
    assert made == [0, 1]
    assert [pair[0][0] for pair in itertools.chain(kept, kept)] == [*range(5), *range(5)]
    assert made == [0, 1, 2, 3, 4]


def test_second_turns_repair_what_the_first_got_wrong_more_often_than_not() -> None:
    made = list(examples(0, 400, habits=Habits(), prompt_option="compact", turn_share=0.5, verdict_share=0.2))
    turns = [e for e in made if "### Feedback: " in e.prompt]
    verdicts = [e for e in made if e.prompt.endswith("### Verdict\n")]
    first = [e for e in made if "### Attempt" not in e.prompt]
    assert 150 < len(turns) < 250
    assert 40 < len(verdicts) < 130
    assert all(e.answer.strip() in OUTCOMES for e in verdicts)
    assert sum(not e.slips for e in turns) / len(turns) > 0.5 > sum(not e.slips for e in first) / len(first)


def test_a_second_turn_is_told_the_line_that_a_compiler_stops_at() -> None:
    spec, habits = SPECS["L1/13_softmax"], msgspec.structs.replace(CAREFUL, syntax=1.0)
    turn = write_turn(spec, random.Random(3), habits, "compact")
    assert "### Feedback: compile\n            b[c] = v\n### ModelNew\n" in turn.prompt


@pytest.mark.parametrize("slip", ["syntax", "name"])
@pytest.mark.parametrize("key", ["L1/13_softmax", "L1/20_linear", "L2/22_conv_silu_scale", "L3/03_swiglu"])
def test_the_line_that_the_corpus_names_is_the_one_that_gcc_names(key: str, slip: str, tmp_path: Path) -> None:
    author = Author(random.Random(1), msgspec.structs.replace(CAREFUL, **{slip: 1.0}))
    source = extract(respond(SPECS[key], author, "c")).source
    (tmp_path / "kernel.c").write_text(source.split('"""')[1])
    said = subprocess.run(
        ["gcc", "-fsyntax-only", "kernel.c"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    told = Feedback(Fault.COMPILE_ERROR, "compile", said.stderr, kernel=source)
    guessed = msgspec.structs.replace(told, error=error_of(source, author.unbuilt))
    assert named_line(told) == named_line(guessed) != ""


def test_a_repair_keeps_the_style_of_what_it_repairs() -> None:
    broken = Author(random.Random(3), msgspec.structs.replace(CAREFUL, syntax=1.0, fast=0.5), slips=random.Random(1))
    mended = Author(random.Random(3), msgspec.structs.replace(CAREFUL, fast=0.5), slips=random.Random(2))
    spec = SPECS["L1/13_softmax"]
    first, second = spec.answer(broken).kernel, spec.answer(mended).kernel
    assert first != second
    assert sum(a == b for a, b in zip(first, second, strict=False)) >= len(second) - 2
