"""The examples run as their first lines say, on the tiny policy that other tests make too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import REPOSITORY, TINY

pytestmark = pytest.mark.timeout(1800)

STEP = re.compile(
    r"^policy 0: (L1/\w+)(?:, L1/\w+)*: (\d+) answers, \d+ compiled, \d+ correct .* ─▶ policy 1, loss -?\d",
    re.MULTILINE,
)


def run(name: str, *words: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KBRL_")} | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-W", "error::SyntaxWarning", str(REPOSITORY / "examples" / name), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_loop_in_one_file_makes_an_update(policy_cache: Path) -> None:
    said = run("rl_loop.py", "--steps", "1", *TINY, f"cache_path={policy_cache}")
    step = STEP.search(said)
    assert step is not None, said
    assert step[2] == "8"


def test_a_reward_in_a_file_of_its_own_pays_an_update(policy_cache: Path) -> None:
    said = run("own_reward.py", "--steps", "1", *TINY, "batch_size=1", f"cache_path={policy_cache}")
    step = STEP.search(said)
    assert step is not None, said
    assert step[2] == "4"


def test_one_kernel_is_verified_and_timed() -> None:
    said = run("verify_kernel.py")
    stages = [line.split()[:2] for line in said.splitlines()]
    for stage in ("format", "static", "compile", "small_inputs", "full_inputs", "timing"):
        assert [stage, "ok"] in stages
    claim = "proven faster|proven slower|not shown to be faster|nothing is proven, others had the core"
    assert re.search(rf"speedup \d+\.\d+× \(\d+\.\d+ … \d+\.\d+\): ({claim})", said)
