"""Each trainer's own loader takes our function and calls it; it never gets a number for the host's faults.

What is not installed is skipped with its name; the signatures are held by the contract tests, which need nothing.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.adapters import areal, openrlhf, slime, trl, verdicts, verl
from kbrl_async.errors import InfraError, ProblemError, UserError
from tests.candidates import affine, elementwise

ANSWERS = {"right": 1.0, "wrong": 0.25}
REFERENCE = "import torch\n"


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Answers with a known worth; `lost` is one whose host fails, `bad` one whose problem does."""
    asked: list[tuple[str, str, str]] = []

    async def known(answer: str, problem: str, options: verdicts.RewardOptions) -> float:
        asked.append((answer, problem, options.preset))
        if "lost" in answer:
            raise InfraError("the sandbox died")
        if "bad" in answer:
            raise ProblemError("the reference fails")
        return ANSWERS[answer.strip()]

    monkeypatch.setattr(verdicts, "reward_from_here", known)
    monkeypatch.delenv(verdicts.SERVER, raising=False)
    return asked


def installed(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs, of their own imports
            return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} can't be imported: {error}")


# ── contracts ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("function", "positional", "named"),
    [
        (
            verl.compute_score,
            (),
            {"data_source", "solution_str", "ground_truth", "extra_info", "reward_router_address"},
        ),
        (trl.kernel_reward, (), {"prompts", "completions", "problem", "completion_ids", "trainer_state", "log_metric"}),
        (slime.custom_rm, ("args", "sample"), {"evaluation"}),
        (areal.reward_fn, ("prompt", "completions", "prompt_ids", "completion_ids"), {"problem", "messages"}),
        (openrlhf.reward_func, ("queries", "prompts", "labels"), set()),
    ],
)
def test_a_function_takes_what_its_trainer_gives(
    function: Callable[..., Any], positional: tuple[str, ...], named: set[str]
) -> None:
    inspect.signature(function).bind(*positional, **dict.fromkeys(named))


def test_those_that_are_awaited_are_coroutine_functions() -> None:
    assert inspect.iscoroutinefunction(verl.compute_score)
    assert inspect.iscoroutinefunction(slime.custom_rm)
    assert not inspect.iscoroutinefunction(areal.reward_fn)


def test_a_fault_of_the_host_is_never_a_number(verified: object) -> None:
    sample = SimpleNamespace(response="lost", label="L1/13")
    for call in (
        lambda: asyncio.run(verl.compute_score("kernels", "lost", "L1/13")),
        lambda: asyncio.run(slime.custom_rm(SimpleNamespace(), sample)),  # type: ignore[arg-type]
        lambda: areal.reward_fn("", "lost", [], [], problem="L1/13"),
        lambda: openrlhf.reward_func(["lost"], [""], ["L1/13"]),
    ):
        with pytest.raises(InfraError, match="the sandbox died"):
            call()
    assert trl.kernel_reward([""] * 4, ["right", "lost", "bad", "wrong"], ["L1/13"] * 4) == [1.0, None, None, 0.25]


def test_slimes_batches_and_options(verified: list[tuple[str, str, str]]) -> None:
    args = SimpleNamespace(kbrl_preset="correct")
    samples = [SimpleNamespace(response=text, label=REFERENCE) for text in ("right", "wrong")]
    assert asyncio.run(slime.custom_rm(args, samples)) == [1.0, 0.25]
    assert {preset for *_, preset in verified} == {"correct"}


# ── the libraries themselves ────────────────────────────────────────────────────────────────────────────────────────


