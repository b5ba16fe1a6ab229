"""Constants and formulas that pages speak of are those of the code: a page's words, made of the code's figures."""

from __future__ import annotations

import re

import msgspec
import pytest
import torch

from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.timing.recipe import CAREFUL_PAIRS_A_PLACE, PLACEMENT, Recipe
from kbrl_async.kernels.verify import inputs, proof, tolerance
from kbrl_async.kernels.verify.cpu import stopwatch
from kbrl_async.lab.optimize import deadline, proving
from kbrl_async.rollouts.prompts import feedback
from kbrl_async.rollouts.rewards import advantages, parts, presets
from kbrl_async.rollouts.settings import BestOfN, Reward, Turns
from kbrl_async.runs.config import load
from protocols import affinity
from protocols.records import BenchReport, Fault, Verdict
from tests.pages import ROOT
from tests.records import record, timing

RECIPE = Recipe.of(TimingBench())
FRACTIONS = {0.25: "quarter"}
NUMBERS = {2: "two", 3: "three", 4: "four", 7: "seven", 10: "ten"}
LARGE = [torch.empty(inputs.MANY_BYTES // 4 + 1, device="meta")]


def percent(share: float) -> str:
    return f"{100 * share:g} %"


SAID = {
    "docs/turns.md": (
        f"if it has at most {feedback.KERNEL_CHARACTERS:,} characters",
        f"error (at most {feedback.ERROR_CHARACTERS} characters and {NUMBERS[feedback.ERROR_LINES]} lines)",
    ),
    "docs/howto-reward.md": (
        f"between 1/{1 / parts.SPEED_FLOOR:g} and {parts.SPEED_CAP:g}, at the lower end",
        *(f"{parts.log_speed(x):.2g}".removeprefix("0") + f" at {x:g}×" for x in (0.5, 1, 2)),
        f"the lower end itself, at most {parts.SPEEDUP_CAP:g}",
        f"falls from 1 to 0 in the last {'fifth' if parts.LENGTH_BUFFER == 0.2 else '?'} of `max_tokens`",
    ),
    "docs/design.md": (f"between 1/{1 / parts.SPEED_FLOOR:g} and {parts.SPEED_CAP:g} times the reference's speed",),
    "docs/learning.md": (
        f"weight α = {presets.PLAN_CODE.plan_weight:g}",
        f"the best {BestOfN().keep} of",
        f"by reward, above {BestOfN().above:g}",
    ),
    "docs/timing.md": (
        f"it stops when the half width is {percent(RECIPE.resolution)} (`resolved`",
        f"when all of it is {percent(RECIPE.margin)} away from 1",
        f"kept under {percent(1 - RECIPE.confidence)} ({percent((1 - RECIPE.confidence) / 2)} on each side)",
        f"at most {RECIPE.patience_s:g} s per measurement",
        f"others had the core for over {percent(stopwatch.POLLUTED_SHARE)} of them",
        f"Without a report it is {percent(PLACEMENT)}",
        f"(`--pairs-a-place`, {CAREFUL_PAIRS_A_PLACE})",
        f"training, which stops after {RECIPE.max_pairs} pairs",
    ),
    "docs/verification.md": (
        f"One candidate meets {NUMBERS[len(inputs.KINDS)]} secret input sets",
        f"Inputs above {inputs.MANY_BYTES >> 20} MB get {NUMBERS[len(inputs.kinds_for(LARGE))]} sets",
        f"`1e-4·|expected|` ({tolerance.base(torch.float16):.0e}".replace("e-0", "e-") + " in half precision)",
        f"{NUMBERS[int(tolerance.HONEST_FACTOR)]} times an honest error",
        f"cut at {percent(tolerance.ILL_SHARE[False])} of the scale ({percent(tolerance.ILL_SHARE[True])} in half",
        f"under {percent(proof.MIN_SHARE)} (of at least {proof.MIN_LIBRARY_NS / 1e6:g} ms)",
    ),
    "docs/corpora.md": (f"above {RECIPE.suspicious:g}× measured again",),
    "docs/optimize.md": (
        f"waits for more than {affinity.PATIENCE} younger ones",
        f"among the {affinity.LOOK} oldest of its line",
        f"a {FRACTIONS[deadline.PROOF_SHARE]} of it is kept, {deadline.PROOF_S:g} s at most",
        f"Without it the search takes {deadline.SEARCH_S:g} s",
        f"At the end the best {NUMBERS[proving.FINALISTS]} are written",
        f"right on {NUMBERS[len(inputs.KINDS)]} secret input sets",
        f"waits for more than {affinity.PATIENCE} younger ones",
        f"among the {affinity.LOOK} oldest of its line",
    ),
}
"""Words with figures of the code; breaks of lines don't count."""


@pytest.mark.parametrize(("page", "words"), [(page, words) for page, said in SAID.items() for words in said])
def test_a_page_says_the_figure_that_the_code_has(page: str, words: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert words in text, f"{page} does not say {words!r}: mend the page, or this list where the sentence went"


@pytest.mark.parametrize("scores", [[0.2, 0.1, 1.0], [1.0], [0.0, 0.0, 0.0, 0.5]])
def test_a_turns_return_is_the_formula_of_the_page(scores: list[float]) -> None:
    """R_t = Σ_k≥t γ^(k−t)·s_k, or the largest term."""
    assert "R_t = Σ_k≥t γ^(k−t)·s_k" in (ROOT / "docs" / "turns.md").read_text()
    gamma = load().gamma
    terms = [[gamma ** (k - t) * scores[k] for k in range(t, len(scores))] for t in range(len(scores))]
    assert Turns().returns == "sum"
    assert advantages.turn_returns(scores, gamma, "sum") == pytest.approx([sum(ones) for ones in terms])
    assert advantages.turn_returns(scores, gamma, "max") == pytest.approx([max(ones) for ones in terms])


def worth(reward: Reward) -> str:
    """What a correct kernel at .97 of the reference's speed earns, as a share of what one at 8 times it does."""
    (preset,) = presets.find_presets(reward)
    timed = [record(bench=BenchReport(Verdict(Fault.OK, 10, 10), timing(lo, half=0.0))) for lo in (0.97, 8.0)]
    slow, fast = (presets.reward_of(one, preset) for one in timed)
    return f"{slow / fast:.2f}".removeprefix("0")


def test_what_speed_is_worth_beside_being_right_is_as_the_page_says() -> None:
    plain, default = Reward(preset="stage3"), Reward(preset="stage3", speed_weight=0.7)
    hierarchical, funnel, fork, kevin = (
        worth(Reward(preset=name)) for name in ("hierarchical", "funnel", "fork", "kevin")
    )
    said = (
        f"earns {worth(plain)} of what one at 8× earns with `stage3`, {worth(default)} with the default run's "
        f"`reward.speed_weight=0.7`, {worth(msgspec.structs.replace(default, above_1_weight=0.7))} with "
        f"`reward.above_1_weight=0.7` beside that; {hierarchical} with `hierarchical` and `funnel`, {fork} with "
        f"`fork`, {kevin} with `kevin`."
    )
    assert funnel == hierarchical
    assert said in " ".join((ROOT / "docs" / "howto-reward.md").read_text(encoding="utf-8").split())


def test_speed_is_paid_below_1_and_only_to_what_is_right() -> None:
    """As the invariants at the top of `parts.py` say."""
    half = timing(0.6, half=0.1)
    right = BenchReport(Verdict(Fault.OK, 10, 10), half)
    assert parts.speed(record(bench=right)) == pytest.approx(1 / 3)
    assert parts.part_of(record(bench=BenchReport(Verdict(Fault.INCORRECT, 9, 10), None)), "speed") == 0.0
    assert "a third of it at half of the reference's speed" in " ".join((parts.__doc__ or "").split())


def test_the_tutorials_rollout_is_paid_by_the_formula() -> None:
    """The table of parts in the tutorial: each pays its weight, and `speed` by the interval's lower end beside it."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    rows = re.findall(r"^ {2}(\w+) +(\d\.\d+) +(\d\.\d+|\d) +(\d\.\d+)", text, re.MULTILINE)
    assert [name for name, *_ in rows] == ["format", "compile", "correctness", "speed"]
    for name, value, weight, pays in rows:
        assert float(pays) == pytest.approx(float(value) * float(weight), abs=2e-3), name
    lower = re.search(r"the interval (\d+\.\d+) … \d+\.\d+", text)
    assert lower is not None
    assert parts.log_speed(float(lower[1])) == pytest.approx(float(rows[-1][1]), abs=5e-3)
