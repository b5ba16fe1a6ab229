"""Checks that concern more than one key. Ranges of single keys are in their types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from kbrl_async.errors import ConfigError
from kbrl_async.learning.settings import AT_SERVICE, CLIPPED, OF_SEQUENCES, check_combination
from kbrl_async.rollouts.buffer.rules import COMPARED
from kbrl_async.rollouts.rewards.advantages import IMITATES, NEEDS_NO_GROUP
from kbrl_async.rollouts.rewards.presets import find_presets
from kbrl_async.rollouts.settings import Reward
from kbrl_async.runs.config.presets import METHODS, PRESETS
from kbrl_async.runs.config.schema import Config
from kbrl_async.runs.settings import prices_of
from kbrl_async.sampling.settings import DIRECT_ENGINES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOOPBACK = re.compile(r"tcp://(127\.\d+\.\d+\.\d+|localhost|\[::1\]):\d+")
_TCP = re.compile(r"tcp://[^/\s:]+:\d{1,5}|tcp://\[[0-9a-fA-F:]+\]:\d{1,5}")


def check(config: Config, origins: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for the first contradiction, with the origin of the key that is to blame."""
    for key, cause, cure in _problems(config):
        origin = (origins or {}).get(key)
        raise ConfigError(f"{cause} ({origin})" if origin else cause, cure)


def _problems(config: Config) -> Iterator[tuple[str, str, str]]:
    """(key, cause, cure) of what contradicts; the first one is reported."""
    yield from _modes(config)
    yield from _examples(config)
    yield from _endpoint(config)
    yield from _vllm(config)
    yield from _weights(config)
    if config.evaluation.policy is None:  # an evaluation inherits how its run learned, and learns nothing
        yield from _tinker(config)
        yield from _learning(config)
        yield from _held_weights(config)
        yield from _ranks(config)
        yield from _demonstrations(config)
    yield from _names(config)
    yield from _addresses(config)
    bench, learner = config.timing_bench, config.learner
    if not config.levels:
        yield "level", "level names no level", "Give one such as level=1, or a list such as level=1,2"
    if bench.min_pairs > bench.max_pairs:
        cause = f"timing_bench.min_pairs={bench.min_pairs} is above timing_bench.max_pairs={bench.max_pairs}"
        yield "timing_bench.min_pairs", cause, "Lower min_pairs or raise max_pairs"
    if bench.cap_s >= bench.deadline_s:
        cause = f"timing_bench.cap_s={bench.cap_s:g} leaves nothing of timing_bench.deadline_s={bench.deadline_s:g}"
        yield "timing_bench.cap_s", cause, "Raise deadline_s: it covers correctness and timing"
    if not bench.timed and config.evaluation.policy is None and _pays_for_speed(config.reward):
        cause = f"timing_bench.timed=false, and reward.preset={config.reward.preset} pays for speed"
        cure = "Use reward.preset=stage2 reward.speed_weight=0, or leave kernels timed"
        yield "timing_bench.timed", cause, cure
    if learner.minibatches > config.batch_size * config.group_size:
        cause = f"learner.minibatches={learner.minibatches} is more than the batch has rollouts"
        yield "learner.minibatches", cause, "Lower it to at most batch_size × group_size"
    try:
        prices_of(config.cost.prices)
    except ConfigError as error:
        yield "cost.prices", error.cause, error.cure
    try:
        check_combination(config.loss, config.corrections)
    except ConfigError as error:
        yield "corrections", error.cause, error.cure
    for text in learner.constants:
        name, dot, rest = text.rpartition("=")[0].rpartition(".")
        if not dot or not rest or name not in (config.loss, *config.corrections):
            used = ", ".join((config.loss, *config.corrections))
            cause = f"learner.constants={text} is no constant of {used}"
            yield "learner.constants", cause, f"Write it as {config.loss}.cap=2, see docs/learning.md"
    if (learner.kl == "none") != (learner.kl_weight == 0):
        cause = f"learner.kl={learner.kl} and learner.kl_weight={learner.kl_weight:g} do not go together"
        yield "learner.kl", cause, "Set both, such as learner.kl=k3 learner.kl_weight=0.01, or neither"
    if config.sft.hidden_size % (2 * config.sft.heads):
        cause = f"sft.hidden_size={config.sft.hidden_size} does not split into {config.sft.heads} heads of even width"
        yield "sft.hidden_size", cause, "Make it a multiple of 2 × sft.heads"


