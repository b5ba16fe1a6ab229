"""An inference engine, ours with a list of what it was asked: `sampler.engine=kbrl_example_parts.engine:start`."""

from __future__ import annotations

import os
from pathlib import Path

from kbrl_async.sampling.engine import Completion, EngineSetup
from kbrl_async.sampling.transformers import engine as ours
from protocols.records import Purpose, SamplingParams

ASKED = "EXAMPLE_PARTS_ASKED"
"""Environment variable that names the file."""


class WritingEngine(ours.TransformersEngine):
    async def generate(
        self,
        request_id: str,
        prompt: str,
        params: SamplingParams,
        purpose: Purpose = Purpose.TRAIN,
        adapter: str = "",
    ) -> Completion:
        with Path(os.environ[ASKED]).open("a") as asked:
            asked.write(f"{request_id}\n")
        return await super().generate(request_id, prompt, params, purpose, adapter)


async def start(setup: EngineSetup) -> WritingEngine:
    manifest, _ = await setup.first_policy()
    return WritingEngine(
        setup.load_model(manifest.base_model),
        setup.load_tokenizer(manifest.base_model),
        setup.settings,
        threads=setup.threads,
        seed=setup.seed,
        tick=setup.breathe,
        computing=setup.computing,
    )
