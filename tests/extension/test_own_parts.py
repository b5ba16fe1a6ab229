"""A user's own parts, from outside of the project, train a policy: each is named in a setting and nowhere else.

`kbrl_example_parts` is such a package, one file a part; beside it lies what an installer would write of its entry
points. Two runs share the parts, so that the test is over soon. docs/howto-extend.md shows the files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kbrl_async.lab.small_policy.configured import small_options
from kbrl_async.lab.small_policy.making import ensure_small_policy
from kbrl_async.runs.archive.archive import FILE, ArchiveReader
from kbrl_async.runs.config import load
from tests.extension.kbrl_example_parts.problems import OPERATORS
from tests.extension.kbrl_example_parts.reward import TOKENS
from tests.running import REPOSITORY, TINY, Run

pytestmark = pytest.mark.timeout(1800)

HERE = Path(__file__).parent
PARTS = "kbrl_example_parts"
SHORT = ("batch_size=1", "group_size=3", "max_steps=1", "eval_samples=0", "learner.epochs=1", "learner.minibatches=1")
IMPORTABLE = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(HERE)])}
"""As after `pip install kbrl-example-parts`."""
REFERENCE = """import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.sinh(x) * 2.5
"""
KERNEL = """import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = c_kernel("void twofold(const float *x, float *y, long n) "
                               "{ for (long i = 0; i < n; i++) y[i] = 2.5f * sinhf(x[i]); }", "twofold")

    def forward(self, x):
        y = torch.empty_like(x)
        self.kernel(x, y, x.numel())
        return y
"""


@contextmanager
def ended(folder: Path, cache: Path, *settings: str, **environment: str) -> Iterator[tuple[Run, ArchiveReader]]:
    run = Run(folder, cache, *SHORT, *settings, environment={**IMPORTABLE, **environment})
    try:
        assert run.wait() == 0, run.tail()
        with ArchiveReader(run.path / FILE) as archive:
            yield run, archive
    finally:
        run.close()


def test_parts_named_by_package_and_object_train_a_policy(tmp_path: Path, policy_cache: Path) -> None:
    small = ensure_small_policy(policy_cache, small_options(load(overrides=[*TINY])))
    asked = tmp_path / "asked"
    settings = (
        f"model_name={small}",
        "prompt.option=compact",
        f"loss={PARTS}.loss:successes",
        f"corrections={PARTS}.correction:every_second",
        f"advantage={PARTS}.advantage:over_the_median",
        f"reward.preset={PARTS}.reward:TERSE",
        f"problems={PARTS}.problems:chains",
        f"backend={PARTS}.backend:PLAIN_C",
        f"sampler.engine={PARTS}.engine:start",
    )
    with ended(tmp_path, policy_cache, *settings, EXAMPLE_PARTS_ASKED=str(asked)) as (run, archive):
        assert run.summary()["updates"] == 1
        rows = list(archive.rows())
        trained = [row for row in rows if row.trained_on is not None]
        (update,) = archive.updates()
        records = [record for row in rows if (record := archive.record(row.task_id)) is not None]
    assert {row.problem_id for row in rows} <= {f"L1/{a}_{b}" for a in OPERATORS for b in OPERATORS}
    assert {record.request.backend for record in records} == {f"{PARTS}.backend:PLAIN_C"}
    assert not any("#pragma" in r.source for r in records if r.build is not None and r.build.fault == "ok")
    assert all(row.reward == pytest.approx(row.correct + max(0, 1 - row.tokens / TOKENS)) for row in trained)
    assert sorted(row.advantage or 0.0 for row in trained)[1] == 0.0, "of three, one is the median"
    unpaid = sum(row.tokens for row in trained if not (row.advantage or 0.0) > 0)
    assert update.metrics["dropped_share"] == pytest.approx(unpaid / sum(row.tokens for row in trained), abs=1e-5)
    assert update.metrics["masked_share"] == pytest.approx(0.5, abs=0.01)
    assert len(asked.read_text().splitlines()) >= len(trained) == 3


def test_an_embedder_of_ones_own_and_a_loss_by_its_entry_point_train_a_policy(
    tmp_path: Path, policy_cache: Path
) -> None:
    kernels, index = tmp_path / "kernels", tmp_path / "index"
    kernels.mkdir()
    (kernels / "scale.py").write_text(REFERENCE)
    (kernels / "scale_kernel.py").write_text(KERNEL)
    words = ("index", "build", str(kernels), "--output", str(index), "--model", f"{PARTS}.embedder:Words")
    command = [sys.executable, "-m", "kbrl_async", *words]
    subprocess.run(command, env={**os.environ, **IMPORTABLE}, check=True, capture_output=True, timeout=400)
    settings = (
        "prompt.option=raicl",
        f"prompt.index={index}",
        f"prompt.embedder={PARTS}.embedder:Words",
        "sft.shot_share=0",  # the tiny policy of the other tests
        f"reward.preset={PARTS}.reward:TERSE",  # so that no group is all alike, whatever it writes
        "loss=example_loss",
    )
    with ended(tmp_path, policy_cache, *settings) as (run, archive):
        assert run.summary()["updates"] == 1
        records = [record for row in archive.rows() if (record := archive.record(row.task_id)) is not None]
    assert json.loads((index / "manifest.json").read_text())["embedder"] == f"{PARTS}.embedder:Words"
    assert all(record.request.examples for record in records)
    assert "void twofold" in records[0].request.prompt
