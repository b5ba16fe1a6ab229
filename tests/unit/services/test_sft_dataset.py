"""method=sft: lessons take the way of rollouts through the group book, and a restart goes on where the run stopped."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.lab.small_policy.corpus import examples
from kbrl_async.learning.sft import without_behaviour
from kbrl_async.rollouts.alarms import rules_of
from kbrl_async.rollouts.buffer.buffer import RolloutBuffer, rollout_ids
from kbrl_async.rollouts.buffer.events import Admitted, BatchMade
from kbrl_async.runs.config import Config, load
from kbrl_async.runs.demonstrations import LearnedTurn, Lesson
from kbrl_async.runs.demonstrations.dataset import NOT_A_PROBLEM, SftDataset, corpus, described
from kbrl_async.runs.planning import plan_of
from protocols.records import GroupOutcome, TrainGroup

GROUP = 2


def lesson(number: int, turns: int = 1) -> Lesson:
    return Lesson(tuple(LearnedTurn([number], [100 + number, turn]) for turn in range(turns)))


def config(*words: str) -> Config:
    return load(overrides=["method=sft", "batch_size=1", f"group_size={GROUP}", "max_steps=6", *words])


def run(book: RolloutBuffer, lessons: SftDataset, updates: int) -> list[TrainGroup]:
    """What the learner gets, with the aggregator's own calls."""
    seen = []
    for now in itertools.count(1):
        if len(seen) == updates:
            return seen
        if book.room():
            event = book.take(book.admission(NOT_A_PROBLEM.problem_id, 0, GROUP, now)).event
            assert isinstance(event, Admitted)
            for rollout_id in rollout_ids(event.group_id, GROUP):
                book.take(book.scored(event.group_id, rollout_id, lessons.samples(rollout_id, event.version), now))
        made = book.take(book.poll(now)).event
        if isinstance(made, BatchMade):
            seen += book.train_groups(made.batch_id)
            book.take(book.trained(made.batch_id, made.index + 1, now))
    raise AssertionError


def targets(groups: list[TrainGroup]) -> list[int]:
    return [sample.token_ids[0] - 100 for group in groups for sample in group.samples]


def test_every_lesson_is_learned_once_before_any_is_learned_again() -> None:
    lessons = SftDataset([lesson(n) for n in range(4)], GROUP, seed=0)
    book = RolloutBuffer(plan_of(config()).buffer)
    learned = targets(run(book, lessons, 6))
    passes = [learned[0:4], learned[4:8], learned[8:12]]
    assert [sorted(p) for p in passes] == [[0, 1, 2, 3]] * 3
    assert passes[0] != passes[1] or passes[1] != passes[2]


def test_all_counters_of_the_book_add_up_and_nothing_is_filtered() -> None:
    book = RolloutBuffer(plan_of(config()).buffer)
    run(book, SftDataset([lesson(0)], GROUP, 0), 6)
    book.check()
    assert book.counts[GroupOutcome.TRAINED] == book.counts["admitted"] == 6


def test_every_target_token_weighs_one() -> None:
    """With −A·log π and A = 1 the update is the mean cross-entropy of the target tokens."""
    groups = run(RolloutBuffer(plan_of(config()).buffer), SftDataset([lesson(n) for n in range(4)], GROUP, 0), 2)
    assert {sample.advantage for group in groups for sample in group.samples} == {1.0}
    settings = config()
    assert (settings.loss, settings.learner.normalise, settings.learner.epochs) == ("reinforce", "token_mean", 1)


def test_each_turn_of_a_conversation_is_a_sample() -> None:
    found = SftDataset([lesson(0, turns=3)], GROUP, 0).samples("g000000.r1", 4)
    assert [(s.turn, s.token_ids, s.policy_version) for s in found] == [
        (0, [100, 0], 4),
        (1, [100, 1], 4),
        (2, [100, 2], 4),
    ]
    assert all(len(s.logprobs) == len(s.token_ids) for s in found)


def test_what_a_rollout_learns_does_not_depend_on_what_was_asked_before() -> None:
    """So a restarted aggregator, which asks for what is open only, teaches the same lessons."""
    data = [lesson(n) for n in range(7)]
    running, restarted = SftDataset(data, GROUP, 3), SftDataset(data, GROUP, 3)
    ids = [f"g{group:06d}.r{member}" for group in range(9) for member in range(GROUP)]
    all_of_them = {rollout_id: running.samples(rollout_id, 0) for rollout_id in ids}
    for rollout_id in reversed(ids[5:]):
        assert restarted.samples(rollout_id, 0) == all_of_them[rollout_id]


