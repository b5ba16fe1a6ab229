"""From settings to one validated `Config`: files < variables < command line.

::

    files ─┐
    .env  ─┼─▶ settings with origins ─▶ known key? right type and range? ─▶ Config ─▶ checks between keys
    words ─┘

Invariant: whatever is wrong is named with its key, its origin and what would be right, in one line.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from dotenv import dotenv_values
from msgspec import inspect as types

from kbrl_async.errors import ConfigError
from kbrl_async.runs.config.checks import check
from kbrl_async.runs.config.excluding import by_id
from kbrl_async.runs.config.keys import KEYS, SECTIONS, Key, flat
from kbrl_async.runs.config.names import ALIASES, RENAMED, TRANSLATED, instead_of, is_foreign, nearest
from kbrl_async.runs.config.presets import REAL_MODEL, preset_settings
from kbrl_async.runs.config.schema import Config
from kbrl_async.runs.config.sources import PREFIX, Setting, from_env, from_file, from_overrides, parts_of
from kbrl_async.runs.config.starting import at_policy, how_asked, inherited, is_small, taught

CONFIG_FILE = "config.yaml"
"""The resolved configuration in a run folder."""

PLACE_KEYS = frozenset({"name", "log_path", "resume"})
"""Where a run lies, not what it is."""

CHANGEABLE = PLACE_KEYS | {
    "max_steps", "max_minutes", "log_level", "device", "placement", "policy_url",
    *(name for name in KEYS if name.startswith(("cpu.", "processes.", "broker.", "tensorboard."))),
    *(name for name in KEYS if name.startswith(("archive.", "alarms.", "metrics.", "cost."))),
    "learner.threads", "learner.peak_tflops", "learner.checkpoint_every", "learner.keep_checkpoints",
    "sampler.threads", "sampler.slots",
    "sampler.base_url", "sampler.api_key_env", "sampler.endpoint_deadline_s", "sampler.endpoint_retries",
    "sampler.requests_per_minute", "sampler.price_input", "sampler.price_output", "sampler.max_cost",
    "compile_farm.slots", "compile_farm.nice", "compile_farm.store_max_bytes", "timing_bench.core",
    "eval_every", "eval_credit", "evaluation.deadline_s", "evaluation.in_flight",
    "evaluation.tensorboard_log_dir", "evaluation.tensorboard_step",
}  # fmt: skip
"""Keys that may differ when an unfinished run is continued; the others would make it another experiment."""


_HASHED = {new: old for old, new in RENAMED.items()}


def environment(shell: Mapping[str, str], dotenv: Path = Path(".env")) -> dict[str, str]:
    """The `KBRL_*` variables of the `.env` file and the shell; the shell's win."""
    filed = {name: value for name, value in dotenv_values(dotenv).items() if value is not None}
    return {name: value for name, value in {**filed, **shell}.items() if name.startswith(PREFIX)}