def _learning(config: Config) -> Iterator[tuple[str, str, str]]:
    """Baseline, loss and what belongs to them."""
    learner = config.learner
    if learner.dual_clip and config.loss not in CLIPPED:
        cure = f"Use loss=grpo (or one of {', '.join(sorted(CLIPPED))}), or leave learner.dual_clip at 0"
        yield "learner.dual_clip", f"learner.dual_clip={learner.dual_clip:g} has no part in loss={config.loss}", cure
    if learner.dual_clip and learner.dual_clip <= 1:
        cause = f"learner.dual_clip={learner.dual_clip:g} would cut the loss of every token with a negative advantage"
        yield "learner.dual_clip", cause, "Use a value above 1, such as 3, or 0 for none"
    if learner.clip_low >= 1 and config.loss in CLIPPED:
        yield "learner.clip_low", "learner.clip_low=1 never clips: a ratio is above 0", "Use a value such as 0.2"
    if config.advantage == "best_of_n" and config.group_size <= config.best_of_n.keep:
        cause = f"best_of_n.keep={config.best_of_n.keep} keeps all of a group, whose group_size is {config.group_size}"
        yield "group_size", cause, "Raise group_size, such as group_size=10"
    if config.group_size < COMPARED and config.advantage not in NEEDS_NO_GROUP:
        cause = f"advantage={config.advantage} compares the rollouts of a group, and group_size is {config.group_size}"
        yield "group_size", cause, "Raise group_size, or use method=reinforce (advantage=running_mean or none)"
    if config.preset is not None and config.method not in ("grpo", "sft"):
        named, own = PRESETS[config.preset], METHODS[config.method]
        other = [key for key in ("loss", "advantage") if key in named and named[key] != own.get(key)]
        if other:
            cause = f"method={config.method} and preset={config.preset} differ in {' and '.join(other)}"
            yield "preset", cause, f"Leave one of them out: preset={config.preset} goes with method=grpo"
    if config.advantage in IMITATES and "opsm" in config.corrections:
        cause = f"corrections=opsm drops rollouts with a negative advantage, and advantage={config.advantage} has none"
        yield "corrections", cause, "Leave opsm out"
    if config.advantage in IMITATES and config.method == "grpo" and config.loss != "reinforce":
        cause = f"advantage={config.advantage} imitates rollouts, and loss={config.loss} holds them at the old policy"
        method = "best_of_n" if config.advantage == "best_of_n" else "reward_weighted_sft"
        yield "advantage", cause, f"Use method={method}, or loss=reinforce"
    if config.method == "reinforce" and config.advantage in IMITATES:
        cause = f"method=reinforce needs a baseline, and advantage={config.advantage} is none"
        yield "advantage", cause, "Use advantage=running_mean, or another method"
    try:
        find_presets(config.reward)
    except ConfigError as error:
        yield "reward.plan_weight", error.cause, error.cure
    if config.reward.pays_plan and config.sampler.engine == "openai":
        cause = "tokens of a plan are told apart by the tokenizer, which sampler.engine=openai has not"
        yield "reward.plan_part", cause, "Use sampler.engine=transformers"


