"""What all workers of a run must do alike, wherever they are: the broker tells them, and they refuse to differ.

::

    broker's config ─ said ─▶ Welcome.settings ─ heard ─▶ `kbrl worker`: below its own files and flags; a flag that
                                                          says otherwise is an error that names both
                                              ─ differences ─▶ the running worker, at each Welcome: another run

What one host may know better than the run (cores, devices, priorities, sizes of its store) is not among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kbrl_async.errors import ConfigError
from kbrl_async.runs.config.keys import KEYS, flat
from kbrl_async.runs.config.loading import format_value, resolve
from kbrl_async.runs.config.schema import Config
from kbrl_async.runs.config.sources import Setting

AGREED: Mapping[str, tuple[str, ...]] = {
    "compile_farm": (
        "backend", "compile_farm.deadline_s", "compile_farm.march", "compile_farm.arch", "compile_farm.rules",
        "processes.verifier",
    ),
    "timing_bench": (
        "backend", "timing_bench.min_pairs", "timing_bench.max_pairs", "timing_bench.cap_s", "timing_bench.check_s",
        "timing_bench.timed", "timing_bench.deadline_s", "timing_bench.baselines", "timing_bench.sanitize_share",
        "timing_bench.flush_bytes", "timing_bench.outputs", "timing_bench.timed_workloads", "processes.verifier",
    ),
    "verifier": (
        "backend", "timing_bench.timed", "timing_bench.deadline_s", "timing_bench.outputs",
        "timing_bench.timed_workloads", "processes.verifier",
    ),
    "sampler": ("lora_rank", "agents.adapters", "sampler.engine"),
}  # fmt: skip
"""By service."""
OFFERED: Mapping[str, tuple[str, ...]] = {"sampler": ("model_name",)}
"""The run's, where the worker's own files and flags say nothing: a model may lie elsewhere on another host."""
_EVERYTHING = sorted({key for keys in (*AGREED.values(), *OFFERED.values()) for key in keys})


def encode(config: Config) -> str:
    """What the broker tells its workers."""
    values = flat(config)
    return msgspec.json.encode({key: values[key] for key in _EVERYTHING}).decode()


def decode(text: str) -> dict[str, Any]:
    """The settings in a broker's words; none where it says nothing, or nothing that can be read."""
    try:
        values = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
    return {key: value for key, value in values.items() if key in KEYS}


def follow(settings: list[Setting], service: str, run: Mapping[str, Any], origin: str) -> list[Setting]:
    """The worker's own settings with the run's.

    :param origin: of the run's settings, for messages.
    :raises ConfigError: the worker was told something else.
    """
    told = [Setting(key, run[key], origin) for key in AGREED[service] if key in run]
    theirs = flat(resolve(told))
    for setting in settings:
        if setting.key in {other.key for other in told}:
            mine = flat(resolve([setting]))[setting.key]
            if mine != theirs[setting.key]:
                here, there = format_value(mine), format_value(theirs[setting.key])
                cause = f"{setting.key} is {here} here ({setting.origin}) and {there} in the run ({origin})"
                raise ConfigError(cause, "Leave it out: a worker gets it from its run")
    offered = [Setting(key, run[key], origin) for key in OFFERED.get(service, ()) if key in run]
    return [*offered, *settings, *told]


def differences(config: Config, service: str, text: str) -> list[str]:
    """In which settings a worker that runs by `config` is not what the run's broker asks for, each naming both."""
    run, mine = decode(text), flat(config)
    theirs = flat(resolve([Setting(key, value, "the run") for key, value in run.items()])) if run else {}
    return [
        f"{key} is {format_value(mine[key])} here and {format_value(theirs[key])} in the run"
        for key in AGREED.get(service, ())
        if key in run and mine[key] != theirs[key]
    ]
