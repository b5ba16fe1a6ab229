"""What a configuration means for the campaign: its problems, its rules and what is paid. The same for a replay."""

from __future__ import annotations

from collections.abc import Sequence

from kbrl_async.kernels.backends import runs_on_gpu
from kbrl_async.kernels.problems import load_problems, usable
from kbrl_async.rollouts.alarms import AlarmOptions
from kbrl_async.rollouts.buffer.buffer import BufferOptions
from kbrl_async.rollouts.curriculum import STAGES, CurriculumOptions
from kbrl_async.rollouts.rewards.presets import Preset, find_preset, with_plan
from kbrl_async.runs.config import Config
from services.reward_aggregator.run_state import Plan, RunState
from services.reward_aggregator.sft_dataset import NOT_A_PROBLEM, SFT

AUTO = "auto"
"""The reward preset that goes from stage1 to stage3 by itself."""


def plan_of(config: Config) -> Plan:
    """Raises `ProblemError` and `ConfigError`."""
    shapes = "gpu" if runs_on_gpu(config.backend) else "cpu"
    problems = load_problems(config.problems or "", levels=config.levels, shapes=shapes, precision=config.precision)
    learnable = usable(problems) if config.exclude_audited else problems
    return Plan(
        training=[NOT_A_PROBLEM]
        if config.method == SFT
        else [problem for problem in learnable if problem.split != "heldout"],
        heldout=[problem for problem in problems if problem.split == "heldout"],
        eval_samples=config.eval_samples,
        group_size=config.group_size,
        seed=config.seed,
        book=BufferOptions(
            config.batch_size,
            config.max_steps,
            config.max_staleness,
            baseline=config.advantage,
            scale_by_std=config.learner.scale_advantages,
        ),
        curriculum=CurriculumOptions(
            config.curriculum.kind,
            config.curriculum.window,
            config.curriculum.compile_above,
            config.curriculum.correct_above,
        ),
        eval_every=config.eval_every,
        eval_credit=config.eval_credit,
        alarms=alarms_of(config),
    )


def alarms_of(config: Config) -> AlarmOptions:
    a = config.alarms
    if config.method == SFT:  # there is no behaviour policy to be far from
        return AlarmOptions(nonfinite_action=a.nonfinite_action)
    return AlarmOptions(
        a.ess_below,
        a.ess_action,
        a.kl_above,
        a.kl_action,
        a.entropy_below,
        a.entropy_action,
        a.nonfinite_action,
        a.window,
        a.margin,
    )


def presets_of(config: Config) -> list[Preset]:
    """The one reward preset, or those of all stages."""
    builder = config.dataset_builder
    stages = STAGES if builder.reward_preset == AUTO else (builder.reward_preset,)
    found = [find_preset(stage, builder.reward_weights) for stage in stages]
    return [with_plan(preset, builder.reward_plan_part, builder.reward_plan_weight) for preset in found]


def preset_for(group_id: str, presets: Sequence[Preset], campaign: RunState) -> Preset:
    """All rollouts of a group are paid alike, whenever they end."""
    return presets[0] if len(presets) == 1 else presets[STAGES.index(campaign.stage_of(group_id))]
