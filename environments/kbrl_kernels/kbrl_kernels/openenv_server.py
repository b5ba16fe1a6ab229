"""OpenEnv: `python -m kbrl_kernels.openenv_server` serves episodes of up to `turns` answers to one problem each.

reset(problem_id=…) ─▶ prompt     step(answer) ─▶ feedback, reward, done
"""

from __future__ import annotations

import argparse
import random
import uuid
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from kbrl_kernels import judging
from kbrl_kernels.judging import Settings


class KernelAction(Action):
    answer: str = Field(
        max_length=judging.MOST_CHARACTERS, description="a Python file with ModelNew, or text around one"
    )


class KernelObservation(Observation):
    problem_id: str
    text: str = Field(description="the prompt after reset, what became of the answer after step")
    fault: str = ""
    speedup: float = 0.0
    proven_faster: bool = False


class KernelState(State):
    problem_id: str = ""


class KernelEnvironment(Environment[KernelAction, KernelObservation, KernelState]):
    """One episode at a time and session; ends when an answer is proven faster, or after `turns`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, settings: Settings, turns: int = 4) -> None:
        super().__init__()
        self._settings, self._turns = settings, turns
        self._state = KernelState()
        self._is_over = True

    @property
    def state(self) -> KernelState:
        return self._state

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, problem_id: str = "", **_: Any
    ) -> KernelObservation:
        """`problem_id` empty: one by `seed`."""
        known = judging.problems(self._settings)
        chosen = judging.problem(self._settings, problem_id) if problem_id else random.Random(seed).choice(known)
        self._state = KernelState(episode_id=episode_id or uuid.uuid4().hex, problem_id=chosen.problem_id)
        self._is_over = False
        return KernelObservation(problem_id=chosen.problem_id, text=judging.prompt(self._settings, chosen))

    def step(self, action: KernelAction, timeout_s: float | None = None, **_: Any) -> KernelObservation:
        raise NotImplementedError("verifying waits: the server calls step_async")

    async def step_async(self, action: KernelAction, timeout_s: float | None = None, **_: Any) -> KernelObservation:
        if self._is_over:
            raise RuntimeError("this episode is over: reset begins another")
        problem_id = self._state.problem_id
        judged = await judging.judge(self._settings, problem_id, action.answer)
        self._state.step_count += 1
        self._is_over = judged.proven_faster or self._state.step_count >= self._turns
        return KernelObservation(
            problem_id=problem_id,
            text=judged.feedback,
            fault=judged.fault,
            speedup=judged.speedup,
            proven_faster=judged.proven_faster,
            reward=judged.reward,
            done=self._is_over,
        )


def app(settings: Settings, turns: int = 4, sessions: int = 16) -> Any:
    """The ASGI application."""
    return create_fastapi_app(
        lambda: KernelEnvironment(settings, turns), KernelAction, KernelObservation, max_concurrent_envs=sessions
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the kernel environment over OpenEnv's protocol.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--problems", default="")
    parser.add_argument("--backend", default="c")
    parser.add_argument("--preset", default="stage3")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--no-timing", dest="timing", action="store_false")
    args = parser.parse_args()
    settings = Settings(args.problems, args.backend, args.preset, timing=args.timing)
    judging.problems(settings)
    uvicorn.run(app(settings, args.turns), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