def test_verls_loader_and_reward_manager_call_ours(verified: list[tuple[str, str, str]]) -> None:
    reward = installed("verl.trainer.ppo.reward")
    naive = installed("verl.experimental.reward_loop.reward_manager.naive").NaiveRewardManager
    omegaconf, tensordict = installed("omegaconf"), installed("tensordict")
    path = {"path": "pkg://kbrl_async.adapters.verl", "name": "compute_score", "reward_kwargs": {"preset": "correct"}}
    config = omegaconf.OmegaConf.create({"reward": {"custom_reward_function": path}})
    score = reward.get_custom_reward_fn(config)
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "right" if int(ids[0]) == 7 else "lost")

    async def scored(token: int) -> Any:
        manager = naive.__new__(naive)
        manager.loop, manager.tokenizer = asyncio.get_running_loop(), tokenizer
        naive.__init__(manager, config, tokenizer, score)
        manager.loop = asyncio.get_running_loop()
        batch = tensordict.TensorDict(
            {"responses": torch.tensor([[token, 0]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)},
            batch_size=1,
        )
        rows = {"data_source": "kernels", "reward_model": {"ground_truth": "L1/13"}, "extra_info": {}}
        arrays = {name: installed("numpy").array([value], dtype=object) for name, value in rows.items()}
        data = installed("verl").DataProto(batch=batch, non_tensor_batch=arrays)
        return await manager.run_single(data)

    assert asyncio.run(scored(7))["reward_score"] == 1.0
    assert verified[-1] == ("right", "L1/13", "correct")
    with pytest.raises(InfraError):
        asyncio.run(scored(8))


def test_openrlhfs_executor_loads_our_file(verified: object) -> None:
    agent = installed("openrlhf.utils.agent")
    executor = agent.SingleTurnAgentExecutor(openrlhf.__file__)
    fetched = asyncio.run(executor._fetch_rewards_via_func(["<s>write right"], ["write "], ["L1/13"]))
    assert [float(one["rewards"][0]) for one in fetched] == [1.0]


def test_areals_wrapper_calls_ours_in_its_processes(tmp_path: Path) -> None:
    wrapper = installed("areal.api.reward_api").AsyncRewardWrapper
    reward = installed("areal.utils.dynamic_import").import_from_string("kbrl_async.adapters.areal.reward_fn")

    async def play() -> float:
        called = wrapper(reward, timeout_seconds=60, max_workers=1, max_retries=0)
        found: float = await called("", "no kernel in it", [], [], problem="L1/13", deadline_s=50.0)
        return found

    assert asyncio.run(play()) == 0.0  # the candidate's own fault


def test_slimes_loader_finds_ours() -> None:
    place, _, name = "kbrl_async.adapters.slime.custom_rm".rpartition(".")
    assert getattr(importlib.import_module(place), name) is slime.custom_rm


TRAINING = """
import json, sys, torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, decoders
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from kbrl_async.adapters.trl import kernel_reward
torch.manual_seed(0)
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {token: place for place, token in enumerate(["<pad>", "<eos>", *alphabet])}
core = Tokenizer(models.BPE(vocabulary, []))
core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left")
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(vocabulary), num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
                                     max_position_embeddings=128, **size))
given = []
def worth(prompts, completions, problem, **columns):
    found = kernel_reward(prompts, completions, problem, **columns)
    given.extend(found)
    return [r if r is None else r + 0.1 * len(c) for r, c in zip(found, completions)]
config = GRPOConfig(output_dir=sys.argv[1], max_steps=2, per_device_train_batch_size=4, num_generations=4,
                    max_completion_length=8, report_to=[], use_cpu=True, bf16=False, logging_steps=1,
                    save_strategy="no", learning_rate=0.01)
pairs = [("softmax", "L1/13"), ("tanh", "L1/01_tanh")] * 4
rows = Dataset.from_list([{"prompt": prompt, "problem": problem} for prompt, problem in pairs])
before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
trainer = GRPOTrainer(model=model, reward_funcs=worth, args=config, train_dataset=rows, processing_class=tokenizer)
trainer.train()
after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
print(json.dumps({"steps": trainer.state.global_step, "rewards": given, "moved": float((after - before).abs().max())}))
"""


@pytest.mark.timeout(600)
def test_trl_trains_two_steps_of_a_tiny_model_on_our_rewards(tmp_path: Path) -> None:
    installed("trl"), installed("datasets")
    done = subprocess.run([sys.executable, "-c", TRAINING, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    import json

    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["steps"] == 2
    assert found["rewards"] == [0.0] * 8  # bytes at random hold no kernel: the policy's own fault
    assert found["moved"] > 0


# ── from a service ──────────────────────────────────────────────────────────────────────────────────────────────────


def served(monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, Any]) -> list[dict[str, Any]]:
    """A service that gives these answers in turn, the last again and again; what it was asked."""
    import httpx

    asked, left = [], list(answers)

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.append({**msgspec.json.decode(request.content), "key": request.headers.get("authorization")})
        code, body = left.pop(0) if len(left) > 1 else left[0]
        if code == 0:
            raise httpx.ConnectError("refused")
        return httpx.Response(code, json=body)

    made = httpx.AsyncClient
    monkeypatch.setattr("httpx.AsyncClient", lambda **given: made(transport=httpx.MockTransport(answer), **given))
    monkeypatch.setattr(verdicts, "PAUSE_S", 0.001)
    return asked


OPTIONS = verdicts.RewardOptions(server="http://service", key="k", preset="correct", deadline_s=60.0)


def test_a_service_is_asked_until_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = served(monkeypatch, (0, None), (503, {}), (429, {}), (202, {"reward": None}), (200, {"reward": 0.5}))
    assert asyncio.run(verdicts.reward_of("text", "L1/13", OPTIONS)) == 0.5
    assert len(asked) == 5
    assert asked[-1]["problem"] == "L1/13"
    assert (asked[-1]["preset"], asked[-1]["key"]) == ("correct", "Bearer k")


@pytest.mark.parametrize(
    ("code", "error"), [(422, ProblemError), (400, UserError), (401, UserError), (404, UserError), (503, InfraError)]
)
def test_what_a_service_refuses_is_raised(monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]) -> None:
    served(monkeypatch, (code, {"error": {"cause": "it is so", "cure": "do this"}}))
    options = verdicts.RewardOptions(server="http://service", deadline_s=0.2)
    with pytest.raises(error):
        asyncio.run(verdicts.reward_of("text", REFERENCE, options))


def test_a_service_is_asked_however_late_it_has_become(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded host the client itself may take longer to begin than a short deadline lasts."""
    asked = served(monkeypatch, (200, {"reward": 0.5}))
    options = verdicts.RewardOptions(server="http://service", deadline_s=0.0)
    assert asyncio.run(verdicts.reward_of("text", "L1/13", options)) == 0.5
    assert len(asked) == 1


def test_an_answer_too_long_for_the_service_is_the_policys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    served(monkeypatch, (413, {"error": {"cause": "too long"}}))
    assert asyncio.run(verdicts.reward_of("text", "L1/13", OPTIONS)) == 0.0
    assert (
        asyncio.run(verdicts.reward_of("text", "L1/13", verdicts.RewardOptions("http://service", preset="fork")))
        == -2.0
    )


def test_the_variables_say_what_options_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(verdicts.SERVER, "http://there")
    monkeypatch.setenv(verdicts.PRESET, "kevin")
    assert verdicts.RewardOptions().resolved().server == "http://there"
    assert verdicts.RewardOptions(preset="correct").resolved().preset == "correct"
    assert verdicts.RewardOptions().resolved().preset == "kevin"
    monkeypatch.setenv(verdicts.RULES, "strict")
    assert verdicts.RewardOptions().resolved().rules == "strict"
    assert verdicts.RewardOptions(rules="open").resolved().rules == "open"


def test_rules_are_asked_for_where_they_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = served(monkeypatch, (200, {"reward": 0.5}), (200, {"reward": 0.5}))
    for options in (OPTIONS, msgspec.structs.replace(OPTIONS, rules="strict")):
        asyncio.run(verdicts.reward_of("text", "L1/13", options))
    assert [body.get("rules") for body in asked] == [None, "strict"]
    with pytest.raises(UserError, match="there are no rules 'lax'"):
        asyncio.run(verdicts.reward_of("text", "L1/13", verdicts.RewardOptions(rules="lax")))
    assert verdicts.RewardOptions.among({"rules": "strict"}).rules == "strict"


@pytest.mark.parametrize(("rules", "worth"), [("", 1.0), ("open", 1.0), ("strict", 0.0)])
def test_in_the_trainers_process_they_decide_what_an_answer_may_hold(
    monkeypatch: pytest.MonkeyPatch, rules: str, worth: float
) -> None:
    monkeypatch.delenv(verdicts.SERVER, raising=False)
    answer = f"```python\nimport os\n{elementwise('2 * x[i] + 1')}\n```"
    options = verdicts.RewardOptions(preset="correct", timing=False, device="cpu", rules=rules)
    assert asyncio.run(verdicts.reward_of(answer, affine(), options)) == worth