def test_a_crash_between_two_lessons_of_a_group_changes_no_batch() -> None:
    """The journal holds an admitted group and one of its lessons; the restarted aggregator teaches the other one."""
    options, lessons = plan_of(config()).buffer, SftDataset([lesson(n) for n in range(5)], GROUP, 0)
    book = RolloutBuffer(options)
    admitted = book.take(book.admission(NOT_A_PROBLEM.problem_id, 0, GROUP, 1.0)).event
    scored = book.take(book.scored("g000000", "g000000.r0", lessons.samples("g000000.r0", 0), 2.0)).event
    assert admitted is not None
    assert scored is not None
    again = RolloutBuffer.replay(options, [admitted, scored])
    assert again.open_rollouts() == {"g000000": ["g000000.r1"]}
    for found in (book, again):
        found.take(found.scored("g000000", "g000000.r1", lessons.samples("g000000.r1", 0), 3.0))
        found.take(found.poll(4.0))
    assert again.train_groups("batch-000000") == book.train_groups("batch-000000")


def test_the_order_is_of_the_seed() -> None:
    def order(seed: int) -> list[int]:
        lessons = SftDataset([lesson(n) for n in range(20)], GROUP, seed)
        return [lessons.samples(f"g{n // 2:06d}.r{n % 2}", 0)[0].prompt_ids[0] for n in range(20)]

    assert order(0) == order(0)
    assert order(0) != order(1)


def test_training_problems_are_not_asked_but_the_held_out_ones_are_evaluated() -> None:
    plan = plan_of(config("level=2"))
    assert plan.training == [NOT_A_PROBLEM]
    assert plan.heldout
    assert {problem.level for problem in plan.heldout} == {2}


def test_alarms_on_ratios_are_off_because_nobody_sampled() -> None:
    assert [rule.name for rule in rules_of(plan_of(config()).alarms)] == ["nonfinite"]
    assert "ess" in [rule.name for rule in rules_of(plan_of(load(overrides=["method=grpo"])).alarms)]


def test_metrics_that_compare_with_a_sampler_are_not_told() -> None:
    metrics = {"loss": 0.0, "ess": 0.5, "ratio_p99": 3.0, "mismatch_kl": 1.0, "entropy": 0.2, "mismatch_kl_fresh": 1.0}
    assert without_behaviour(metrics) == {"loss": 0.0, "entropy": 0.2, "perplexity": 1.0}


def test_the_projects_own_corpus_holds_right_answers_only() -> None:
    found = corpus(config("demonstrations.examples=20"))
    from kbrl_async.lab.small_policy.author import CAREFUL

    drawn = list(examples(1, 20, habits=CAREFUL, prompt_option="compact"))
    assert [c.messages[-1].content for c in found] == [e.answer for e in drawn]
    assert not any(e.slips for e in drawn)


def test_the_summary_says_how_a_run_learned(tmp_path: Any) -> None:
    assert described(config(), tmp_path)["method"] == "sft"
    (tmp_path / "demonstrations.json").write_text('{"read": 3, "lessons": 2, "left_out": [{}]}')
    assert described(config(), tmp_path)["demonstrations"] == {"read": 3, "lessons": 2, "left_out": 1}


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["loss=grpo"], "has its own loss"),
        (["advantage=mean"], "has its own loss"),
        (["preset=dapo"], "has its own loss"),
        (["corrections=veto"], "were not sampled"),
        (["temperature=0.7"], "temperature=0.7"),
        (["mode=agents"], "teaches one role"),
        (["backend=triton"], "demonstrations.files is empty"),
    ],
)
def test_what_does_not_go_with_sft_is_refused(words: list[str], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        config(*words)


def test_files_need_the_method() -> None:
    with pytest.raises(ConfigError, match="method=sft"):
        load(overrides=["demonstrations.files=data.jsonl"])
    assert config("demonstrations.files=data.jsonl,runs/a").demonstrations.files == ["data.jsonl", "runs/a"]


def test_a_lesson_counts_by_its_weight() -> None:
    heavy = [lesson(0)._replace(weight=3.0), lesson(1)]
    groups = run(RolloutBuffer(plan_of(config()).buffer), SftDataset(heavy, GROUP, seed=0), 1)
    by_lesson = {sample.token_ids[0] - 100: sample.advantage for group in groups for sample in group.samples}
    assert by_lesson == pytest.approx({0: 1.5, 1: 0.5})
