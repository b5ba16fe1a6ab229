"""Checks that concern more than one key. Ranges of single keys are in their types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from kbrl_async.config.schema import Config
from kbrl_async.config.sections import DatasetBuilder
from kbrl_async.errors import ConfigError
from kbrl_async.rewards.presets import find_preset

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
    if not bench.timed and _pays_for_speed(config.dataset_builder):
        cause = f"timing_bench.timed=false, and reward_preset={config.dataset_builder.reward_preset} pays for speed"
        cure = "Use dataset_builder.reward_preset=stage2 dataset_builder.reward_speed_weight=0, or leave kernels timed"
        yield "timing_bench.timed", cause, cure
    if learner.minibatches > config.batch_size * config.group_size:
        cause = f"learner.minibatches={learner.minibatches} is more than the batch has rollouts"
        yield "learner.minibatches", cause, "Lower it to at most batch_size × group_size"
    weighs = [name for name in config.corrections if name.startswith("tis")]
    if weighs and (config.loss != "reinforce" or len(weighs) > 1):
        cause = f"corrections={','.join(config.corrections)} with loss={config.loss} would weigh by the ratio twice"
        yield "corrections", cause, "Use one of tis, tis_sequence with loss=reinforce; the other corrections only drop"
    if (learner.kl == "none") != (learner.kl_weight == 0):
        cause = f"learner.kl={learner.kl} and learner.kl_weight={learner.kl_weight:g} do not go together"
        yield "learner.kl", cause, "Set both, such as learner.kl=k3 learner.kl_weight=0.01, or neither"
    if config.sft.hidden_size % (2 * config.sft.heads):
        cause = f"sft.hidden_size={config.sft.hidden_size} does not split into {config.sft.heads} heads of even width"
        yield "sft.hidden_size", cause, "Make it a multiple of 2 × sft.heads"


def _pays_for_speed(builder: DatasetBuilder) -> bool:
    if builder.reward_preset == "auto":
        return True
    weights = find_preset(builder.reward_preset, builder.reward_weights).weights
    return any(weight for part, weight in weights.items() if part.startswith("speed"))


def _modes(config: Config) -> Iterator[tuple[str, str, str]]:
    defaults = Config()
    if config.mode != "single_turn" and config.max_turns < 2:
        yield "max_turns", f"mode={config.mode} needs at least two turns", "Use max_turns=4, or mode=single_turn"
    if config.mode == "single_turn" and config.max_turns != defaults.max_turns:
        yield "max_turns", f"max_turns={config.max_turns} needs mode=multi_turn", "Add mode=multi_turn"
    if config.agents.adapters and (config.mode != "agents" or not config.lora_rank):
        yield "agents.adapters", "agents.adapters needs mode=agents and a lora_rank", "Add mode=agents lora_rank=32"
    if config.mode != "multi_turn" and config.turns != defaults.turns:
        yield "turns", "turns.* needs mode=multi_turn", "Add mode=multi_turn"


def _examples(config: Config) -> Iterator[tuple[str, str, str]]:
    builder = config.dataset_builder
    key = "dataset_builder.rag_index_path"
    if builder.prompt_option == "raicl" and not builder.rag_index_path:
        yield key, f"dataset_builder.prompt_option=raicl needs {key}", "Make an index with: kbrl index build"
    if builder.prompt_option != "raicl" and builder.rag_index_path:
        yield key, f"{key} is used by prompt_option=raicl only", "Add dataset_builder.prompt_option=raicl"


def _endpoint(config: Config) -> Iterator[tuple[str, str, str]]:
    sampler = config.sampler
    if sampler.engine != "openai":
        if sampler.base_url:
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
