"""Tokens per second, model-FLOP utilisation and memory of one optimiser step over a group, against TRL's GRPO step on
the same shape, tokens and adapter in the same session. Weights and tokens are random. One JSON line last.

Usage: `python benchmarks/learner.py --shape 7b --trl --ours --shared-prompt [--seconds S] [--prompt-tokens P]`
and on several GPUs `torchrun --nproc-per-node 2 benchmarks/learner.py --shape 7b --ours`.

What is counted: all tokens of the group's sequences, prompts included, over the wall time of forward, loss, backward,
clipping and AdamW, the best of the measured steps and their median. `--shared-prompt` computes the group's prompt once
and still counts it for every sequence: its gain stands apart from the plain figure, which shares nothing.

Ours: fused kernels, one sequence a microbatch, as little computed again as `--memory-gb` allows, PPO clip, entropy and
log-ratio metrics as in a run; no host sync between microbatches (CUDA's debug mode makes one an error).
TRL: `GRPOTrainer.train()` with its inputs given instead of generated: one sequence a device batch, gradients
accumulated over the group, bf16, its fused LM head, gradient checkpointing (`--trl-no-checkpointing` goes without, far
over the memory of ours), SDPA attention, `beta=0`, the same peft adapter, fused AdamW.
"""

from __future__ import annotations

import argparse
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from kbrl_async.learning import efficiency
from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.forward_backward import Fused
from kbrl_async.learning.fused.attention import fastest
from kbrl_async.learning.policies.models import wrap_lora
from kbrl_async.learning.settings import Learner
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs.config import Config
from protocols.records import TrainGroup, TrainSample

SHAPES: dict[str, dict[str, Any]] = {
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    },
}
RANK = 32
TEMPERATURE = 1.0


def say(line: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(line, file=sys.stderr, flush=True)


def build(asked: argparse.Namespace) -> torch.nn.Module:
    """Made on the device: 7 billion random numbers on a CPU would take minutes."""
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[asked.shape], max_position_embeddings=32768, rope_theta=1e6)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if asked.device != "cpu" else torch.float32)
    try:
        with torch.device(asked.device):
            model: torch.nn.Module = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def group(asked: argparse.Namespace) -> list[TrainGroup]:
    generator = torch.Generator().manual_seed(1)
    vocabulary = SHAPES[asked.shape]["vocab_size"]

    def tokens(count: int) -> list[int]:
        return torch.randint(0, vocabulary, (count,), generator=generator).tolist()

    prompt, length = tokens(asked.prompt_tokens), asked.length - asked.prompt_tokens
    guess = [-float(torch.tensor(vocabulary).log())] * length  # about what a random model gives
    samples = [
        TrainSample(f"g.r{i}", prompt, tokens(length), guess, 1.0 if i % 2 else -1.0, 0.0, 0)
        for i in range(asked.group)
    ]
    return [TrainGroup("g", "p", 1, samples)]


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure(name: str, step: Callable[[], object], asked: argparse.Namespace) -> dict[str, float]:
    """The first step (plans, compilation) is not counted; then as many as fit in the time, at least two."""
    say(f"{name}: first step …")
    wait(asked.device)
    began = time.perf_counter()
    step()
    wait(asked.device)
    say(f"{name}: first step {time.perf_counter() - began:.1f} s")
    if asked.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    while len(seconds) < 2 or sum(seconds) + seconds[-1] < asked.seconds:
        began = time.perf_counter()
        step()
        wait(asked.device)
        seconds.append(time.perf_counter() - began)
        say(f"{name}: step {len(seconds)} {seconds[-1]:.3f} s, {asked.group * asked.length / seconds[-1]:.0f} tokens/s")
    return report(seconds, asked)


def report(seconds: list[float], asked: argparse.Namespace) -> dict[str, float]:
    tokens = asked.group * asked.length
    return {
        "tokens_per_s": round(tokens / statistics.median(seconds), 1),
        "tokens_per_s_best": round(tokens / min(seconds), 1),
        "steps": len(seconds),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if asked.device != "cpu" else 0.0,
    }


