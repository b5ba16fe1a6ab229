"""What a configuration means for a run: its problems, its rules and what is paid. The same live and replayed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.kernels.problems import downloads
from kbrl_async.kernels.problems.finding import choose
from kbrl_async.rollouts.buffer.rules import BufferRules
from kbrl_async.rollouts.curriculum import STAGES
from kbrl_async.rollouts.manager import RolloutRules
from kbrl_async.rollouts.rewards.presets import Preset
from kbrl_async.rollouts.settings import Alarms, Turns
from kbrl_async.rollouts.turns import TurnRules
from kbrl_async.runs.config.schema import Config
from kbrl_async.runs.demonstrations.dataset import NOT_A_PROBLEM, SFT
from kbrl_async.runs.problems import problems_of, trainable
from kbrl_async.runs.run_memory import RunPlan
from kbrl_async.runs.run_state import RunState
from protocols.records import Problem


def plan_of(config: Config) -> RunPlan:
    """Raises `ProblemError` and `ConfigError`."""
    problems = problems_of(config, config.levels)
    return RunPlan(
        training=[NOT_A_PROBLEM] if config.method == SFT else trainable(config, problems),
        heldout=[problem for problem in problems if problem.split == "heldout"],
        group_size=config.group_size,
        seed=config.seed,
        max_minutes=config.max_minutes,
        eval_samples=config.eval_samples,
        eval_every=config.eval_every,
        eval_credit=config.eval_credit,
        buffer=BufferRules(
            batch_size=config.batch_size,
            max_steps=config.max_steps,
            max_staleness=config.max_staleness,
            advantage=config.advantage,
            scale_advantages=config.learner.scale_advantages,
            truncated=config.learner.truncated,
            best_of_n=config.best_of_n,
            hold_s=config.hold_s,
        ),
        turns=turn_rules(config),
        curriculum=config.curriculum,
        alarms=_alarms(config),
    )


def _alarms(config: Config) -> Alarms:
    if config.method == SFT:  # there is no behaviour policy to be far from
        return msgspec.structs.replace(config.alarms, ess_below=0.0, kl_above=0.0, entropy_below=0.0)
    return config.alarms


def turn_rules(config: Config) -> TurnRules:
    """How many turns a rollout takes, and what they are worth."""
    if config.mode == "single_turn":
        return TurnRules(1, config.gamma, config.turns)
    if config.mode == "agents":  # each role earns its own reward only
        return TurnRules(config.max_turns, 0.0, Turns())
    return TurnRules(config.max_turns, config.gamma, config.turns)


def rollout_rules(config: Config) -> RolloutRules:
    return RolloutRules(config.mode, config.backend, config.prompt_option, turn_rules(config))


def preset_for(group_id: str, presets: Sequence[Preset], state: RunState) -> Preset:
    """All rollouts of a group are paid alike, whenever they end."""
    return presets[0] if len(presets) == 1 else presets[STAGES.index(state.stage_of(group_id))]


def evaluated_problems(config: Config) -> list[Problem]:
    """Which problems `kbrl eval` asks: by ids, else by levels; then by split. Problems that an audit flags stay in: the
    figures know of them.

    :raises UserError: an id names no problem, or nothing is left.
    :raises ProblemError: a level is empty, or a file breaks the contract.
    """
    wanted = config.evaluation
    found = problems_of(config, () if wanted.ids else config.levels)
    if wanted.ids:
        found = list({p.problem_id: p for p in (choose(id_, found) for id_ in wanted.ids)}.values())
    if wanted.split != "all":
        found = [problem for problem in found if problem.split == wanted.split]
    if not found:
        where = "these ids" if wanted.ids else f"level {', '.join(map(str, config.levels))}"
        raise UserError(f"none of {where} is {wanted.split}", "Leave out --heldout, or choose other levels")
    downloads.check(found[: wanted.limit])
    return found[: wanted.limit]
