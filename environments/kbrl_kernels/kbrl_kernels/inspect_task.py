"""Inspect: `inspect eval kbrl_kernels/kernels --model …`, with `-T mode=single|refine|tools`, `-T turns=4` …"""

from __future__ import annotations

from typing import Literal

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import Tool, ToolError, tool

from kbrl_async.errors import KbrlError
from kbrl_kernels import judging
from kbrl_kernels.judging import Judged, Settings


@task
def kernels(
    mode: Literal["single", "refine", "tools"] = "single",
    turns: int = 4,
    problems: str = "",
    backend: str = "c",
    preset: str = "stage3",
    option: str = "one_shot",
    split: str = "",
    level: int | None = None,
    timing: bool = True,
) -> Task:
    """Write a kernel that replaces a PyTorch module; scored by a reward preset of kbrl-async."""
    levels = () if level is None else (level,)
    settings = Settings(problems, backend, preset, option, levels, split, timing)
    samples = [Sample(judging.prompt(settings, p), id=p.problem_id) for p in judging.problems(settings)]
    solvers: dict[str, list[Solver]] = {
        "single": [generate()],
        "refine": [refined(settings, turns)],
        "tools": [use_tools(verify(settings)), generate()],
    }
    if mode not in solvers:
        raise ValueError(f"mode {mode!r} is none of {', '.join(solvers)}")
    return Task(MemoryDataset(samples), solver=solvers[mode], scorer=kernel_scorer(settings))


@solver
def refined(settings: Settings, turns: int) -> Solver:
    """Answers, is told what became of it, and answers again; ends when it is proven faster."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for turn in range(max(1, turns)):
            state = await generate(state)
            if turn + 1 == turns:
                break
            judged = await _judged(state, settings, state.output.completion)
            if judged.proven_faster:
                break
            state.messages.append(ChatMessageUser(content=judged.feedback))
        return state

    return solve


@tool
def verify(settings: Settings) -> Tool:
    async def execute(problem_id: str, source: str) -> str:
        """Build a candidate, check it on secret inputs, and time it against PyTorch.

        Args:
            problem_id: The problem's id, such as L1/13_softmax.
            source: A Python file with ModelNew.
        """
        try:
            return (await judging.judge(settings, problem_id, source)).feedback
        except KbrlError as error:
            raise ToolError(f"not verified, and no fault of the kernel: {error}") from None

    return execute


@scorer(metrics={"reward": [mean(), stderr()], "correct": [mean()], "proven_faster": [mean()], "speedup": [mean()]})
def kernel_scorer(settings: Settings) -> Scorer:
    """The best answer of the conversation. A fault of the host fails the sample, and gives no score."""

    async def score(state: TaskState, target: Target) -> Score:
        answers = [message.text for message in state.messages if message.role == "assistant" and message.text]
        last = answers[-1] if answers else ""
        await _judged(state, settings, last)
        known: dict[str, Judged] = state.store.get("judged")
        answer, best = max(known.items(), key=lambda item: (item[1].reward, item[1].speedup))
        values = {
            "reward": best.reward,
            "correct": float(best.ok),
            "proven_faster": float(best.proven_faster),
            "speedup": best.speedup,
        }
        return Score(value=values, answer=answer, explanation=best.feedback, metadata={"fault": best.fault})

    return score


async def _judged(state: TaskState, settings: Settings, answer: str) -> Judged:
    """Once for each answer."""
    known: dict[str, Judged] = state.store.get("judged", {})
    if answer not in known:
        known[answer] = await judging.judge(settings, str(state.sample_id), answer)
        state.store.set("judged", known)
    return known[answer]