def _demonstrations(config: Config) -> Iterator[tuple[str, str, str]]:
    """What goes with method=sft, and what needs it."""
    if config.method != "sft":
        if config.demonstrations.files:
            yield "demonstrations.files", "demonstrations.files is used by method=sft only", "Add method=sft"
        return
    if config.loss != "reinforce" or config.advantage != "reward_weight":
        cause = f"method=sft has its own loss, not loss={config.loss} advantage={config.advantage}"
        yield "loss" if config.loss != "reinforce" else "advantage", cause, "Leave loss, advantage and preset out"
    if config.corrections:
        cause = "corrections compare with who sampled, and demonstrations were not sampled"
        yield "corrections", cause, "Leave corrections out with method=sft"
    if config.temperature != 1.0:
        cause = f"method=sft learns the distribution itself, not that of temperature={config.temperature:g}"
        yield "temperature", cause, "Use temperature=1; an evaluation has evaluation.temperature"
    if config.mode == "agents":
        yield "mode", "method=sft teaches one role, and mode=agents has three", "Use mode=single_turn"
    if not config.demonstrations.files and config.backend not in ("c", "cuda-nvrtc"):
        cause = f"demonstrations.files is empty, and the project's own corpus has nothing for backend={config.backend}"
        yield "demonstrations.files", cause, "Name files or runs: demonstrations.files=data.jsonl,runs/mine"


def _pays_for_speed(reward: Reward) -> bool:
    presets = find_presets(reward)
    return any(weight for p in presets for part, weight in p.weights.items() if part.startswith("speed"))


def _modes(config: Config) -> Iterator[tuple[str, str, str]]:
    defaults, trains = Config(), config.evaluation.policy is None
    if config.mode != "single_turn" and config.max_turns < 2:
        yield "max_turns", f"mode={config.mode} needs at least two turns", "Use max_turns=4, or mode=single_turn"
    if config.mode == "single_turn" and config.max_turns != defaults.max_turns and trains:
        yield "max_turns", f"max_turns={config.max_turns} needs mode=multi_turn", "Add mode=multi_turn"
    if config.agents.adapters and (config.mode != "agents" or not config.lora_rank):
        yield "agents.adapters", "agents.adapters needs mode=agents and a lora_rank", "Add mode=agents lora_rank=32"
    if config.mode != "multi_turn" and config.turns != defaults.turns and trains:
        yield "turns", "turns.* needs mode=multi_turn", "Add mode=multi_turn"


def _examples(config: Config) -> Iterator[tuple[str, str, str]]:
    prompt = config.prompt
    key = "prompt.index"
    if prompt.option == "raicl" and not prompt.index:
        yield key, f"prompt.option=raicl needs {key}", "Make an index with: kbrl index build"
    if (prompt.option == "custom") != (prompt.file is not None):
        cause = "prompt.option=custom and prompt.file belong together"
        yield "prompt.file", cause, "Give both, or neither"
    if prompt.option != "raicl" and prompt.index:
        yield key, f"{key} is used by prompt.option=raicl only", "Add prompt.option=raicl"


def _endpoint(config: Config) -> Iterator[tuple[str, str, str]]:
    sampler = config.sampler
    if sampler.engine != "openai":
        if sampler.base_url and sampler.engine != "tinker":
            yield "sampler.base_url", "sampler.base_url needs sampler.engine=openai", "Add sampler.engine=openai"
        return
    if not sampler.base_url:
        cure = "Add the address of the endpoint, such as sampler.base_url=http://127.0.0.1:8000/v1"
        yield "sampler.engine", "sampler.engine=openai needs sampler.base_url", cure
    if config.model_name == "small":
        yield "model_name", "sampler.engine=openai needs the endpoint's model", "Add model_name=… as it is served there"
    if sampler.max_cost is not None and not (sampler.price_input or sampler.price_output):
        yield "sampler.max_cost", "sampler.max_cost needs prices", "Add sampler.price_input and sampler.price_output"
    if "sampler" in config.timing_bench.shares_with:
        cause = "timing_bench.shares_with names the sampler, which computes nothing with sampler.engine=openai"
        yield "timing_bench.shares_with", cause, "Leave the sampler out"


