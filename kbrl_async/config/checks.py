"""Checks that concern more than one key. Ranges of single keys are in their types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from kbrl_async.config.schema import Config
from kbrl_async.errors import ConfigError

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


def _names(config: Config) -> Iterator[tuple[str, str, str]]:
    if config.name is not None and (not _NAME.fullmatch(config.name) or config.name == "latest"):
        cause = f"name '{config.name}' cannot be the folder of a run"
        yield "name", cause, "Use letters, digits, '.', '_' and '-', up to 64, not 'latest'"
    for key in ("log_path", "model_name"):
        if not getattr(config, key):
            yield key, f"{key} is empty", f"Leave {key} out for its default"


def _addresses(config: Config) -> Iterator[tuple[str, str, str]]:
    given = {"broker.submit": config.broker.submit, "broker.work": config.broker.work}
    for key, address in given.items():
        if address is None or address.startswith("ipc://"):
            continue
        if not _TCP.fullmatch(address):
            yield key, f"{key}={address} is no address", "Write tcp://HOST:PORT or ipc://PATH"
        elif not _LOOPBACK.fullmatch(address) and not config.broker.allow_remote:
            cause = f"{key}={address} can be reached from other hosts, unencrypted"
            yield key, cause, "Use tcp://127.0.0.1:PORT, or broker.allow_remote=true on a network that you trust"
    if config.broker.submit is not None and config.broker.submit == config.broker.work:
        yield "broker.work", "broker.submit and broker.work are the same address", "Give each its own port"
