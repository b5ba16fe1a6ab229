"""A whole run whose updates and answers come from a Tinker service, learner and sampler killed on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tests.tinker_service", reason="tinker is not installed")
pytestmark = pytest.mark.timeout(1800)


def test_a_run_at_tinker_outlives_its_learner_and_its_sampler(tmp_path: Path, policy_cache: Path) -> None:
    from tests import tinker_demo
    from tests.running import TINY, assert_figures_are_true

    with tinker_demo.service(policy_cache, TINY) as reached:
        run = tinker_demo.killed_on_the_way(tmp_path, policy_cache, [*reached, "max_steps=3"], at=(1, 2))
    tinker_demo.report(run)
    (resumed,) = [line["policy_version"] for line in run.log("learner") if line["event"] == "resumed"]
    assert resumed in (1, 2), "it may have made the second update before it was killed"
    assert run.summary()["max_staleness"] <= 2
    assert tinker_demo.KEY not in run.output.read_text()
    assert all(tinker_demo.KEY not in path.read_text(errors="replace") for path in (run.path / "logs").iterdir())
    assert tinker_demo.KEY not in (run.path / "config.yaml").read_text()
    assert_figures_are_true(run)
