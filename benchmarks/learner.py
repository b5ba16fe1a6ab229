"""Tokens per second, model-FLOP utilisation and memory of an optimiser step. `python -m benchmarks.learner step`"""

from __future__ import annotations

import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import statistics
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import torch

from benchmarks.harness import Commands, Result
from benchmarks.harness import say as tell
from benchmarks.harness.models import END, H100_DENSE, config_of, random_group, random_model, word_tokenizer
from kbrl_async.learning import efficiency
from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.forward_backward import FusedPasses, OfModules, update_bytes
from kbrl_async.learning.fused import memory
from kbrl_async.learning.fused.attention import fastest
from kbrl_async.learning.fused.memory import head_depth
from kbrl_async.learning.policies.models import wrap_lora
from kbrl_async.learning.settings import Learner
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs.config import Config
from protocols.records import TrainGroup

commands = Commands("learner", __doc__)
RANK = 32
TEMPERATURE = 1.0


class StepOptions(msgspec.Struct, frozen=True):
    """Of all steps that are compared."""

    shape: str
    device: str
    seconds: float
    length: int
    prompt_tokens: int
    group: int
    rank: int = RANK
    """Of the adapter; 0: all weights are trained."""
    held: str = "auto"

    @property
    def tokens(self) -> int:
        return self.group * self.length

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


