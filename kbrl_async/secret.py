"""A key of a service: from the environment, sent to that service only, and in no message."""

from __future__ import annotations

from collections.abc import Mapping

from kbrl_async.errors import ConfigError

HIDDEN = "[key]"


def secret(name: str | None, setting: str, environment: Mapping[str, str]) -> str:
    """The key in the variable that `setting` names; empty where it names none.

    :raises ConfigError: the variable is empty, or holds no key.
    """
    key = environment.get(name, "").strip() if name else ""
    if name and not key:
        raise ConfigError(f"the environment variable {name} is empty ({setting})", f"Set it: export {name}=…")
    if not key.isascii() or any(c.isspace() for c in key):
        raise ConfigError(f"the environment variable {name} holds no key", "Keys are one word of ASCII")
    return key


def without(key: str, text: str) -> str:
    """What a service said: some repeat a wrong key in their message."""
    return text.replace(key, HIDDEN) if key else text
