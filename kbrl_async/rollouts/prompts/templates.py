"""Prompt templates, and how the parts of a first prompt come together.

| option | the policy reads |
|---|---|
| `compact` | what a task asks for and the classes: for the project's small policy, which reads nothing else |
| `zero_shot` | the backend's contract with an example of its form, the machine, the problem |
| `one_shot`, `few_shot` | worked examples of the backend, then the same |
| `custom:FILE` | what a TOML file says (`custom`) |

To add one: one entry in `TEMPLATES`. `{source}` is the problem file, `{contract}` the backend's contract, `{hardware}`
what is known of the machine.

Invariant: a budget drops examples, the last ones first, and never a part of the contract or of the problem.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from kbrl_async.errors import ConfigError
from kbrl_async.kernels.backends import Shot, backend
from kbrl_async.kernels.problems.cases import asks, described_text
from kbrl_async.rollouts.prompts import custom
from kbrl_async.rollouts.prompts.budget import UNBOUNDED, TokenBudget
from protocols.records import Problem

TEMPLATES = {
    "compact": "{source}### ModelNew\n",
    "few_shot": "{examples}{contract}",
    "one_shot": "{examples}{contract}",
    "zero_shot": "{contract}",
}
COUNTS = {"zero_shot": 0, "one_shot": 1, "few_shot": 3}
INTRODUCTION = """Worked examples: modules and kernels that replaced them. They are other problems than yours; take
over what helps and nothing else.
"""
_PROBLEM = "\nThe module to replace:\n"


def render_prompt(
    option: str, problem: Problem, contract: str = "c", hardware: str = "", budget: TokenBudget = UNBOUNDED
) -> str:
    """The prompt of `problem` in template `option`. `contract` is a backend's name, or as `"c plan"`."""
    return budget.first_fitting(prompt_forms(option, problem, contract, hardware))


def prompt_forms(option: str, problem: Problem, contract: str = "c", hardware: str = "") -> Iterator[str]:
    """The prompt with all its examples, then with fewer, at last with none."""
    if option.startswith(custom.PREFIX):
        template, count = custom.template_of(option, contract), 3
    elif option in TEMPLATES:
        template, count = TEMPLATES[option], COUNTS.get(option, 0)
    else:
        raise ConfigError(f"no prompt option {option!r}", f"Take one of {', '.join(sorted(TEMPLATES))}")
    told = contract_of(contract)
    shots = backend(contract).shots if "{examples}" in template and " " not in contract else ()
    source = _body(problem.source) if option == "compact" else problem.source
    if option != "compact" and (asked := asks(problem)):
        hardware = f"{asked}\n{hardware}".rstrip()
    for shown in range(min(count, len(shots)), -1, -1):
        yield _filled(template, told, hardware, _examples(shots[:shown]), source)


def contract_of(name: str) -> str:
    """What the candidates of a backend look like. `name` is a backend's, or `"c plan"` for its contract named `plan`.

    :raises ConfigError: there is no such backend, or it has no such contract.
    """
    language, _, kind = name.partition(" ")
    contracts = backend(language).contracts
    if kind not in contracts:
        known = ", ".join(f"{language} {other}".strip() for other in contracts) or "none"
        raise ConfigError(f"no contract {name!r} for prompts", f"Backend {language} has {known}")
    return contracts[kind]


def _filled(template: str, told: str, hardware: str, examples: str, source: str) -> str:
    if hardware and "{hardware}" not in template:
        told = told.replace(_PROBLEM, f"\n{hardware}\n{_PROBLEM}")
    for name, text in (("contract", told), ("examples", examples), ("hardware", hardware)):
        template = template.replace(f"{{{name}}}", text)
    return template.replace("{source}", source)  # last: what a problem says is never taken for a name


def _examples(shots: tuple[Shot, ...]) -> str:
    """The plainest last, next to the problem."""
    if not shots:
        return ""
    return "\n".join([INTRODUCTION, *(worked_example(s.reference, s.kernel, s.speedup) for s in reversed(shots)), ""])


def worked_example(reference: str, kernel: str, speedup: float | None = None) -> str:
    """One example as it stands in a prompt."""
    several = described_text(reference)
    over = "" if several == "1" else f", workloads: {several}"
    speed = f" ({speedup:.2f}× the speed of PyTorch{over})" if speedup is not None else ""
    module, written = reference.rstrip() + "\n", kernel.rstrip() + "\n"
    return f"Module:\n\n```python\n{module}```\n\nIts kernel{speed}:\n\n```python\n{written}```\n"


def _body(source: str) -> str:
    """The comment on top, where a task's instruction stands, and the problem's classes, without imports, blank lines,
    sizes and input code."""
    before_inputs = re.split(r"^def get_input", source, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    said = itertools.takewhile(lambda line: line.startswith("#"), before_inputs)
    kept = [line for line in before_inputs if line.strip() and line.startswith((" ", "class "))]
    return "\n".join([*said, *kept]) + "\n"