def strict(trainer: Trainer) -> None:
    """From now on a host sync between microbatches is an error."""
    gradients = trainer._gradients

    @functools.wraps(gradients)
    def guarded(*arguments: Any) -> list[torch.Tensor]:
        with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            return gradients(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer._gradients = guarded  # type: ignore[method-assign]


def ours(asked: argparse.Namespace, share: bool) -> dict[str, Any]:
    found = measured_ours(asked, share)
    free(asked)
    return found


def measured_ours(asked: argparse.Namespace, share: bool) -> dict[str, Any]:
    model = wrap_lora(build(asked), RANK)
    learner = Learner(
        epochs=1,
        minibatches=1,
        negative_scale=1.0,
        kernels="fused",
        share_prompts=share,
        token_budget=asked.microbatch_tokens or asked.length,
        memory_gb=asked.memory_gb if asked.device != "cpu" else 0.0,
    )
    ranks = ProcessGroup(torch.device(asked.device)) if "RANK" in os.environ else None
    settings = Config(loss="grpo", learning_rate=1e-6, learner=learner)
    trainer = Trainer(model, settings, asked.device, process_group=ranks)
    if ranks is not None and ranks.rank:
        ranks.follow(trainer)
        ranks.close()
        sys.exit(0)
    groups = group(asked)
    name = "ours, shared prompt" if share else "ours"
    trainer.step(groups, TEMPERATURE)  # with plans of attention and compilation of kernels, which may wait
    if asked.device != "cpu":
        strict(trainer)
    if asked.profile:
        profiled(lambda: trainer.step(groups, TEMPERATURE))
    found: dict[str, Any] = measure(name, lambda: trainer.step(groups, TEMPERATURE), asked)
    assert isinstance(trainer.passes, Fused)
    kept, whole = trainer.passes.plan(learner.token_budget)
    found["layers"] = {"all": SHAPES[asked.shape]["num_hidden_layers"], "keep_everything": kept, "keep_most": whole}
    found["no_host_sync"] = asked.device != "cpu"
    if asked.device != "cpu":
        found["attention"] = attention_of(asked)
    if ranks is not None:
        found["processes"] = ranks.size
        ranks.close()
    return found


def profiled(step: Callable[[], object]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    say(found.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=90))


def attention_of(asked: argparse.Namespace) -> str:
    shape = SHAPES[asked.shape]
    heads, kv = shape["num_attention_heads"], shape["num_key_value_heads"]
    length = 1 << max(9, (asked.length - 1).bit_length())
    device = torch.device("cuda", torch.cuda.current_device())
    return fastest(heads, kv, shape["hidden_size"] // heads, length, torch.bfloat16, device)


def free(asked: argparse.Namespace) -> None:
    import gc

    gc.collect()
    if asked.device != "cpu":
        torch.cuda.empty_cache()


# ── TRL ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules for what TRL imports and the step does not use, where it is not installed."""

    def __init__(self, *names: str) -> None:
        self.missing = [name for name in names if importlib.util.find_spec(name) is None]
        sys.meta_path.append(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self.missing:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__version__ = "0"  # type: ignore[attr-defined]

        def invented(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            made = type(attribute, (), {})
            setattr(module, attribute, made)  # one class for everybody who asks
            return made

        module.__getattr__ = invented  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prompts() -> Any:
    """As many as TRL's sampler asks for; the inputs are given later."""
    from datasets import Dataset

    rows = [{"prompt": "x"}] * 4096
    if hasattr(Dataset, "from_list"):
        return Dataset.from_list(rows)

    class Rows(Dataset):  # type: ignore[misc]
        column_names = ("prompt",)
        features: dict[str, str] = {}  # noqa: RUF012

        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> dict[str, str]:
            return rows[index]

        def remove_columns(self, _: Any) -> Any:
            return self

    return Rows()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"x": 0, "<end>": 1}, unk_token="x"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>")


def trl(asked: argparse.Namespace) -> dict[str, Any]:
    import transformers

    missing = StandIn("datasets", "pandas", "pyarrow").missing
    import trl as library
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    samples = group(asked)[0].samples

    class Step(GRPOTrainer):  # type: ignore[misc]
        def _send_telemetry(self) -> None:
            """There may be no network."""

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            sample = samples[self._step % len(samples)]
            place = self.accelerator.device
            prompt, completion = (torch.tensor([ids], device=place) for ids in (sample.prompt_ids, sample.token_ids))
            total = torch.tensor(float(sum(len(s.token_ids) for s in samples)), device=place)
            return {
                "prompt_ids": prompt,
                "prompt_mask": torch.ones_like(prompt),
                "completion_ids": completion,
                "completion_mask": torch.ones_like(completion),
                "advantages": torch.tensor([sample.advantage], device=place),
                "num_items_in_batch": total,
            }

    seconds: list[float] = []
    began = [0.0]

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait(asked.device)
            began[0] = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            wait(asked.device)
            spent = time.perf_counter() - began[0]
            say(f"trl: step {state.global_step} {spent:.3f} s, {asked.group * asked.length / spent:.0f} tokens/s")
            if state.global_step > 1:
                seconds.append(spent)
            elif asked.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            if len(seconds) >= 2 and sum(seconds) + spent >= asked.seconds:
                control.should_training_stop = True
            return control

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=asked.group,
            num_generations=asked.group,
            max_completion_length=asked.length - asked.prompt_tokens,
            bf16=asked.device != "cpu",
            use_cpu=asked.device == "cpu",
            gradient_checkpointing=not asked.trl_no_checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            beta=0.0,
            learning_rate=1e-6,
            optim="adamw_torch_fused" if asked.device != "cpu" else "adamw_torch",
            max_steps=1000,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        adapter = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        trainer = Step(
            model=build(asked).train(),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=prompts(),
            processing_class=tokenizer(),
            peft_config=adapter,
            callbacks=[Clock()],
        )
        trainer.train()
    found: dict[str, Any] = report(seconds, asked)
    found["version"], found["stood_in_for"] = library.__version__, missing
    found["gradient_checkpointing"] = not asked.trl_no_checkpointing
    del trainer
    free(asked)
    return found


# ── the whole ─────────────────────────────────────────────────────────────────────────────────────────────────────


def floors(asked: argparse.Namespace, peak: float) -> dict[str, Any]:
    """What the arithmetic alone allows on this card, tokens/s, at the rate of a large matrix product measured here."""
    config = Qwen2Config(**SHAPES[asked.shape])
    scored = 1 - asked.prompt_tokens / asked.length
    needed = efficiency.lora_flops_per_token(config, RANK, asked.length, scored)
    again = efficiency.lora_flops_per_token(config, RANK, asked.length, scored, recomputed=True)
    return {
        "peak_tflops": round(peak / 1e12, 2),
        "gflops_per_token": round(needed / 1e9, 3),
        "gflops_per_token_recomputed": round(again / 1e9, 3),
        "tokens_per_s": round(peak / needed, 1),
        "tokens_per_s_recomputed": round(peak / again, 1),
    }


def machine(device: str) -> str:
    where = platform.processor() or platform.machine() if device == "cpu" else torch.cuda.get_device_name()
    return f"{where}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--shared-prompt", action="store_true")
    parser.add_argument("--trl", action="store_true")
    parser.add_argument("--trl-no-checkpointing", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measured steps, for each of them")
    parser.add_argument("--length", type=int, default=0, help="tokens of a sequence; 0: 8192, tiny: 256")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="0: a quarter of the length")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--microbatch-tokens", type=int, default=0, help="ours; 0: one sequence")
    parser.add_argument("--memory-gb", type=float, default=40.0, help="ours: most to hold, 10^9 bytes")
    parser.add_argument("--profile", action="store_true", help="ours: the dearest kernels, to stderr")
    asked = parser.parse_args()
    asked.length = asked.length or (256 if asked.shape == "tiny" else 8192)
    asked.prompt_tokens = asked.prompt_tokens or asked.length // 4
    if "RANK" in os.environ and asked.device == "cuda":
        asked.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(asked.device)
    if asked.device == "cpu":
        torch.set_num_threads(1)
    peak = efficiency.measured_peak(torch.device(asked.device), asked.device != "cpu")
    say(f"{machine(asked.device)}: {peak / 1e12:.3g} TFLOP/s")
    floor = floors(asked, peak)
    out: dict[str, Any] = {"benchmark": "learner", "machine": machine(asked.device), "shape": asked.shape}
    out |= {"sequence": asked.length, "prompt": asked.prompt_tokens, "group": asked.group, "floor": floor}
    if asked.trl:
        out["trl"] = trl(asked)
    if asked.ours:
        out["ours"] = ours(asked, share=False)
    if asked.shared_prompt:
        out["ours_shared_prompt"] = ours(asked, share=True)
    for name in ("trl", "ours", "ours_shared_prompt"):
        if name in out and name != "ours_shared_prompt":
            used = out[name]["tokens_per_s"] * floor["gflops_per_token"] * 1e9 / out[name].get("processes", 1)
            out[name]["mfu"] = round(used / peak, 3)
        if name in out and "trl" in out and name != "trl":
            out[name]["over_trl"] = round(out[name]["tokens_per_s"] / out["trl"]["tokens_per_s"], 2)
    if "ours" in out and "ours_shared_prompt" in out:
        gain = out["ours_shared_prompt"]["tokens_per_s"] / out["ours"]["tokens_per_s"]
        out["gain_of_sharing"] = round(gain, 3)
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
