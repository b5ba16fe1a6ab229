"""Prompts of one's own: a TOML file with a template, and others for single backends (prompt.option=custom).

    template = \"\"\"
    {contract}
    {hardware}
    \"\"\"

    [backends.triton]
    template = "Write Triton. {examples} {source}"

Names in braces: `{source}` the problem file, `{contract}` the backend's contract with the problem in it, `{examples}`
worked examples, `{hardware}` the machine. A template must hold `{source}` or `{contract}`; other braces stay.
"""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path

import msgspec

from kbrl_async.errors import ConfigError

PREFIX = "custom:"


class Templates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    template: str = ""
    backends: dict[str, dict[str, str]] = {}

    def of(self, backend: str) -> str:
        return self.backends.get(backend, {}).get("template", self.template)


def template_of(option: str, backend: str) -> str:
    """The template of `custom:FILE` for a backend. Raises `ConfigError`."""
    path = option.removeprefix(PREFIX)
    text = _read(path).of(backend)
    if not text:
        raise ConfigError(f"{path} has no template for backend={backend}", "Give it one, or a `template` for all")
    if "{source}" not in text and "{contract}" not in text:
        raise ConfigError(f"the template of {path} does not show the problem", "Put {source} or {contract} into it")
    return text


@functools.lru_cache(16)
def _read(path: str) -> Templates:
    try:
        return msgspec.convert(tomllib.loads(Path(path).expanduser().read_text()), Templates)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts {path}: {error}", "Check prompt.file") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no file of prompts: {error}", "See the head of prompts/custom.py") from None
