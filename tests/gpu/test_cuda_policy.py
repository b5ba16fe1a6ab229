"""What the small policy is taught in CUDA is right on a real GPU, at the suite's GPU shapes."""

from __future__ import annotations

import random

import pytest

from kbrl_async.kernels.problems import load_suite
from kbrl_async.lab.small_policy.author import CAREFUL, SLOW, Author, Habits
from kbrl_async.lab.small_policy.languages import respond
from kbrl_async.lab.small_policy.specs import SPECS
from kbrl_async.rollouts.prompts import extract
from protocols.records import Fault
from tests.gpu.conftest import Evaluate

pytestmark = pytest.mark.gpu
SUITE = {problem.problem_id: problem for problem in load_suite(shapes="gpu")}
CHECKED = (
    *sorted(key for key in SPECS if key.startswith("L1/")),
    *("L2/02_add_softplus_scale", "L2/09_mask_softmax_scale", "L2/20_linear_sigmoid_residual", "L2/21_conv_norm_relu"),
    *("L3/03_swiglu", "L3/05_causal_attention"),
)
"""All are run thread by thread on the CPU (tests/unit/lab/small_policy); these also here, in less than a minute."""
SLOW_TOO = (
    *("L1/13_softmax", "L1/18_max", "L1/22_max_pool", "L2/21_conv_norm_relu"),
    pytest.param("L1/20_linear", marks=pytest.mark.alone),  # beside others a call takes longer than its deadline
)


def written(key: str, habits: Habits) -> str:
    return extract(respond(SPECS[key], Author(random.Random(1), habits), "cuda-nvrtc")).source


@pytest.mark.parametrize("key", CHECKED)
def test_the_careful_answer_is_correct(judge: Evaluate, key: str) -> None:
    verdict = judge(SUITE[key].source, written(key, CAREFUL), "cuda-nvrtc").verdict
    assert (verdict.fault, verdict.passed) == (Fault.OK, verdict.total), verdict.message


@pytest.mark.parametrize("key", SLOW_TOO)
def test_the_slow_answer_is_correct_too(judge: Evaluate, key: str) -> None:
    verdict = judge(SUITE[key].source, written(key, SLOW), "cuda-nvrtc").verdict
    assert (verdict.fault, verdict.passed) == (Fault.OK, verdict.total), verdict.message


def test_a_fast_normalisation_is_faster_than_a_slow_one(judge: Evaluate) -> None:
    key = "L1/15_layer_norm"
    reports = [judge(SUITE[key].source, written(key, habits), "cuda-nvrtc", timing=True) for habits in (CAREFUL, SLOW)]
    fast, slow = (report.timing for report in reports)
    assert fast is not None
    assert slow is not None
    assert fast.lo > slow.hi