def _vllm(config: Config) -> Iterator[tuple[str, str, str]]:
    sampler = config.sampler
    for key in ("tensor_parallel", "data_parallel"):
        if (count := getattr(sampler, key)) == 1:
            continue
        said = f"sampler.{key}={count}"
        if sampler.engine != "vllm":
            yield f"sampler.{key}", f"{said} needs sampler.engine=vllm", "Add sampler.engine=vllm"
        if config.placement not in (None, "split"):
            cause = f"{said} with placement={config.placement}, which gives the sampler a single GPU"
            yield f"sampler.{key}", cause, "Use placement=split, or set CUDA_VISIBLE_DEVICES for each process yourself"
        if config.device == "cpu":
            yield f"sampler.{key}", f"{said} needs GPUs, and device=cpu", "Use device=cuda, or leave it out"
    if sampler.data_parallel > sampler.slots:
        cause = f"sampler.data_parallel={sampler.data_parallel} is more than sampler.slots={sampler.slots}"
        yield "sampler.data_parallel", cause, "Raise slots: the copies of the model share them"
    if sampler.forced and sampler.engine not in ("transformers", "vllm"):
        cause = f"sampler.forced can't be had with sampler.engine={sampler.engine}"
        yield "sampler.forced", cause, "Use transformers or vllm"
    if sampler.forced and config.temperature != 1:
        cause = f"sampler.forced records log-probs at temperature 1, not {config.temperature:g}"
        yield "sampler.forced", cause, "Use temperature=1"
    if sampler.engine != "vllm":
        if sampler.update != "auto":
            cause = f"sampler.update={sampler.update} needs sampler.engine=vllm"
            yield "sampler.update", cause, "Add sampler.engine=vllm"
        return
    if sampler.update == "adapter" and not config.lora_rank:
        cure = "Add lora_rank=32, or use sampler.update=full"
        yield "sampler.update", "sampler.update=adapter needs a lora_rank", cure
    if sampler.update == "full" and config.lora_rank:
        cause = f"sampler.update=full with lora_rank={config.lora_rank}: the learner publishes adapters only"
        yield "sampler.update", cause, "Use sampler.update=adapter, or lora_rank=0"


def _weights(config: Config) -> Iterator[tuple[str, str, str]]:
    """How full weights travel."""
    weights, key = config.weights, "weights.transport"
    if weights.dtype != "auto" and config.lora_rank:
        cause = f"weights.dtype={weights.dtype} is of full weights, and lora_rank={config.lora_rank} trains an adapter"
        yield "weights.dtype", cause, "Leave it out: adapters are published as they are trained"
    if weights.transport != "direct":
        return
    said = "weights.transport=direct"
    if config.lora_rank:
        yield key, f"{said} with lora_rank={config.lora_rank}: an adapter is small, and goes by files", "Use auto"
    if config.sampler.engine not in DIRECT_ENGINES or config.learner.engine != "torch":
        engines = f"learner.engine={config.learner.engine} and sampler.engine={config.sampler.engine}"
        cure = "Use learner.engine=torch and one of " + ", ".join(sorted(DIRECT_ENGINES)) + ", or auto"
        yield key, f"{said} with {engines}, which take no weights from a learner", cure
    if config.placement in ("one_gpu", "two_gpus") and config.device != "cpu":
        cause = f"{said} with placement={config.placement}: NCCL needs learner and sampler on GPUs of their own"
        yield key, cause, "Use placement=split, or weights.transport=files"


