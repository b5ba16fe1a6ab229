"""Every rule of the bench says what would pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kbrl_async.kernels import verify
from kbrl_async.kernels.timing import roofline
from kbrl_async.kernels.verify.report import RULE_HINTS

RAISED = re.compile(
    r'(?:CandidateFault|_fault|Finding)\((?:[^()]|\([^()]*\))*?"([a-z]+_?[a-z_]*)"(?:, self)?(?:,[^()]*)?\)'
)


def rules() -> set[str]:
    texts = [path.read_text() for path in Path(verify.__file__).parent.rglob("*.py")]
    return {rule for text in texts for rule in RAISED.findall(text)} | {roofline.RULE}


@pytest.mark.parametrize("rule", sorted(rules()))
def test_every_rule_has_a_cure(rule: str) -> None:
    assert RULE_HINTS[rule].endswith(".")


def test_they_are_found() -> None:
    assert {"shape", "decoy_kernel", "slot_batched", "stray_write", "impossible_time"} <= rules()
