"""tinker-cookbook: problems as a dataset for its RL training loop, with refinement turns.

    from kbrl_kernels.cookbook import KernelDatasetBuilder
    config = chz.Blueprint(train.Config).apply({"dataset_builder": KernelDatasetBuilder(…), …})

A rollout's reward is that of its best turn, paid at the turn that reached it. A fault of the host raises: the
cookbook's rollout strategy decides whether the group goes on without it, and none is trained on as a failure.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Literal

import chz
import tinker
from tinker_cookbook import renderers
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer

from kbrl_kernels import judging
from kbrl_kernels.judging import Settings


class KernelEnv(Env):
    """One rollout: up to `turns` answers to one problem; ends when one is proven faster."""

    def __init__(self, settings: Settings, problem_id: str, renderer: renderers.Renderer, turns: int = 1) -> None:
        self._settings, self._problem_id, self._renderer, self._turns = settings, problem_id, renderer, turns
        text = judging.prompt(settings, judging.problem(settings, problem_id))
        self._talk: list[renderers.Message] = [{"role": "user", "content": text}]
        self._taken, self._best = 0, 0.0

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        return self._observation(), self._renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        said, _ = self._renderer.parse_response(action)
        judged = await judging.judge(self._settings, self._problem_id, renderers.get_text_content(said))
        self._taken += 1
        gained = max(0.0, judged.reward - self._best) if self._taken > 1 else judged.reward
        self._best = max(self._best, judged.reward)
        self._talk += [said, {"role": "user", "content": judged.feedback}]
        return StepResult(
            reward=gained,
            episode_done=judged.proven_faster or self._taken >= self._turns,
            next_observation=self._observation(),
            next_stop_condition=self._renderer.get_stop_sequences(),
            metrics={name: float(value) for name, value in judged.metrics().items()},
            logs={"fault": judged.fault, "problem": self._problem_id},
        )

    def _observation(self) -> Observation:
        found: tinker.ModelInput = self._renderer.build_generation_prompt(self._talk)
        return found


class KernelGroupBuilder(EnvGroupBuilder):
    """Rollouts of one problem, compared with one another. Holds strings only, so that it can be sent elsewhere."""

    def __init__(self, settings: Settings, problem_id: str, tokenizer: str, renderer: str, size: int, turns: int):
        self._settings, self._problem_id, self._size, self._turns = settings, problem_id, size, turns
        self._tokenizer, self._renderer = tokenizer, renderer

    async def make_envs(self) -> Sequence[Env]:
        renderer = renderers.get_renderer(self._renderer, get_tokenizer(self._tokenizer))
        return [KernelEnv(self._settings, self._problem_id, renderer, self._turns) for _ in range(self._size)]

    def logging_tags(self) -> list[str]:
        return ["kernels", self._problem_id.partition("/")[0]]


class KernelDataset(RLDataset):
    """Batches of problems, each pass in another order; the same at every start."""

    def __init__(
        self, problem_ids: Sequence[str], make: functools.partial[KernelGroupBuilder], batch: int, batches: int
    ):
        self._ids, self._make, self._batch, self._batches = list(problem_ids), make, batch, batches

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [self._make(problem_id=self._drawn(index * self._batch + i)) for i in range(self._batch)]

    def _drawn(self, place: int) -> str:
        pass_, within = divmod(place, len(self._ids))
        return random.Random(pass_).sample(self._ids, len(self._ids))[within]

    def __len__(self) -> int:
        return self._batches


@chz.chz
class KernelDatasetBuilder(RLDatasetBuilder):
    """Training problems; the held-out ones are the test set."""

    model_name_for_tokenizer: str
    renderer_name: str
    batch_size: int = 8
    group_size: int = 8
    batches: int = 100
    turns: int = 1
    problems: str = ""
    backend: str = "c"
    preset: str = "stage3"
    option: str = "one_shot"
    level: int | None = None
    only: str | None = None
    timing: bool = True

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        return self._dataset("train", self.batches), self._dataset("heldout", 1) if self.only is None else None

    def _dataset(self, split: Literal["train", "heldout"], batches: int) -> RLDataset:
        levels = () if self.level is None else (self.level,)
        split_ = "" if self.only else split
        settings = Settings(self.problems, self.backend, self.preset, self.option, levels, split_, self.timing)
        ids = [self.only] if self.only else [problem.problem_id for problem in judging.problems(settings)]
        make = functools.partial(
            KernelGroupBuilder,
            settings,
            tokenizer=self.model_name_for_tokenizer,
            renderer=self.renderer_name,
            size=self.group_size,
            turns=self.turns,
        )
        return KernelDataset(ids, make, min(self.batch_size, len(ids)), batches)