def _tinker(config: Config) -> Iterator[tuple[str, str, str]]:
    """Both engines are one service's: it samples from what it has trained, a LoRA adapter."""
    learner, sampler = config.learner, config.sampler
    if "tinker" not in (learner.engine, sampler.engine):
        if learner.loss_at != "here":
            yield "learner.loss_at", "learner.loss_at=service needs learner.engine=tinker", "Leave it out"
        return
    if learner.engine != sampler.engine:
        cause = f"learner.engine={learner.engine} with sampler.engine={sampler.engine}"
        cure = "Use tinker for both: the service samples from what it has trained"
        yield "learner.engine" if learner.engine == "tinker" else "sampler.engine", cause, cure
    given = "engine=tinker"
    if not config.lora_rank:
        yield "lora_rank", f"{given} trains a LoRA adapter, and lora_rank=0", "Add lora_rank=32"
    if config.temperature != 1.0:
        cause = f"{given} computes log-probs at temperature 1, and temperature={config.temperature:g}"
        yield "temperature", cause, "Use temperature=1; an evaluation has evaluation.temperature"
    if config.agents.adapters:
        yield "agents.adapters", f"{given} trains one adapter", "Leave agents.adapters out"
    if learner.kl != "none":
        yield "learner.kl", f"{given} has no log-probs of a reference policy", "Leave learner.kl and kl_weight out"
    if learner.processes > 1:
        yield "learner.processes", f"{given} computes nothing here", "Use learner.processes=1"
    for name in {"sampler", "learner"} & set(config.timing_bench.shares_with):
        cause = f"timing_bench.shares_with names the {name}, which computes nothing with {given}"
        yield "timing_bench.shares_with", cause, f"Leave the {name} out"
    if learner.loss_at == "service" and (config.loss not in AT_SERVICE or config.corrections or learner.dual_clip):
        cause = f"learner.loss_at=service computes {', '.join(sorted(AT_SERVICE))}, plain, and loss={config.loss}"
        yield "learner.loss_at", cause, "Use loss=ppo without corrections and dual_clip, or learner.loss_at=here"


def _held_weights(config: Config) -> Iterator[tuple[str, str, str]]:
    """How the learner holds weights that are too many for a GPU."""
    learner = config.learner
    quantised = f"learner.base_quantisation={learner.base_quantisation}"
    if learner.base_quantisation != "none" and not config.lora_rank:
        yield "learner.base_quantisation", f"{quantised} with lora_rank=0: no weights are frozen", "Add lora_rank=32"
    if learner.kernels == "fused" and learner.base_quantisation != "none":
        yield "learner.kernels", f"learner.kernels=fused has no kernels for {quantised}", "Use auto or plain"
    if learner.optimizer != "adamw" and config.lora_rank:
        cause = (
            f"learner.optimizer={learner.optimizer} with lora_rank={config.lora_rank}: an adapter's moments are small"
        )
        yield "learner.optimizer", cause, "Leave it out, or train all weights with lora_rank=0"
    yield from _shares(config)
    if learner.base_quantisation == "none":
        return
    if learner.shard:
        yield "learner.shard", f"learner.shard=true and {quantised} do not go together", "Use one of them"
    if config.device == "cpu":
        yield "learner.base_quantisation", f"{quantised} needs a GPU, and device=cpu", "Use device=cuda, or none"
    if config.sampler.engine == "vllm":
        cause = f"{quantised} with sampler.engine=vllm: it would serve another base than the one that is trained"
        yield "learner.base_quantisation", cause, "Use sampler.engine=transformers, which loads it alike"


