"""What a verified candidate is worth, for those who have a `Result` and no rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kbrl_async.errors import UserError
from kbrl_async.rollouts.rewards.presets import find_presets, reward_of
from kbrl_async.rollouts.settings import REWARD_PRESETS, Reward
from protocols.records import (
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    Problem,
    RolloutRequest,
    SamplingParams,
    Verdict,
)
from protocols.rollout import Record

if TYPE_CHECKING:
    from kbrl_async.kernels.funnel.result import Result

DEFAULT = Reward().preset


def reward(result: Result, preset: str = DEFAULT, *, source: str = "", response: str = "") -> float:
    """The same number that `reward.preset=PRESET` gives in a run: docs/howto-reward.md.

    :param preset: a name of ours, or `package.module:object`.
    :param source: the candidate's text, `response` the whole answer: for parts that look at them.
    :raises UserError: there is no such preset, or it is `auto`, which goes by how well a policy does.
    """
    settings = Reward(preset=preset)
    presets = find_presets(settings)
    if len(presets) > 1:
        names = ", ".join(name for name in REWARD_PRESETS.names() if name != preset)
        raise UserError(f"preset {preset} changes while a run goes on", f"Choose among {names}")
    return reward_of(record_of(result, source=source, response=response), presets[0])


def record_of(result: Result, *, source: str = "", response: str = "") -> Record:
    """The record that a rollout with this end has, without what only a policy knows (tokens, log-probs)."""
    problem = Problem(result.problem_id, 0, result.problem_id, "")
    request = RolloutRequest("", "", problem, "", result.backend, SamplingParams(0))
    verdict, has_none = result.verdict, result.fault is Fault.FORMAT_ERROR
    candidate = None if has_none else Candidate(source, result.backend)
    said = Generation(-1, [], [], [], response, "stop", candidate, Fault.FORMAT_ERROR if has_none else Fault.OK)
    if has_none:
        return Record.of(request, said)
    if not result.compiled:
        return Record.of(request, said, _build(verdict))
    return Record.of(request, said, BuildReport(Fault.OK), BenchReport(verdict, result.timing, stages=result.stages))


def _build(verdict: Verdict) -> BuildReport:
    return BuildReport(verdict.fault, message=verdict.message, hint=verdict.hint, rule=verdict.rule)
