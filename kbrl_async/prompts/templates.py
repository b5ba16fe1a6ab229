"""Prompt templates. To add one: one entry in `TEMPLATES`; `{source}` is the problem file.

`compact` is for the project's small policy, which reads nothing but the problem; `zero_shot` explains the contract to a
model that never saw it.
"""

from __future__ import annotations

from kbrl_async.errors import ConfigError
from kbrl_async.prompts.contracts import CONTRACTS
from protocols.records import Problem

TEMPLATES = {
    "compact": "{source}### ModelNew\n",
    "zero_shot": "{contract}",
}


def render_prompt(option: str, problem: Problem, contract: str = "c") -> str:
    """The prompt of `problem` in template `option`. `contract` is a key of `CONTRACTS`, as a backend's name."""
    try:
        template = TEMPLATES[option]
    except KeyError:
        raise ConfigError(f"no prompt option {option!r}", f"Take one of {', '.join(sorted(TEMPLATES))}") from None
    if contract not in CONTRACTS:
        raise ConfigError(f"no contract {contract!r} for prompts", f"Take one of {', '.join(CONTRACTS)}")
    template = template.replace("{contract}", CONTRACTS[contract])
    return template.replace("{source}", _body(problem.source) if option == "compact" else problem.source)


def _body(source: str) -> str:
    """The problem's classes without imports, blank lines, sizes and input code."""
    before_inputs = source.partition("\ndef get_inputs")[0]
    kept = [line for line in before_inputs.splitlines() if line.strip() and line.startswith((" ", "class "))]
    return "\n".join(kept) + "\n"
