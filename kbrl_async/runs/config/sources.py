"""Where settings come from: YAML and TOML files, `KBRL_*` variables, `key=value` on the command line.

Each source gives a list of `Setting`s that remember their origin (`file:line`, the variable, or the command line), so
that a wrong one can be named where it stands. Nothing is checked against the schema here but what is a section.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kbrl_async.errors import ConfigError

PREFIX = "KBRL_"
RESERVED = frozenset(
    {
        "KBRL_RUN_DIR",
        "KBRL_CONFIG",
        "KBRL_KEYS",
        "KBRL_WORKER_APART",
        "KBRL_BROKER_HOST",
        "KBRL_BROKER_BEHIND",
        "KBRL_LAUNCHER",
        "KBRL_NANNY_PID",
        "KBRL_NANNY_PULSE",
        "KBRL_WEDGED_S",
        "KBRL_SERVER",
        "KBRL_SERVER_KEY",
        "KBRL_SERVER_PRESET",
    }
)
"""Variables that are no keys: what services are told by whoever starts them; deploy/README.md lists them."""


class Setting(msgspec.Struct, frozen=True):
    """One value with its origin."""

    key: str
    value: Any
    origin: str


def parts_of(text: str) -> list[str]:
    """A list as one writes it in a word: `a,b` or `[a, b]`."""
    return [part.strip() for part in text.strip("[] ").split(",") if part.strip()]


def from_file(path: Path) -> list[Setting]:
    """The settings of a YAML or TOML file.

    :raises ConfigError: unreadable, not parsable, of another kind, or with a key twice.
    """
    readers = {".yaml": _yaml, ".yml": _yaml, ".toml": _toml}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path} is neither YAML nor TOML", "Name it *.yaml or *.toml")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"cannot read the configuration {path}: {reason}", "Check the path given to --config"
        ) from None
    return list(reader(path, text))


def _yaml(path: Path, text: str) -> Iterator[Setting]:
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is not None:
            yield from _yaml_mapping(path, loader, root, "")
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line} is not YAML: {error.problem}", "Correct that line") from None
    finally:
        loader.dispose()


def _yaml_mapping(path: Path, loader: yaml.SafeLoader, node: yaml.Node, prefix: str) -> Iterator[Setting]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{path}:{node.start_mark.line + 1} holds no 'key: value' pairs", "Write one 'key: value' a line"
        )
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key, origin = prefix + str(key_node.value), f"{path}:{key_node.start_mark.line + 1}"
        if key in seen:
            raise ConfigError(f"{key} is set twice ({origin})", "Remove one of the two lines")
        seen.add(key)
        if isinstance(value_node, yaml.MappingNode) and not prefix:
            yield from _yaml_mapping(path, loader, value_node, f"{key}.")
        else:
            yield Setting(key, loader.construct_object(value_node, deep=True), origin)


def _toml(path: Path, text: str) -> Iterator[Setting]:
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}", "Correct that line") from None
    lines = _toml_lines(text)
    for key, value in tree.items():
        leaves = {f"{key}.{leaf}": item for leaf, item in value.items()} if isinstance(value, dict) else {key: value}
        for name, item in leaves.items():
            yield Setting(name, item, f"{path}:{lines.get(name, 1)}")


def _toml_lines(text: str) -> dict[str, int]:
    """Line of each key; tomllib does not tell."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            section = header[1] + "."
        elif pair := re.match(r"""\s*["']?([\w.-]+)["']?\s*=""", line):
            lines.setdefault(section + pair[1], number)
    return lines


def from_env(env: Mapping[str, str]) -> list[Setting]:
    """`KBRL_BATCH_SIZE=4` sets batch_size, `KBRL_LEARNER__EPOCHS=1` sets learner.epochs."""
    names = sorted(name for name in env if name.startswith(PREFIX) and name not in RESERVED)
    return [
        Setting(name.removeprefix(PREFIX).lower().replace("__", "."), env[name], f"variable {name}") for name in names
    ]


def from_overrides(overrides: Sequence[str]) -> list[Setting]:
    """`key=value` as written on the command line.

    :raises ConfigError: a word without `=`.
    """
    settings = []
    for word in overrides:
        key, sign, value = word.partition("=")
        if not sign or not key:
            raise ConfigError(f"'{word}' is no setting (command line)", "Write key=value, such as batch_size=4")
        settings.append(Setting(key.strip().removeprefix("--"), value, "command line"))
    return settings
