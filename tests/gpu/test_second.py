"""Second implementations on a GPU: the same weights, TF32 off, and sets of which one is in memory at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.crew import rows_of
from benchmarks.verification.second import second

pytestmark = pytest.mark.gpu
PROBLEM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64)

    def forward(self, x):
        return self.norm(self.conv(x)).relu().mean((2, 3))

def get_inputs():
    return [torch.rand(8, 64, SIZE, SIZE)]

def get_init_inputs():
    return []
"""


def test_each_way_is_right_by_every_set(tmp_path: Path) -> None:
    for name, size in (("small", 32), ("large", 1024)):
        (tmp_path / f"{name}.py").write_text(PROBLEM.replace("SIZE", str(size)))
    out = tmp_path / "rows.jsonl"
    found = second(problems=tmp_path, ways=("eager", "reordered", "tf32_off"), device="cuda:0", out=out)
    assert (found["ok"], found["tried"], found["left_out"]) == (True, 6, []), found
    rows = {name.partition("/")[2]: row for name, row in rows_of(out).items()}
    assert all(row["state"] == "right" for row in rows.values()), rows
    assert rows["small eager"]["nearest"] < rows["small tf32_off"]["nearest"]