def _shares(config: Config) -> Iterator[tuple[str, str, str]]:
    """Weights shared out over ranks, and what they are held in."""
    learner = config.learner
    if learner.shard and learner.processes == 1:
        cure = "Add learner.processes=2, one GPU each"
        yield "learner.shard", "learner.shard=true with learner.processes=1: nobody to share with", cure
    if learner.shard and config.agents.adapters:
        cause = "learner.shard=true shares one adapter out, and agents.adapters=true trains several"
        yield "learner.shard", cause, "Leave one of them out"
    if learner.offload and not learner.shard:
        cause = "learner.offload=true keeps shares on the host, and learner.shard=false makes none"
        yield "learner.offload", cause, "Add learner.shard=true learner.processes=2"
    if learner.offload and config.device == "cpu":
        yield "learner.offload", "learner.offload=true with device=cpu: everything is on the host", "Leave it out"
    if learner.master_dtype == "float32":
        return
    said = "learner.master_dtype=bfloat16"
    if config.lora_rank:
        yield "learner.master_dtype", f"{said} with lora_rank={config.lora_rank}: adapters are fp32", "Leave it out"
    if learner.dtype == "float32":
        yield "learner.master_dtype", f"{said} with learner.dtype=float32", "Leave one of them out"
    if config.sampler.engine == "transformers":
        cause = f"{said} with sampler.engine=transformers, which holds fp32 and would find other log-probs"
        yield "learner.master_dtype", cause, "Use sampler.engine=vllm, or leave it out"


def _ranks(config: Config) -> Iterator[tuple[str, str, str]]:
    """Several learner processes need a GPU each."""
    count, placement = config.learner.processes, config.placement
    together, again = config.learner.context_parallel, config.learner.activation_checkpointing
    if config.learner.offload_activations and again in ("none", "selective"):
        cause = f"learner.offload_activations keeps inputs of layers, and activation_checkpointing={again} has none"
        yield "learner.offload_activations", cause, "Use learner.activation_checkpointing=full or auto"
    if count % together:
        cause = f"learner.context_parallel={together} with learner.processes={count}: they don't come out even"
        yield "learner.context_parallel", cause, f"Use learner.processes={together} or a multiple of it"
    whole = [name for name in (config.loss, *config.corrections) if name in OF_SEQUENCES]
    if together > 1 and whole:
        cause = f"{whole[0]} weighs whole sequences, and learner.context_parallel={together} scores each in parts"
        yield "learner.context_parallel", cause, "Use learner.context_parallel=1, or what weighs tokens"
    if count > 1 and placement not in (None, "split"):
        cause = f"learner.processes={count} with placement={placement}, which gives the learner a single GPU"
        yield "learner.processes", cause, "Use placement=split, which gives each of them its own, or one process"


def _names(config: Config) -> Iterator[tuple[str, str, str]]:
    if config.name is not None and (not _NAME.fullmatch(config.name) or config.name == "latest"):
        cause = f"name '{config.name}' cannot be the folder of a run"
        yield "name", cause, "Use letters, digits, '.', '_' and '-', up to 64, not 'latest'"
    for key in ("log_path", "model_name"):
        if not getattr(config, key):
            yield key, f"{key} is empty", f"Leave {key} out for its default"


def _addresses(config: Config) -> Iterator[tuple[str, str, str]]:
    given = {f"broker.{name}": getattr(config.broker, name) for name in ("submit", "work", "status")}
    for key, address in given.items():
        if address is None or address.startswith("ipc://"):
            continue
        if not _TCP.fullmatch(address):
            yield key, f"{key}={address} is no address", "Write tcp://HOST:PORT or ipc://PATH"
        elif not _LOOPBACK.fullmatch(address) and not config.broker.allow_remote:
            cause = f"{key}={address} can be reached from other hosts"
            yield key, cause, "Use tcp://127.0.0.1:PORT, or broker.allow_remote=true and keys: 'kbrl keys new all'"
        elif not _LOOPBACK.fullmatch(address) and not config.broker.keys:
            cause = f"{key}={address} can be reached from other hosts, and there are no keys"
            yield key, cause, "Make them with 'kbrl keys new all' and add broker.keys=keys"
    if config.broker.submit is not None and config.broker.submit == config.broker.work:
        yield "broker.work", "broker.submit and broker.work are the same address", "Give each its own port"
    if config.broker.status is not None and config.broker.status in (config.broker.submit, config.broker.work):
        yield "broker.status", "broker.status is the address of another socket too", "Give it a port of its own"
