"""How retrieved examples enter a prompt: whole or not at all, within the budget, and only where they may."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.kernels.problems import load_suite
from kbrl_async.learning.policies import manifests
from kbrl_async.rollouts.prompts import render_prompt
from kbrl_async.rollouts.prompts.examples import MAX_CHARACTERS, render_example, render_with_examples
from kbrl_async.rollouts.prompts.first import ExamplePrompts, FirstPrompts
from kbrl_async.rollouts.retrieval import Entry, Retriever
from kbrl_async.rollouts.scoring import ScoredTurn
from kbrl_async.runs import prompting
from kbrl_async.runs.config import load
from kbrl_async.runs.config.schema import Config
from protocols.records import Candidate, Fault, Problem, Purpose, RolloutRequest, SamplingParams
from tests.records import timing
from tests.unit.rollouts.retrieval.making import build, entry, module

PROBLEM = Problem("L1/asked", 1, "asked", module("x = F.gelu(x)"))
HELD = Problem("L1/held", 1, "held", module("x = F.silu(x)"), split="heldout")


class Worked(msgspec.Struct):
    """An example that is nothing but its texts."""

    kernel: str = "class ModelNew: pass\n"
    reference: str = module("x = torch.relu(x)")
    speedup: float | None = None


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("option", ["compact", "zero_shot"])
def test_without_examples_the_prompt_is_the_templates(option: str) -> None:
    assert render_with_examples(option, PROBLEM, [], words, 10**6).text == render_prompt(option, PROBLEM)


@pytest.mark.parametrize("option", ["compact", "zero_shot"])
def test_the_best_example_stands_last_and_the_problem_after_it(option: str) -> None:
    text = render_with_examples(option, PROBLEM, [Worked("BEST"), Worked("SECOND")], words, 10**6).text
    assert text.endswith(render_prompt(option, PROBLEM))
    assert text.index("SECOND") < text.index("BEST")


def test_a_compact_example_has_the_form_of_the_small_policys_own_answers() -> None:
    assert render_example("compact", Worked("KERNEL\n")) == (
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n    def forward(self, x):\n"
        "        x = torch.relu(x)\n        return x\n### ModelNew\n```python\nKERNEL\n```\n"
    )


def test_an_example_that_is_too_long_is_dropped_whole() -> None:
    long = Worked("x" * MAX_CHARACTERS)
    found = render_with_examples("zero_shot", PROBLEM, [long, Worked("SHORT")], words, 10**6)
    assert found.shown == (1,)
    assert "xxx" not in found.text


@pytest.mark.parametrize("option", ["compact", "zero_shot"])
def test_the_budget_drops_examples_and_never_cuts_one(option: str) -> None:
    offered = [Worked("BEST " * 20), Worked("BULKY " * 200), Worked("LAST " * 20)]
    whole = [render_example(option, worked) for worked in offered]
    for budget in range(0, words(render_with_examples(option, PROBLEM, offered, words, 10**6).text) + 20, 7):
        found = render_with_examples(option, PROBLEM, offered, words, budget)
        assert words(found.text) <= budget or not found.shown
        assert all((block in found.text) == (place in found.shown) for place, block in enumerate(whole))


def test_what_fits_is_shown_though_a_better_one_did_not() -> None:
    offered = [Worked("BULKY " * 500), Worked("SMALL")]
    assert render_with_examples("compact", PROBLEM, offered, words, 100).shown == (1,)


# ── the aggregator's side ─────────────────────────────────────────────────────────────────────────────────────


def config(index: Path, **changes: Any) -> Config:
    settings = {"option": "raicl", "index": str(index), **changes}
    return load(overrides=[f"prompt.{name}={value}" for name, value in settings.items()])


@pytest.fixture
def index(tmp_path: Path) -> Path:
    rows = [
        *(entry(n, module(f"x = F.{op}(x)"), verified=True) for n, op in enumerate(("relu", "elu", "selu"))),
        entry(7, HELD.source, verified=True),
        entry(8, module("x = F.mish(x)"), backend="triton"),
    ]
    build(tmp_path / "index", rows)
    return tmp_path / "index"


def example_prompts(settings: Config, retriever: Retriever, count: Callable[[str], int], tokens: int) -> ExamplePrompts:
    return ExamplePrompts(settings.prompt_option, settings.backend, retriever, count, tokens, settings.prompt)


def prompts(index: Path, tokens: int = 10**6, **changes: Any) -> ExamplePrompts:
    retriever = Retriever.open(index, [(HELD.problem_id, HELD.source)])
    return example_prompts(config(index, **changes), retriever, words, tokens)


def scored(problem: Problem, purpose: Purpose = Purpose.TRAIN) -> tuple[RolloutRequest, ScoredTurn]:
    request = RolloutRequest("g1.r0", "g1", problem, "", "c", SamplingParams(8), purpose)
    return request, ScoredTurn(None, None, Fault.OK, Candidate("class ModelNew: pass\n", "c"), timing(2.0, 0.5))  # type: ignore[arg-type]


def test_a_prompt_names_its_examples_and_the_index(index: Path) -> None:
    first = prompts(index).make(PROBLEM, Purpose.TRAIN)
    assert set(first.examples) == {"test:0", "test:1", "test:2"}
    assert first.version == Retriever.open(index).build
    assert first.text.endswith(render_prompt("compact", PROBLEM))


def test_their_number_and_the_token_budget_bound_the_examples(index: Path) -> None:
    assert len(prompts(index, examples=2).make(PROBLEM, Purpose.TRAIN).examples) == 2
    bare = words(render_prompt("compact", PROBLEM))
    assert prompts(index, tokens=bare).make(PROBLEM, Purpose.TRAIN).examples == ()


def test_the_small_policy_is_shown_its_own_backend_only(index: Path) -> None:
    assert "test:8" not in prompts(index, examples=9).make(PROBLEM, Purpose.TRAIN).examples


def test_held_out_solutions_are_in_no_prompt(index: Path) -> None:
    made = prompts(index, examples=9)
    assert "test:7" not in made.make(PROBLEM, Purpose.TRAIN).examples
    assert "test:7" not in made.make(HELD, Purpose.EVAL).examples


def test_the_live_index_is_off_by_default(index: Path) -> None:
    made = prompts(index)
    made.learn(*scored(Problem("L1/other", 1, "other", module("x = F.celu(x)"))))
    assert "live:g1.r0" not in made.make(PROBLEM, Purpose.TRAIN).examples


def test_a_live_kernel_is_shown_in_training_and_never_in_an_evaluation(index: Path) -> None:
    made = prompts(index, live_examples=4, examples=9)
    made.learn(*scored(Problem("L1/other", 1, "other", module("x = F.celu(x)"))))
    shown = made.make(PROBLEM, Purpose.TRAIN)
    assert "live:g1.r0" in shown.examples
    assert shown.version.endswith("+1")
    assert "live:g1.r0" not in made.make(PROBLEM, Purpose.EVAL).examples


@pytest.mark.parametrize("rollout", [scored(HELD), scored(PROBLEM, Purpose.EVAL)])
def test_held_out_problems_and_evaluations_never_join_the_live_index(
    index: Path, rollout: tuple[RolloutRequest, ScoredTurn]
) -> None:
    made = prompts(index, live_examples=4)
    made.learn(*rollout)
    assert made.live is not None
    assert len(made.live) == 0


def test_an_unverified_rollout_never_joins_the_live_index(index: Path) -> None:
    made = prompts(index, live_examples=4)
    request, result = scored(PROBLEM)
    made.learn(request, msgspec.structs.replace(result, timing=None))
    assert made.live is not None
    assert len(made.live) == 0


def opened(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, settings: Config, positions: int = 512
) -> tuple[FirstPrompts, list[str]]:
    """`prompts_of` of a run whose policy has so many positions."""
    model = run_dir / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    monkeypatch.setattr(manifests, "newest", lambda folder: (SimpleNamespace(base_model=str(model)), folder))
    monkeypatch.setattr(prompting, "token_counter", lambda base: words)
    monkeypatch.setattr(prompting, "problems_of", lambda config: [PROBLEM, HELD])
    said: list[str] = []
    log = SimpleNamespace(info=lambda event, **facts: said.append(f"{event} {facts}"))
    return prompting.prompts_of(settings, run_dir, log), said


def test_a_run_without_raicl_opens_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = opened(monkeypatch, tmp_path, load())
    assert type(made) is FirstPrompts
    assert made.make(PROBLEM, Purpose.TRAIN).text == render_prompt("compact", PROBLEM)


def test_prompt_and_longest_answer_fit_the_models_positions(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(index)
    room = words(render_prompt("compact", PROBLEM)) + 40
    made, _ = opened(monkeypatch, tmp_path / "run", settings, positions=room + settings.max_tokens)
    shown = made.make(PROBLEM, Purpose.TRAIN)
    assert shown.examples
    assert words(shown.text) <= room


def test_a_run_guards_its_held_out_problems_and_says_so(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, said = opened(monkeypatch, tmp_path / "run", config(index, examples=9), positions=10**6)
    assert "'guarded': 1" in said[0]
    assert "test:7" not in made.make(PROBLEM, Purpose.TRAIN).examples


def test_a_continued_run_takes_its_kernels_back_into_the_live_index(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "kernels").mkdir(parents=True)
    (run / "config.yaml").write_text("backend: c\n")
    for name in ("L1_asked", "L1_held"):
        (run / "kernels" / f"{name}.py").write_text("class ModelNew: pass\n")
    made, _ = opened(monkeypatch, run, config(index, live_examples=4))
    assert isinstance(made, ExamplePrompts)
    assert made.live is not None
    assert [item.problem_id for item in made.live.snapshot().entries] == ["L1/asked"]


def test_tokens_are_counted_as_the_policy_reads_them(tmp_path: Path) -> None:
    from kbrl_async.lab.small_policy.making import train_tokenizer

    tokenizer = train_tokenizer(["x = 1\ny = 2\n"] * 20, 270)
    tokenizer.save_pretrained(tmp_path)
    text = "x = 1\nz = 3\n"
    assert prompting.token_counter(str(tmp_path))(text) == len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["prompt.option=raicl"], "needs prompt.index"),
        (["prompt.index=x"], "used by prompt.option=raicl only"),
        (["prompt.examples=0"], "prompt.examples must be an integer ≥ 1"),
    ],
)
def test_settings_that_contradict_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(overrides=overrides)


def test_raicl_resolves_to_the_models_own_template() -> None:
    base = ["prompt.option=raicl", "prompt.index=x"]
    assert load(overrides=base).prompt_option == "compact"
    assert load(overrides=[*base, "model_name=some/model"]).prompt_option == "zero_shot"


def test_every_problem_of_the_suite_gets_examples_within_the_small_policys_context(tmp_path: Path) -> None:
    """With solutions of the whole suite in the index; tokens estimated at four characters a token, far too high."""
    suite = load_suite()
    rows: list[Entry] = [
        entry(n, p.source, problem_id=p.problem_id, verified=True, kernel=module("x = 1")) for n, p in enumerate(suite)
    ]
    build(tmp_path / "index", rows)
    retriever = Retriever.open(tmp_path / "index", [(p.problem_id, p.source) for p in suite if p.split == "heldout"])
    made = example_prompts(config(tmp_path / "index"), retriever, lambda text: len(text) // 4, 512)
    shown = [made.make(p, Purpose.EVAL) for p in suite]
    assert all(len(first.text) // 4 <= 512 for first in shown)
    assert all(first.examples for first in shown)
