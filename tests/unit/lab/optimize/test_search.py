"""The search as a state machine: what it asks for, when it stops, what it keeps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbrl_async.lab.optimize.search import FRESH, REFINE, Budget, Chooser, Search, SearchOptions
from kbrl_async.lab.optimize.tree import Attempt, Judgement, Tree
from tests.unit.lab.optimize.making import right, wrong


def search(**options: object) -> Search:
    given = {"budget": Budget(), **options}
    return Search(SearchOptions(**given), random.Random(0), now=100.0)  # type: ignore[arg-type]


def answer(state: Search, source: str, judgement: Judgement | None = None, now: float = 100.0) -> Attempt:
    ask = state.ask(now)
    assert ask is not None
    attempt = state.wrote(ask.number, source, tokens=10)
    if state.needs_verdict(attempt):
        assert judgement is not None
        state.judged(ask.number, judgement)
    return state.tree[ask.number]


# ── budget ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_asked_for_after_the_time_is_over() -> None:
    state = search(budget=Budget(seconds=5.0))
    assert state.ask(104.9) is not None
    assert state.ask(105.0) is None
    assert state.stopped == "time"


def test_attempts_and_tokens_are_limits_too() -> None:
    state = search(budget=Budget(attempts=2))
    assert [state.ask(100.0) is None for _ in range(3)] == [False, False, True]
    assert state.stopped == "attempts"
    state = search(budget=Budget(tokens=15))
    answer(state, "a", wrong())
    answer(state, "b", wrong())
    assert state.ask(100.0) is None
    assert state.stopped == "tokens"


def test_the_share_of_a_budget_is_that_of_what_runs_out_first() -> None:
    assert Budget(10.0, 100, None).share(5.0, 80, 7) == 0.8
    assert Budget().share(5.0, 80, 7) == 0.0


def test_an_engine_that_only_repeats_itself_ends_the_search() -> None:
    state = search(repeats=3)
    answer(state, "same", wrong())
    for _ in range(3):
        answer(state, "same")
    assert state.ask(100.0) is None
    assert state.stopped == "repeats"


def test_the_first_reason_to_stop_stays() -> None:
    state = search(budget=Budget(seconds=1.0))
    state.stop("interrupted")
    state.ask(200.0)
    assert state.stopped == "interrupted"


# ── tree ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_equal_sources_share_one_verdict_whenever_it_comes() -> None:
    state = search()
    asks = [state.ask(100.0) for _ in range(2)]
    numbers = [ask.number for ask in asks if ask]
    assert state.needs_verdict(state.wrote(numbers[0], "code\n", 1))
    assert not state.needs_verdict(state.wrote(numbers[1], "code  \n", 1))
    state.judged(numbers[0], right(2.0))
    assert [a.judgement for a in state.tree] == [right(2.0)] * 2
    assert len(state.tree.proven()) == 1


def test_an_answer_without_a_kernel_is_judged_at_once() -> None:
    state = search()
    ask = state.ask(100.0)
    assert ask is not None
    attempt = state.wrote(ask.number, "", 5, "no code block")
    assert attempt.judgement is not None
    assert (attempt.judgement.category, attempt.judgement.message) == ("format", "no code block")
    assert state.is_idle


def test_the_best_is_the_surest_speedup_not_the_largest() -> None:
    state = search(max_turns=1)
    lucky = Judgement(right(1.0).fault, "fast", passed=10, total=10, speedup=9.0, lo=0.5, hi=30.0)
    answer(state, "lucky", lucky)
    answer(state, "sure", right(2.0))
    assert state.best is not None
    assert state.best.source == "sure"


def test_failures_come_in_the_order_of_how_far_they_came() -> None:
    state = search(max_turns=1)
    for source, judgement in (("a", wrong("compile")), ("b", wrong(passed=9)), ("c", wrong(passed=1))):
        answer(state, source, judgement)
    assert [a.source for a in state.tree.failures()] == ["b", "c", "a"]


def test_a_lost_attempt_is_neither_wrong_nor_under_way() -> None:
    state = search()
    ask = state.ask(100.0)
    assert ask is not None
    state.lost(ask.number, "the sandbox died")
    assert state.is_idle
    assert state.tree[ask.number].lost == "the sandbox died"
    assert state.tree.failures() == []


# ── what comes next ──────────────────────────────────────────────────────────────────────────────────────────────


def test_one_turn_never_refines() -> None:
    state = search(max_turns=1)
    for number in range(30):
        assert answer(state, f"{number}", right(2.0)).parent is None


def test_a_chain_is_no_longer_than_the_turns() -> None:
    state = search(max_turns=3)
    for number in range(200):
        assert answer(state, f"{number}", right(1.0 + number / 100)).turn < 3
    assert {a.turn for a in state.tree} == {0, 1, 2}


def test_cheating_is_not_refined() -> None:
    state = search()
    for number in range(50):
        assert answer(state, f"{number}", wrong("cheating")).parent is None


def test_a_kernel_to_begin_with_is_judged_before_anything_is_asked_for_and_then_refined() -> None:
    state = search()
    begun = state.begin_with("mine", "me", 100.0)
    assert state.needs_verdict(begun)
    assert state.ask(100.0) is None
    assert not state.stopped
    state.judged(begun.number, wrong())
    assert answer(state, "better", right(2.0)).parent == begun.number


@pytest.mark.parametrize("options", [{"max_turns": 1}, {}])
def test_a_kernel_to_begin_with_is_not_shown_where_there_are_no_turns_or_it_cheats(options: dict[str, int]) -> None:
    state = search(**options)
    begun = state.begin_with("mine", "me", 100.0)
    state.judged(begun.number, right(2.0) if options else wrong("cheating"))
    assert [answer(state, f"{number}", wrong("cheating")).parent for number in range(5)] == [None] * 5


def tree_of(*judgements: Judgement) -> Tree:
    tree = Tree()
    for number, judgement in enumerate(judgements):
        tree.ask(None, 0.0)
        tree.write(number, f"source {number}", 1)
        tree.judge(number, judgement)
    return tree


def test_the_most_promising_attempt_is_refined_first() -> None:
    chooser = Chooser(random.Random(0))
    chooser.wins[REFINE] = 1e6
    assert chooser.choose(tree_of(wrong("compile"), right(3.0), right(1.5), wrong(passed=9))) == 1


def test_no_attempt_is_refined_more_often_than_the_width() -> None:
    chooser, tree = Chooser(random.Random(0), width=2), tree_of(right(3.0))
    chooser.wins[REFINE] = 1e6
    for number in (1, 2):
        assert chooser.choose(tree) == 0
        tree.ask(0, 0.0)
        tree.lose(number, "gone")
    assert chooser.choose(tree) is None


@pytest.mark.parametrize(("pays", "least", "most"), [(FRESH, 0.0, 0.25), (REFINE, 0.75, 1.0)])
def test_what_pays_is_done_more(pays: str, least: float, most: float) -> None:
    chooser, tree = Chooser(random.Random(1), width=10**6), tree_of(right(2.0))
    kinds = {FRESH: tree[0], REFINE: Attempt(1, 0, 1, 0.0)}
    for _ in range(300):
        for kind, attempt in kinds.items():
            chooser.learn(attempt, paid=kind == pays)
    refined = sum(chooser.choose(tree) is not None for _ in range(200)) / 200
    assert least <= refined <= most


@given(st.lists(st.sampled_from(["new", "same", "none", "lost", "right"]), max_size=40), st.integers(0, 10))
def test_every_attempt_ends_exactly_once(events: list[str], seed: int) -> None:
    state = Search(SearchOptions(Budget()), random.Random(seed), now=0.0)
    for number, event in enumerate(events):
        ask = state.ask(float(number))
        assert ask is not None
        if event == "lost":
            state.lost(ask.number, "host")
            continue
        source = {"same": "same", "none": ""}.get(event, f"source {number}")
        attempt = state.wrote(ask.number, source, 1)
        if state.needs_verdict(attempt):
            state.judged(ask.number, right(2.0) if event == "right" else wrong())
    assert state.is_idle
    assert all((a.judgement is None) == bool(a.lost) for a in state.tree)
    assert all(a.parent is None or a.parent < a.number for a in state.tree)
