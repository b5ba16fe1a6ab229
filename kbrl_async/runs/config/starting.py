"""Starting from the policy of a run: `model_name=runs/NAME`, a folder of its policies, or `…/checkpoints/final`; or
from a folder of the small policy, as it was made or exported.

::

    model_name=runs/default ─at_policy─▶ …/runs/default/policies/policy-v14, which is what the new run stores
                             inherited ─▶ …/runs/default/config.yaml ─how_asked─▶ prompt, backend, max_tokens below all
    model_name=./my-model ─ taught ─▶ ./my-model/sft.json: its prompt and backend, below all
    model_name=owner/name ─ is_small ─▶ no: the learner's settings of a real model (`presets.REAL_MODEL`), below all

Only names and small files are looked at; `origins` loads what is named.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kbrl_async.durable import numbered
from kbrl_async.errors import CheckpointError
from kbrl_async.runs.config.schema import Config
from kbrl_async.runs.config.sources import Setting, from_file
from kbrl_async.weights import MADE, POLICY_PREFIX

RUN_FILE = "config.yaml"
POLICIES = "policies"


def at_policy(setting: Setting) -> Setting:
    """A model_name that is a run, or its final checkpoint, as the folder of the run's newest policy.

    :raises CheckpointError: the run has none yet.
    """
    if setting.key != "model_name" or not isinstance(setting.value, str):
        return setting
    named = Path(setting.value).expanduser()
    run = named.parent.parent if named.parts[-2:] == ("checkpoints", "final") else named
    if not (run / RUN_FILE).is_file():
        return setting
    found = numbered(run / POLICIES, POLICY_PREFIX)
    if not found:
        cause = f"model_name: {run} holds no policy yet ({setting.origin})"
        raise CheckpointError(cause, "The run publishes one once its learner is ready")
    return msgspec.structs.replace(setting, value=str(found[-1][1].resolve()))


def inherited(settings: Sequence[Setting]) -> Path | None:
    """The configuration of the run that the policy among `settings` belongs to; None where it is no run's."""
    policy = Path(_named(settings))
    stored = policy.parent.parent / RUN_FILE
    return stored if policy.parent.name == POLICIES and stored.is_file() else None


def is_small(settings: Sequence[Setting]) -> bool:
    """Whether the policy among `settings` is one of the project's own, or was trained from one."""
    name = _named(settings)
    if name in ("", Config().model_name):
        return True
    if (stored := inherited(settings)) is not None:
        return is_small(from_file(stored))
    return (Path(name).expanduser() / MADE).is_file()


def taught(settings: Sequence[Setting]) -> list[Setting]:
    """The prompt and the language that a small policy was taught, where `model_name` is the folder of one."""
    made = Path(_named(settings)).expanduser() / MADE
    try:
        options = json.loads(made.read_text())["options"]
        option, _, file = options["prompt_option"].partition(":")
        values = {"prompt.option": option, "backend": options["backend"], **({"prompt.file": file} if file else {})}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [Setting(key, value, str(made)) for key, value in values.items()]


def _named(settings: Sequence[Setting]) -> str:
    """The policy among `settings`; empty where none is named."""
    return next((str(setting.value) for setting in reversed(settings) if setting.key == "model_name"), "")


def how_asked(config: Config, origin: str) -> list[Setting]:
    """What a policy of the run of `config` is used to: prompts, the language of its kernels, the length of answers."""
    prompt = {**msgspec.to_builtins(config.prompt), "option": config.prompt_option.partition(":")[0]}
    if config.prompt.option == "raicl":
        prompt |= {"option": "raicl", "base": config.prompt_option}
    values = {f"prompt.{name}": value for name, value in prompt.items()}
    values |= {"backend": config.backend, "max_tokens": config.max_tokens}
    return [Setting(key, value, origin) for key, value in values.items()]