def load(
    paths: Sequence[Path | str] = (), overrides: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Config:
    """Resolve a configuration; later files win over earlier ones, variables over files, overrides over all.

    :param env: variables, of which `KBRL_*` count; see `environment`. None: none.
    :raises ConfigError: an unknown key, a wrong value, or values that contradict each other.
    """
    return resolve(gather(paths, overrides, env))


def gather(
    paths: Sequence[Path | str] = (), overrides: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> list[Setting]:
    """What `load` resolves, the winner of each key last."""
    settings = [setting for path in paths for setting in from_file(Path(path))]
    settings += from_env(env or {}) + from_overrides(overrides)
    settings = [setting for setting in settings if not (is_foreign(setting.key) and _is_null(setting.value))]
    _refuse_absent(settings)
    settings = [by_id(at_policy(_current(setting))) for setting in settings]
    settings = [_located(setting, settings) for setting in settings]
    return [*_real(settings), *_asked_like(settings), *preset_settings(settings), *_resumed(settings), *settings]


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("null", "none", ""))


def _refuse_absent(settings: Sequence[Setting]) -> None:
    """All at once: whoever brings a file of another system's mends it once."""
    absent = [setting for setting in settings if instead_of(setting.key)]
    if absent:
        names = ", ".join(f"{setting.key} ({setting.origin})" for setting in absent)
        cures = dict.fromkeys(instead_of(setting.key) for setting in absent)
        verb, them = ("are no keys", "them") if len(absent) > 1 else ("is no key", "it")
        raise ConfigError(f"{names} {verb} here", f"Leave {them} out. {'. '.join(cures)}")


def _current(setting: Setting) -> Setting:
    """The same by the key's name of today."""
    if (new := RENAMED.get(setting.key)) is not None:
        warn_once(f"{setting.key} is {new} now; the old name is read for one more release ({setting.origin})")
        return msgspec.structs.replace(setting, key=new)
    if (ours := ALIASES.get(setting.key)) is not None:
        warn_once(f"{setting.key} is {ours} here ({setting.origin})")
        return msgspec.structs.replace(setting, key=ours)
    said = TRANSLATED.get(setting.key)
    if said is None or (value := said.values.get(format_value(setting.value).lower())) is None:
        return setting
    warn_once(f"{setting.key}={format_value(setting.value)} is {said.key}={value} here ({setting.origin})")
    return msgspec.structs.replace(setting, key=said.key, value=value)


@functools.cache  # a process reads its run's configuration more than once
def warn_once(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _real(settings: Sequence[Setting]) -> list[Setting]:
    """What a model that was not made here has instead of the learner's defaults."""
    if is_small(settings):
        return []
    return [Setting(key, value, "a model that is not small") for key, value in REAL_MODEL.items()]


def _asked_like(settings: Sequence[Setting]) -> list[Setting]:
    """How the policy's run asked it, or what a small policy was taught, lies below all other settings."""
    stored = inherited(settings)
    if stored is None:
        found = taught(settings)
    else:
        found = how_asked(resolve([_current(setting) for setting in from_file(stored)]), str(stored))
    is_said = any(setting.key == "prompt.option" for setting in settings)  # the rest of a prompt goes with its option
    return [setting for setting in found if not (is_said and setting.key.startswith("prompt."))]


def _located(setting: Setting, settings: Sequence[Setting]) -> Setting:
    """`resume=NAME` as the folder of that name in log_path, where it is no folder by itself."""
    if setting.key != "resume" or not setting.value or (Path(str(setting.value)) / CONFIG_FILE).is_file():
        return setting
    roots = [str(other.value) for other in settings if other.key == "log_path"]
    place = Path(roots[-1] if roots else Config().log_path) / str(setting.value)
    return msgspec.structs.replace(setting, value=str(place)) if (place / CONFIG_FILE).is_file() else setting


def _resumed(settings: Sequence[Setting]) -> list[Setting]:
    """What the run to be resumed was started with lies below all other settings."""
    wanted = [setting.value for setting in settings if setting.key == "resume"]
    stored = Path(str(wanted[-1])) / CONFIG_FILE if wanted and wanted[-1] else None
    return [_current(s) for s in from_file(stored)] if stored is not None and stored.is_file() else []


def resolve(settings: Sequence[Setting]) -> Config:
    """The configuration that these settings make; the last one of a key wins, all are checked."""
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in settings:
        value = _convert(find_key(setting.key, setting.origin), setting)
        section, _, leaf = setting.key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[leaf] = value
        origins[setting.key] = setting.origin
    config = msgspec.convert(tree, Config)
    check(config, origins)
    return config


def find_key(name: str, origin: str = "command line") -> Key:
    """The key of that name, of an older name of it, or of one by which others know it.

    :raises ConfigError: none; the nearest is named.
    """
    if key := KEYS.get(RENAMED.get(name) or ALIASES.get(name, name)):
        return key
    if name in SECTIONS:
        inside = ", ".join(key.partition(".")[2] for key in KEYS if key.startswith(f"{name}."))
        raise ConfigError(f"{name} is a section, not a key ({origin})", f"Set one of its keys: {inside}")
    if said := TRANSLATED.get(name):
        known = ", ".join(f"{word} is {said.key}={value}" for word, value in said.values.items())
        raise ConfigError(f"{name} is {said.key} here, by other words ({origin})", f"Known: {known}")
    if cure := instead_of(name):
        raise ConfigError(f"{name} is no key here ({origin})", cure)
    near = nearest(name)
    cure = f"Did you mean {near}?" if near else "Run 'kbrl config' for all keys"
    raise ConfigError(f"unknown key '{name}' ({origin})", cure)


def _convert(key: Key, setting: Setting) -> Any:
    is_text = isinstance(setting.value, str)
    value = _read_text(key, setting.value) if is_text else setting.value
    if key.takes(types.ListType) and not key.takes(types.IntType) and isinstance(value, int):
        value = [value]
    try:
        converted = msgspec.convert(value, key.type, strict=not is_text)
    except msgspec.ValidationError:
        raise _wrong(key, setting) from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise _wrong(key, setting)
    if key.door is not None:
        for name in converted if isinstance(converted, list) else [converted]:
            if name is not None and not key.door.knows(name):
                raise _wrong(key, setting, name)
    return converted


def _read_text(key: Key, text: str) -> Any:
    """Text from a variable or the command line as the key's type wants it; YAML's `1e-4` is such text too."""
    if key.takes(types.NoneType) and _is_null(text):
        return None
    if key.takes(types.ListType) and ("," in text or text.startswith("[")):
        return parts_of(text)
    if key.takes(types.ListType) and not key.takes(types.IntType, types.LiteralType):
        return [text] if text else []
    if key.takes(types.IntType, types.FloatType, types.ListType):
        return _number(text)
    return text


def _number(text: str) -> int | float | str:
    """`3`, `.5`, `1e-4`; a whole number such as `1e9` is an integer."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


_NAMED = ("method", "preset", "loss", "advantage", "reward.preset")
"""Keys that take names of algorithms, which are easily taken for one another."""


def _wrong(key: Key, setting: Setting, name: str = "") -> ConfigError:
    word = name or str(setting.value)
    homes = [f"{other}={word}" for other in _NAMED if other != key.name and word in KEYS[other].choices]
    near = " or ".join(homes) if key.name in _NAMED and homes else _closest(word, key.choices)
    cure = f"Did you mean {near}?" if near else f"Its default is {format_value(key.default)}"
    return ConfigError(f"{key.name} must be {key.expects}, not {format_value(setting.value)} ({setting.origin})", cure)


def _closest(word: str, choices: Sequence[str]) -> str:
    begun = [choice for choice in choices if word and choice.startswith(word)]
    return next(iter(begun or difflib.get_close_matches(word, choices, n=1)), "")


def format_value(value: Any) -> str:
    """A value as one would write it on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML that `load` reads back to an equal one."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True)


def config_hash(config: Config) -> str:
    """Twelve hex digits that are equal for equal experiments, wherever and however often they run."""
    values = {_HASHED.get(name, name): value for name, value in flat(config).items() if name not in CHANGEABLE}
    return hashlib.sha256(msgspec.json.encode(values, order="deterministic")).hexdigest()[:12]


def forbidden_changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Keys that an unfinished run may not change when it is continued: key → (old, new)."""
    before, after = flat(old), flat(new)
    return {k: (before[k], after[k]) for k in KEYS if k not in CHANGEABLE and before[k] != after[k]}
