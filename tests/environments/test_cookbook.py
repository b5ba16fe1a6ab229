"""tinker-cookbook's own RL loop trains on our problems, against a service written from tinker's wire types.

The policy chooses between a wrong and a right kernel; both are verified for real, and it learns which one pays.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments.test_environments import FIRST, PACKAGE, environment, script
from tests.pages import ROOT

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed")
sys.path.insert(0, str(PACKAGE))

TRAIN = """
import asyncio, os, sys
from kbrl_kernels.cookbook import KernelDatasetBuilder
from tests import tinker_service
from tests.environments.test_environments import script
from tinker_cookbook.rl import train
from tinker_cookbook.tokenizer_utils import register_tokenizer

if __name__ == "__main__":
    answers = tuple(script().ANSWERS)
    register_tokenizer("bytes", lambda: tinker_service.Tokens(answers))
    service = tinker_service.Service()
    server = tinker_service.start(service)
    builder = KernelDatasetBuilder(
        model_name_for_tokenizer="bytes", renderer_name="role_colon", batch_size=1, group_size=4, batches=10,
        only="L1/01_tanh", timing=False, option="zero_shot",
    )
    config = train.Config(
        learning_rate=0.3, dataset_builder=builder, model_name="bytes", recipe_name="kernels",
        renderer_name="role_colon", max_tokens=64, log_path=sys.argv[1], eval_every=0, save_every=0,
        base_url=f"http://127.0.0.1:{server.server_port}", num_groups_to_log=0,
    )
    asyncio.run(train.main(config))
    print("LEARNT", *service.updates)
"""


def test_the_cookbooks_loop_learns_which_kernel_is_right(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(TRAIN)
    variables = environment(TINKER_API_KEY="tml-none", TINKER_TELEMETRY="0")
    command = [sys.executable, str(tmp_path / "loop.py"), str(tmp_path / "log")]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("LEARNT"))
    chances = [float(word) for word in line.split()[1:]]
    assert 3 <= len(chances) <= 10  # a group whose answers are all alike is no update
    assert chances[-1] > max(0.7, chances[0])


def test_a_second_turn_is_told_what_became_of_the_first_and_pays_what_it_gained() -> None:
    from kbrl_kernels.cookbook import KernelEnv
    from kbrl_kernels.judging import Settings
    from tinker_cookbook import renderers

    from tests import tinker_service

    tokens = tinker_service.Tokens(tuple(script().ANSWERS))
    renderer = renderers.get_renderer("role_colon", tokens)
    env = KernelEnv(Settings(timing=False), "L1/01_tanh", renderer, turns=2)

    async def both() -> tuple[float, bool, str, float, bool]:
        await env.initial_observation()
        wrong = await env.step([tinker_service.ANSWERS[0], tinker_service.END])
        right = await env.step([tinker_service.ANSWERS[1], tinker_service.END])
        shown = tokens.decode(wrong.next_observation.to_ints())
        return wrong.reward, wrong.episode_done, shown, right.reward, right.episode_done

    first, is_over, shown, second, is_over_then = asyncio.run(both())
    assert first == pytest.approx(FIRST)
    assert "Failed as: incorrect" in shown
    assert second == pytest.approx(0.5)
    assert (is_over, is_over_then) == (False, True)
