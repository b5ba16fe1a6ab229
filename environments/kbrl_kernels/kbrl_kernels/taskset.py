"""verifiers v1: a taskset of problems, a task that verifies, and an environment with three modes.

    vf-eval kbrl-kernels -n 4 --env.taskset.task.mode refine --env.turns 3

* `single`: one answer.
* `refine`: after each answer the model is told what became of it; the best turn counts.
* `tools`: the model has `verify` as a tool, and answers at last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from kbrl_async.errors import KbrlError
from kbrl_kernels import judging
from kbrl_kernels.judging import Settings
from kbrl_kernels.tools import KernelToolset, KernelToolsetConfig

Mode = Literal["single", "refine", "tools"]


class KernelData(vf.TaskData):
    problem_id: str


class KernelState(vf.State):
    judged: dict[str, judging.Judged] = Field(default_factory=dict)
    """By answer."""


class KernelTaskConfig(vf.TaskConfig):
    mode: Mode = "single"
    problems: str = ""
    backend: str = "c"
    preset: str = "stage3"
    timing: bool = True
    tools: KernelToolsetConfig = KernelToolsetConfig()

    def settings(self) -> Settings:
        return Settings(self.problems, self.backend, self.preset, timing=self.timing)


class KernelTask(vf.Task[KernelData, KernelState, KernelTaskConfig]):
    @classmethod
    def toolsets(cls, config: KernelTaskConfig) -> list[vf.Toolset]:
        """The bench as a tool, in the mode that has one."""
        if config.mode != "tools":
            return []
        shared = {name: getattr(config, name) for name in ("problems", "backend", "preset", "timing")}
        return [KernelToolset(config.tools.model_copy(update=shared))]

    async def judge(self, trace: vf.Trace, answer: str) -> judging.Judged:
        """Of one answer, once.

        :raises TaskError: the host's fault: the rollout has an error then, and no reward.
        """
        known: dict[str, judging.Judged] = trace.state.judged
        if answer not in known:
            try:
                known[answer] = await judging.judge(self.config.settings(), self.data.problem_id, answer)
            except KbrlError as error:
                raise vf.TaskError(str(error)) from error
        return known[answer]

    async def best(self, trace: vf.Trace) -> judging.Judged:
        """Of all turns that were judged, and the last reply."""
        await self.judge(trace, trace.last_reply)
        return max(trace.state.judged.values(), key=lambda judged: (judged.reward, judged.speedup))

    @vf.reward(weight=1.0)
    async def kernel(self, trace: vf.Trace) -> float:
        return (await self.best(trace)).reward

    @vf.metric
    async def verdict(self, trace: vf.Trace) -> dict[str, float]:
        return (await self.best(trace)).metrics()


class KernelTasksetConfig(vf.TasksetConfig):
    levels: list[int] = Field(default_factory=list)
    split: Literal["", "train", "heldout"] = ""
    option: str = "one_shot"
    task: KernelTaskConfig = KernelTaskConfig()


class KernelTaskset(vf.Taskset[KernelTask, KernelTasksetConfig]):
    def load(self) -> Iterator[KernelTask]:
        config = self.config
        own = config.task
        settings = Settings(
            own.problems, own.backend, own.preset, config.option, tuple(config.levels), config.split, own.timing
        )
        for problem in judging.problems(settings):
            text = judging.prompt(settings, problem)
            if own.mode == "tools":
                text += f"\nThe problem's id is {problem.problem_id}. Verify before you answer.\n"
            data = KernelData(id=problem.problem_id, name=problem.name, prompt=text, problem_id=problem.problem_id)
            yield KernelTask(data, own)


class KernelEnvConfig(vf.EnvConfig):
    taskset: KernelTasksetConfig = KernelTasksetConfig()
    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime=vf.SubprocessConfig())
    turns: int = 4
    """Answers that a rollout of mode `refine` has, at most."""


class KernelEnv(vf.Env[KernelEnvConfig]):
    """Runs the modes; verification is the task's."""

    async def run(self, task: KernelTask, agents: vf.Agents) -> None:
        if task.config.mode != "refine":
            await agents.agent.run(task)
            return
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            for _ in range(self.config.turns - 1):
                if said.terminated:
                    break
                judged = await task.judge(talk.trace, said.last_reply)
                if judged.proven_faster:
                    break
                said = await talk.turn(judged.feedback)
