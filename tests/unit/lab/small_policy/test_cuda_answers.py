"""Answers in CUDA: they compile for a GPU, and what careful authors write is right, run thread by thread on the CPU."""

from __future__ import annotations

import ctypes
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.errors import ConfigError
from kbrl_async.kernels.backends.nvrtc import compiler as nvrtc
from kbrl_async.kernels.backends.nvrtc.build import NvrtcBackend, kernels_of
from kbrl_async.lab.small_policy.author import CAREFUL, SLOW, Author, Habits
from kbrl_async.lab.small_policy.corpus import examples
from kbrl_async.lab.small_policy.languages import respond
from kbrl_async.lab.small_policy.specs import SPECS
from kbrl_async.rollouts.prompts import extract
from protocols.records import Candidate
from tests.suite import suite
from tests.unit.lab.small_policy.cuda_on_cpu import compiled, module_of

SUITE = {problem.problem_id: problem for problem in suite(1, 2, 3, shapes="gpu")}
STYLES = {"fast": CAREFUL, "slow": SLOW, "mixed": msgspec.structs.replace(CAREFUL, fast=0.5)}
SMALL = {
    "rows": 3, "cols": 70, "batch": 67, "inputs": 37, "outputs": 70, "channels": 3, "size": 10, "width": 20,
    "hidden": 33, "length": 33, "dim": 8,
}  # fmt: skip
"""Sizes that leave tails in every block and tile."""
CASES = [(key, style) for key in sorted(SPECS) for style in STYLES]


def styled(number: int) -> str:
    """The answer of a case. Each has a seed of its own, so that mixed styles have all forms."""
    key, style = CASES[number]
    return answer(key, STYLES[style], number)


def answer(key: str, habits: Habits, seed: int = 1) -> str:
    return extract(respond(SPECS[key], Author(random.Random(seed), habits), "cuda-nvrtc")).source


def shrunk(source: str) -> dict[str, Any]:
    """The problem's names at small sizes."""
    text = re.sub(r"^(\w+) = \d+", lambda found: f"{found[1]} = {SMALL[found[1]]}", source, flags=re.MULTILINE)
    space: dict[str, Any] = {}
    exec(text, space)
    return space


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled([styled(number) for number in range(len(CASES))], Path(tmp_path_factory.mktemp("kernels")))


@pytest.mark.parametrize(("key", "style"), CASES)
def test_the_careful_answer_computes_what_the_module_does(library: ctypes.CDLL, key: str, style: str) -> None:
    space = shrunk(SUITE[key].source)
    torch.manual_seed(0)
    reference = space["Model"](*space["get_init_inputs"]())
    number = CASES.index((key, style))
    made = module_of(styled(number), number, library)(*space["get_init_inputs"]())
    made.load_state_dict(reference.state_dict())
    inputs = space["get_inputs"]()
    with torch.no_grad():
        expected, got = reference(*inputs), made(*inputs)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "key", ["L2/02_add_softplus_scale", "L2/10_residual_layer_norm", "L2/20_linear_sigmoid_residual"]
)
def test_answers_pass_the_static_checks_and_compile_for_a_gpu(key: str) -> None:
    for habits in STYLES.values():
        source = answer(key, habits)
        assert NvrtcBackend().check(Candidate(source, "cuda-nvrtc")) is None
        kernels = kernels_of(source)
        assert nvrtc.compile_source(kernels[0].source, [kernel.name for kernel in kernels], "sm_90").cubin


@pytest.mark.parametrize("slip", ["bound", "formula", "index", "start", "argument", "name", "syntax"])
def test_a_slip_changes_the_answer(slip: str) -> None:
    sloppy = msgspec.structs.replace(CAREFUL, **{slip: 1.0})
    changed = [key for key in SPECS if answer(key, sloppy) != answer(key, CAREFUL)]
    assert len(changed) > len(SPECS) / 4


def test_a_missing_semicolon_does_not_compile() -> None:
    source = answer("L1/01_tanh", msgspec.structs.replace(CAREFUL, syntax=1.0))
    with pytest.raises(nvrtc.CompileError):
        nvrtc.compile_source(kernels_of(source)[0].source, ["run"], "sm_90")


def test_a_corpus_in_cuda_has_the_same_problems_and_other_answers() -> None:
    in_c, in_cuda = (
        list(examples(4, 30, habits=CAREFUL, prompt_option="compact", suite_share=1.0, backend=backend))
        for backend in ("c", "cuda-nvrtc")
    )
    assert in_c[0].prompt == in_cuda[0].prompt
    assert all("c_kernel" in e.answer for e in in_c)
    assert all("cuda_kernel" in e.answer and "__global__" in e.answer for e in in_cuda)


def test_a_backend_that_nobody_teaches_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="It learns c, cuda-nvrtc"):
        respond(SPECS["L1/01_tanh"], Author(random.Random(0), CAREFUL), "triton")
