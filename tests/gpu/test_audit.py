"""Problems audited on a GPU: `kbrl problems audit --device cuda`."""

from __future__ import annotations

from kbrl_async.kernels.audit import Limits, audit_problems
from kbrl_async.kernels.problems import load_problems
from kbrl_async.kernels.problems.audit_file import CLEAN, FLAGGED
from protocols.records import Problem

ROUNDING_ERRORS = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)).mean(-1)

def get_inputs():
    return [torch.randn(512, 4096)]

def get_init_inputs():
    return []
"""
RANDOM = ROUNDING_ERRORS.replace("(x - x.mean(-1, keepdim=True)).mean(-1)", "torch.nn.functional.dropout(x, 0.5)")


def test_sound_problems_are_clean_and_others_are_flagged_for_what_is_wrong() -> None:
    sound = [one for one in load_problems(levels=[1, 4], shapes="gpu") if one.name in ("13_softmax", "01_cumsum")]
    others = [Problem(f"L1/9{n}_x", 1, f"9{n}_x", source) for n, source in enumerate((ROUNDING_ERRORS, RANDOM))]
    audit = audit_problems([*sound, *others], Limits("cuda:0", 60.0, 16.0), suite="test", shapes="gpu", jobs=2)
    found = {one.problem_id: one for one in audit.problems}
    assert len(sound) == 2
    for one in sound:
        assert (found[one.problem_id].status, found[one.problem_id].ours) == (CLEAN, ""), found[one.problem_id]
        assert {trial.tolerance for trial in found[one.problem_id].trials} >= {"kernelbench", "ours"}
    small, random = (found[one.problem_id] for one in others)
    assert small.status == random.status == FLAGGED
    assert "zeros@kernelbench" in small.flags
    assert "random" in random.flags
    assert audit.device == "cuda:0"
