"""Prompts and the extraction of candidates from responses."""

from __future__ import annotations

import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.kernels.problems.sources.tasks import task_problem
from kbrl_async.rollouts.prompts import extract, render_prompt
from tests.suite import suite

MODEL = "class ModelNew(nn.Module):\n    def forward(self, x):\n        return x\n"
OTHER = "print('hello')\n"


def fenced(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}```\n"


@pytest.mark.parametrize(
    "response",
    [
        fenced(MODEL),
        "Sure!\n" + fenced(MODEL) + "Done.",
        fenced(OTHER) + fenced(MODEL),
        fenced(MODEL) + fenced(OTHER, "bash"),
        "<think>\n" + fenced(MODEL.replace("return x", "return 0")) + "</think>\n" + fenced(MODEL),
        f"<KERNEL>\n{MODEL}</KERNEL>",
        f"<KERNEL>\n{fenced(MODEL)}</KERNEL> and " + fenced(MODEL.replace("return x", "return 0")),
        fenced(MODEL, ""),
        fenced(MODEL).rstrip(),
    ],
)
def test_the_candidate_is_found_in_messy_responses(response: str) -> None:
    assert extract(response).source == MODEL


def test_the_last_block_that_defines_the_model_wins() -> None:
    first = MODEL.replace("return x", "return 1")
    assert extract(fenced(first) + fenced(MODEL)).source == MODEL


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ("no code at all", "no closed code block"),
        ("```python\n" + MODEL, "no closed code block"),
        (fenced(OTHER), "no code block defines"),
        (fenced("class ModelNew(nn.Module):\n    pass\n"), "no code block defines"),
        ("<think>" + fenced(MODEL) + "</think>", "no closed code block"),
    ],
)
def test_what_is_wrong_with_a_response_is_said(response: str, problem: str) -> None:
    found = extract(response)
    assert not found.source
    assert problem in found.problem


def test_the_compact_prompt_is_the_problem_without_its_inputs() -> None:
    prompt = render_prompt("compact", suite()[0])
    assert "class Model" in prompt
    assert "get_inputs" not in prompt
    assert "import" not in prompt


def test_a_task_s_instruction_reaches_compact_prompts_too() -> None:
    row = {"pytorch_code": "class Model(nn.Module):\n    pass\n# aside", "instruction": "Fuse it.\nIn one pass."}
    for inputs in ([[2, 3]], [[[2, 3]], [[4, 3]]]):
        prompt = render_prompt("compact", task_problem({**row, "test_inputs": inputs}, 1, "t"))
        assert prompt == "# Fuse it.\n# In one pass.\nclass Model(nn.Module):\n    pass\n### ModelNew\n"


def test_the_explaining_prompt_holds_the_contract_and_the_whole_problem() -> None:
    problem = suite()[0]
    prompt = render_prompt("zero_shot", problem)
    assert problem.source in prompt
    assert "c_kernel" in prompt


def test_an_unknown_prompt_option_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="compact, few_shot, one_shot, zero_shot"):
        render_prompt("few", suite()[0])
