"""Prompt options: examples of each backend, templates of one's own, chat templates, and what is told of the machine."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
import torch

from kbrl_async.errors import ConfigError
from kbrl_async.kernels.backends import backend as load_backend
from kbrl_async.kernels.backends import backends
from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.lab.small_policy.specs import SPECS
from kbrl_async.rollouts.prompts import TokenBudget, extract, feedback_of, hardware, render_prompt, render_turn
from kbrl_async.rollouts.prompts.chat import PLAIN, chat_of
from kbrl_async.rollouts.prompts.hardware import gpu_facts, of_cpu
from protocols.records import Candidate, Fault, Verdict
from tests.suite import suite
from tests.unit.lab.small_policy.cuda_on_cpu import compiled, module_of

PROBLEM = suite()[0]
INPUTS = {0: (torch.randn(5, 33), torch.randn(5, 33)), 1: (torch.randn(5, 33),), 2: (torch.randn(5, 33),)}


def model(source: str, name: str) -> torch.nn.Module:
    space: dict[str, object] = {}
    exec(source, space)
    made = space[name]
    assert isinstance(made, type)
    return made(5) if "__init__(self, rows)" in source else made()


def references() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [model(shot.reference, "Model") for shot in load_backend("c").shots]


@pytest.mark.parametrize("option", ["one_shot", "few_shot"])
@pytest.mark.parametrize("backend", backends())
def test_examples_stand_before_the_contract_and_the_problem_last(option: str, backend: str) -> None:
    prompt = render_prompt(option, PROBLEM, backend)
    assert prompt.endswith(render_prompt("zero_shot", PROBLEM, backend))
    assert prompt.count("Its kernel") == {"one_shot": 1, "few_shot": 3}[option]
    assert all(shot.kernel in prompt for shot in load_backend(backend).shots[: prompt.count("Its kernel")])


@pytest.mark.parametrize("backend", backends())
def test_every_example_could_be_an_answer(backend: str) -> None:
    for shot in load_backend(backend).shots:
        assert extract(f"```python\n{shot.kernel}```\n").source == shot.kernel
        refused = load_backend(backend).check(Candidate(shot.kernel, backend))
        assert refused is None, refused


def test_the_examples_in_c_are_right() -> None:
    for number, (shot, reference) in enumerate(zip(load_backend("c").shots, references(), strict=True)):
        made = model(shot.kernel, "ModelNew")
        made.load_state_dict(reference.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(made(*INPUTS[number]), reference(*INPUTS[number]))


def test_the_examples_in_cuda_are_right_and_are_those_of_load_inline_too(tmp_path: Path) -> None:
    library = compiled([shot.kernel for shot in load_backend("cuda-nvrtc").shots], tmp_path)
    for number, (shot, reference) in enumerate(zip(load_backend("cuda-nvrtc").shots, references(), strict=True)):
        made = module_of(shot.kernel, number, library)(*((5,) if number == 2 else ()))
        made.load_state_dict(reference.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(made(*INPUTS[number]), reference(*INPUTS[number]))
        device = re.search(r"__global__.*?^}", shot.kernel, re.DOTALL | re.MULTILINE)
        assert device is not None
        assert device[0] in load_backend("cuda").shots[number].kernel


def test_no_example_is_a_problem_of_the_suite() -> None:
    bodies = {ast.dump(ast.parse(shot.reference).body[-1].body[-1]) for shot in load_backend("c").shots}  # type: ignore[attr-defined]
    for problem in suite():
        found = next(node for node in ast.parse(problem.source).body if isinstance(node, ast.ClassDef))
        assert ast.dump(found.body[-1]) not in bodies
    assert len(SPECS) == len(suite(1, 2, 3))


def words(text: str) -> int:
    return len(text.split())


def test_a_budget_drops_examples_one_by_one_and_nothing_else() -> None:
    whole, bare = (words(render_prompt(option, PROBLEM, "cuda-nvrtc")) for option in ("few_shot", "zero_shot"))
    seen = []
    for limit in range(bare, whole + 1):
        prompt = render_prompt("few_shot", PROBLEM, "cuda-nvrtc", budget=TokenBudget(limit, words))
        assert words(prompt) <= limit
        assert prompt.endswith(render_prompt("zero_shot", PROBLEM, "cuda-nvrtc"))
        seen.append(prompt.count("Its kernel"))
    assert sorted(set(seen)) == [0, 1, 2, 3]
    assert seen == sorted(seen)


def test_a_refinement_drops_its_examples_before_anything_of_its_feedback() -> None:
    feedback = feedback_of(Verdict(Fault.COMPILE_ERROR, message="error 1\nerror 2"), None, "KERNEL\n", "c")
    whole = render_turn("few_shot", PROBLEM, feedback)
    tight = render_turn("few_shot", PROBLEM, feedback, "c", TokenBudget(words(whole) - 1, words))
    assert whole.count("Its kernel") == 3
    assert tight.count("Its kernel") == 2
    assert "error 2" in tight


def test_a_template_of_ones_own_may_differ_by_backend(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('template = "{contract}{hardware}"\n[backends.triton]\ntemplate = "TRITON {x}\\n{source}"\n')
    option = f"custom:{path}"
    assert render_prompt(option, PROBLEM, "c", "A FAST MACHINE").endswith("A FAST MACHINE")
    assert render_prompt(option, PROBLEM, "triton") == f"TRITON {{x}}\n{PROBLEM.source}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("template = 'no problem here'", "does not show the problem"),
        ("[backends.c]\ntemplate = '{source}'", "no template for backend=triton"),
        ("templat = '{source}'", "no file of prompts"),
        ("template = ", "no file of prompts"),
    ],
)
def test_what_is_wrong_with_a_file_of_prompts_is_said(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        render_prompt(f"custom:{path}", PROBLEM, "triton")


def test_a_problem_that_holds_a_name_in_braces_is_shown_as_it_is() -> None:
    odd = msgspec.structs.replace(PROBLEM, source="# {hardware} {contract}\n")
    assert render_prompt("zero_shot", odd, "c", "H").endswith("# {hardware} {contract}\n```\n")


def test_the_machine_is_told_before_the_problem_and_never_in_compact_prompts() -> None:
    prompt = render_prompt("zero_shot", PROBLEM, "c", "CPU: one core of a 6502.")
    assert prompt.index("6502") < prompt.index("The module to replace")
    assert "6502" not in render_prompt("compact", PROBLEM, "c", "CPU: one core of a 6502.")


def test_the_figures_of_a_gpu_are_those_of_its_driver() -> None:
    h100 = {16: 132, 13: 1_980_000, 36: 2_619_000, 37: 5120, 38: 50 << 20, 75: 9, 76: 0, 97: 227 << 10, 39: 2048}
    text = gpu_facts("NVIDIA H100", 80 << 30, lambda number: h100.get(number, 0)).text()
    assert "132 SMs at 1980 MHz" in text
    assert "80 GiB of memory at 3352 GB/s" in text
    assert "227 KiB of shared memory" in text


def test_a_host_without_a_driver_or_with_a_sick_one_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(device=lambda index: (index, "GPU", 2 << 30), device_attribute=lambda which, device: which)
    monkeypatch.setattr(hardware, "driver", lambda: gpu)
    assert hardware.of_gpu().startswith("GPU: GPU, compute capability 75.76, 16 SMs")
    for error in (OSError("no library"), CudaError("cuInit", 100, "CUDA_ERROR_NO_DEVICE")):
        monkeypatch.setattr(gpu, "device", Mock(side_effect=error))
        assert hardware.of_gpu() == ""


def test_the_figures_of_a_cpu_are_those_of_proc_and_sys(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Some CPU\nflags\t\t: fpu avx2 sse\n")
    (tmp_path / "index2").mkdir()
    (tmp_path / "index2" / "size").write_text("2048K\n")
    assert of_cpu(cpuinfo, tmp_path) == "CPU: one core of Some CPU, AVX2, 2048 KiB of L2."
    assert of_cpu(tmp_path / "none", tmp_path) == ""


class Tokenizer:
    """The part of a chat model's tokenizer that is asked."""

    chat_template = "…"

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        enable_thinking: bool = True,
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        thought = "<think>\n" if enable_thinking else "<think>\n\n</think>\n\n"
        return f"<user>{messages[0]['content']}</user><assistant>{thought}"


def test_a_chat_template_is_applied_and_says_whether_it_opens_a_thought() -> None:
    assert chat_of(Tokenizer(), "zero_shot", "auto", "auto").render("Hi") == "<user>Hi</user><assistant><think>\n"
    assert chat_of(Tokenizer(), "zero_shot", "auto", "auto").opens_thought
    assert not chat_of(Tokenizer(), "zero_shot", "auto", "off").opens_thought


def test_compact_prompts_and_plain_tokenizers_get_no_template() -> None:
    assert chat_of(Tokenizer(), "compact", "auto", "auto") is PLAIN
    assert chat_of(Tokenizer(), "compact", "on", "auto") is not PLAIN
    assert chat_of(Tokenizer(), "zero_shot", "off", "auto") is PLAIN
    assert chat_of(object(), "zero_shot", "auto", "auto") is PLAIN
    with pytest.raises(ConfigError, match="no chat template"):
        chat_of(object(), "zero_shot", "on", "auto")