@commands
def step(
    shape: Annotated[str, "a model's name (qwen3-4b, …), or a folder with its config.json"] = "tiny",
    weights: Annotated[Literal["lora", "full"], "what is trained"] = "lora",
    held: Annotated[
        Literal["auto", "float32", "bfloat16"], "number format of the weights; auto: bfloat16 for lora, on a GPU"
    ] = "auto",
    checkpointing: Annotated[Literal["auto", "none", "selective", "full"], "ours: what is computed again"] = "auto",
    offload: Annotated[bool, "ours: inputs of layers that are computed again wait on the host"] = False,
    device: Annotated[str, "by default the GPU where there is one"] = "",
    ours: bool = False,
    shared_prompt: Annotated[bool, "ours, with the group's prompt computed once"] = False,
    trl: bool = False,
    trl_checkpointing: bool = True,
    plain: Annotated[bool, "transformers and peft alone: what a loop of one's own would do"] = False,
    seconds: Annotated[float, "of measured steps, for each of them"] = 20.0,
    length: Annotated[int, "tokens of a sequence; 0: 8192, on a CPU 256"] = 0,
    prompt_tokens: Annotated[int, "0: a quarter of the length"] = 0,
    group: int = 8,
    microbatch_tokens: Annotated[int, "ours; 0: one sequence"] = 0,
    memory_gb: Annotated[float, "ours: most to hold, 10^9 bytes; 0: nine tenths of the GPU"] = 0.0,
    profile: Annotated[bool, "ours: the dearest kernels, to stderr"] = False,
) -> Result:
    """One optimiser step over a group, against TRL's GRPO step on the same shape, tokens and adapter, in turn.

    Weights and tokens are random. On several GPUs: `torchrun --nproc-per-node 2 -m benchmarks.learner step --ours`.
    What is counted: all tokens of the group's sequences, prompts included, over the wall time of forward, loss,
    backward, clipping and AdamW, the best of the measured steps and their median. --shared-prompt computes the group's
    prompt once and still counts it for every sequence: its gain stands apart from the plain figure.
    Ours: fused kernels, one sequence a microbatch, as little computed again as the memory allows, PPO clip, entropy
    and log-ratio metrics as in a run; no host sync between microbatches (CUDA's debug mode makes one an error).
    TRL: `GRPOTrainer.train()` with its inputs given instead of generated: one sequence a device batch, gradients
    accumulated over the group, bf16, its fused LM head, gradient checkpointing (--no-trl-checkpointing goes without,
    far over the memory of ours), SDPA attention, `beta=0`, the same peft adapter, fused AdamW.
    Plain: transformers' model, peft's adapter, transformers' gradient checkpointing and SDPA attention, logits of the
    answer's tokens whole, REINFORCE's loss, one sequence at a time, fused AdamW. It needs no other package.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" in os.environ and device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    if device == "cpu":
        torch.set_num_threads(1)
    length = length or (256 if device == "cpu" else 8192)
    rank = RANK if weights == "lora" else 0
    asked = StepOptions(shape, device, seconds, length, prompt_tokens or length // 4, group, rank, held)
    peak = efficiency.measured_peak(torch.device(device), asked.on_gpu)
    floor = floors(asked, peak)
    out: Result = {"shape": shape, "weights": weights, "checkpointing": checkpointing, "sequence": length}
    out |= {"prompt": asked.prompt_tokens, "group": group, "floor": floor}
    options = Learner(
        epochs=1, minibatches=1, negative_scale=1.0, kernels="fused", token_budget=microbatch_tokens or length,
        memory_gb=memory_gb if asked.on_gpu else 0.0, activation_checkpointing=checkpointing,
        offload_activations=offload,
    )  # fmt: skip
    if plain:
        out["plain"] = of_plain(asked)
        free()
    if trl:
        out["trl"] = of_trl(asked, trl_checkpointing)
    for name, is_wanted in (("ours", ours), ("ours_shared_prompt", shared_prompt)):
        if is_wanted:
            shared = msgspec.structs.replace(options, share_prompts=name == "ours_shared_prompt")
            out[name] = of_ours(asked, shared, profile)
            free()
            for other in out.keys() & {"trl", "plain"}:
                out[name][f"over_{other}"] = out[name]["tokens_per_s"] / out[other]["tokens_per_s"]
    for name in out.keys() & {"trl", "plain", "ours"}:
        used = out[name]["tokens_per_s"] * floor["gflops_per_token"] * 1e9 / out[name].get("processes", 1)
        out[name] |= {"tflops": used / 1e12, "mfu": used / peak, "mfu_of_989": used / H100_DENSE}
    if ours and shared_prompt:
        out["gain_of_sharing"] = out["ours_shared_prompt"]["tokens_per_s"] / out["ours"]["tokens_per_s"]
    return out


def floors(asked: StepOptions, peak: float) -> Result:
    """What the arithmetic alone allows on this card, tokens/s, at the rate of a large matrix product measured here."""
    config = config_of(asked.shape)
    scored = 1 - asked.prompt_tokens / asked.length
    needed = efficiency.shape_flops_per_token(config, asked.rank, asked.length, scored)
    again = efficiency.shape_flops_per_token(config, asked.rank, asked.length, scored, recomputed=True)
    return {
        "peak_tflops": peak / 1e12,
        "gflops_per_token": needed / 1e9,
        "gflops_per_token_recomputed": again / 1e9,
        "tokens_per_s": peak / needed,
        "tokens_per_s_recomputed": peak / again,
    }


def say(line: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        tell(line)


def build(asked: StepOptions) -> torch.nn.Module:
    held = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    automatic = torch.bfloat16 if asked.on_gpu and asked.rank else torch.float32
    return random_model(config_of(asked.shape), asked.device, held.get(asked.held, automatic))


def group_of(asked: StepOptions) -> list[TrainGroup]:
    return random_group(config_of(asked.shape).vocab_size, asked.prompt_tokens, asked.length, asked.group)


class StepStopwatch:
    """Steps of one kind: the first (plans, compilation) is not counted; then as many as fit, at least two."""

    def __init__(self, name: str, asked: StepOptions) -> None:
        self._name, self._asked = name, asked
        self._steps: list[float] = []
        say(f"{name}: first step …")
        self.begin()

    def begin(self) -> None:
        if self._asked.on_gpu:
            torch.cuda.synchronize()
        self._began = time.perf_counter()

    def end(self) -> bool:
        """Whether that was the last one."""
        if self._asked.on_gpu:
            torch.cuda.synchronize()
        self._steps.append(time.perf_counter() - self._began)
        spent, counted = self._steps[-1], self._steps[1:]
        say(f"{self._name}: step {len(counted)} {spent:.3f} s, {self._asked.tokens / spent:.0f} tokens/s")
        if not counted and self._asked.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        return len(counted) >= 2 and sum(counted) + spent >= self._asked.seconds

    def found(self) -> Result:
        counted = self._steps[1:]
        return {
            "tokens_per_s": self._asked.tokens / statistics.median(counted),
            "tokens_per_s_best": self._asked.tokens / min(counted),
            "steps": len(counted),
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if self._asked.on_gpu else 0.0,
        }


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ── ours ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_ours(asked: StepOptions, options: Learner, profile: bool) -> Result:
    ranks = ProcessGroup(torch.device(asked.device)) if "RANK" in os.environ else None
    settings = Config(loss="grpo", learning_rate=1e-6, learner=options)
    model = wrap_lora(build(asked), asked.rank) if asked.rank else build(asked)
    held = sum(p.nbytes for p in model.parameters()) + update_bytes(model, asked.on_gpu)
    trainer = Trainer(model, settings, asked.device, process_group=ranks)
    if ranks is not None and ranks.rank:
        trainer.follow()
        trainer.close()
        sys.exit(0)
    groups = group_of(asked)
    trainer.step(groups, TEMPERATURE)  # with plans of attention and compilation of kernels, which may wait
    is_strict = asked.on_gpu and isinstance(trainer.passes, FusedPasses)
    if is_strict:
        strict(trainer)
    if profile:
        profiled(lambda: trainer.step(groups, TEMPERATURE))
    watch = StepStopwatch("ours, shared prompt" if options.share_prompts else "ours", asked)
    trainer.step(groups, TEMPERATURE)
    while not watch.end():
        watch.begin()
        trainer.step(groups, TEMPERATURE)
    found = watch.found()
    assert isinstance(trainer.passes, FusedPasses | OfModules)
    plan = trainer.passes.plan(options.token_budget)
    found["layers"] = {
        "all": config_of(asked.shape).num_hidden_layers,
        "keep_everything": plan.kept,
        "keep_most": plan.whole,
    }
    activations = memory.activation_bytes(trainer.passes.shape, options.token_budget, plan)
    found |= {"by": trainer.passes.name, "no_host_sync": is_strict, "predicted_gb": (held + activations) / 1e9}
    if asked.on_gpu:
        found["attention"] = attention_of(asked)
    if ranks is not None:
        found["processes"] = ranks.size
        trainer.close()
    return found


def strict(trainer: Trainer) -> None:
    """From now on a host sync between microbatches is an error."""
    gradients = trainer.gradients

    @functools.wraps(gradients)
    def guarded(*arguments: Any) -> list[torch.Tensor]:
        with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            return gradients(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer.gradients = guarded  # type: ignore[method-assign, assignment]


def profiled(step: Callable[[], object]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    say(found.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=90))


def attention_of(asked: StepOptions) -> str:
    shape = config_of(asked.shape)
    heads, kv = shape.num_attention_heads, shape.num_key_value_heads
    length = 1 << max(9, (asked.length - 1).bit_length())
    device = torch.device("cuda", torch.cuda.current_device())
    return fastest(heads, kv, head_depth(shape), length, torch.bfloat16, device)


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


def of_trl(asked: StepOptions, checkpointing: bool) -> Result:
    import transformers

    missing = StandIn("datasets", "pandas", "pyarrow").missing
    import trl as library
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    samples = group_of(asked)[0].samples

    class TrlStep(GRPOTrainer):  # type: ignore[misc]
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

    watch = StepStopwatch("trl", asked)

    class StepClock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = watch.end()
            return control

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=1, gradient_accumulation_steps=asked.group,
            num_generations=asked.group, max_completion_length=asked.length - asked.prompt_tokens, bf16=asked.on_gpu,
            use_cpu=not asked.on_gpu, gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False}, beta=0.0, learning_rate=1e-6,
            optim="adamw_torch_fused" if asked.on_gpu else "adamw_torch", max_steps=1000, save_strategy="no",
            logging_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        adapter = asked.rank and LoraConfig(
            r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        trainer = TrlStep(
            model=build(asked).train(),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=prompts(),
            processing_class=word_tokenizer(2, pad_token=END),
            peft_config=adapter or None,
            callbacks=[StepClock()],
        )
        trainer.train()
    found = watch.found()
    found |= {"version": library.__version__, "stood_in_for": missing, "gradient_checkpointing": checkpointing}
    del trainer
    free()
    return found


# ── a loop of one's own ───────────────────────────────────────────────────────────────────────────────────────────


def of_plain(asked: StepOptions) -> Result:
    model: Any = build(asked)
    if asked.rank:
        model.enable_input_require_grads()  # frozen embeddings: a layer that is computed again needs one that does
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model = (wrap_lora(model, asked.rank) if asked.rank else model).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=asked.on_gpu)
    samples = group_of(asked)[0].samples
    scored = sum(len(sample.token_ids) for sample in samples)

    def take_step() -> None:
        for sample in samples:
            ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids]], device=asked.device)
            with torch.autocast(torch.device(asked.device).type, torch.bfloat16, enabled=asked.on_gpu):
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(sample.token_ids) + 1).logits
            losses = torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, -len(sample.token_ids) :])
            (losses * sample.advantage * len(sample.token_ids) / scored).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    watch = StepStopwatch("plain", asked)
    take_step()
    while not watch.end():
        watch.begin()
        take_step()
    return watch.found()


if __name__ == "__main__":
    commands.main()
