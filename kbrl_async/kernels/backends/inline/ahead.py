"""Recording what a candidate would compile, by running it: only ever in a confined child.

On tensors without memory, so that a constructor that moves weights to a GPU needs none.
"""

from __future__ import annotations

import socket
import types
from typing import Any

import msgspec
import torch.utils.cpp_extension  # noqa: F401 - 0.15 s that no child has to pay

from kbrl_async.kernels.backends.building import answers
from kbrl_async.kernels.backends.inline import launch as inline
from kbrl_async.kernels.backends.inline.recording import RECORDS, Order, Recorded
from kbrl_async.kernels.backends.launch.pretend import pretend
from kbrl_async.kernels.problems import model_contract as contract
from kbrl_async.kernels.sandbox import Isolation

_MAX_ERROR = 600


class _Stub(types.ModuleType):
    """Stands in for a built extension: any function is there, and gives back what it was given."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: args[0] if args else None


def record_inline(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    """Entry of the confined child."""
    order = msgspec.msgpack.decode(payload, type=Order)
    answers.begin(channel, isolation, order.folder)
    seen: dict[str, inline.Extension] = {}

    def note(extension: inline.Extension, is_python_module: bool) -> _Stub:
        answers.refuse_unreadable(extension)
        seen[extension.key] = extension
        return _Stub(extension.name)

    inline.replace_loaders(note)
    error = _run(order, seen)
    files = {RECORDS: msgspec.msgpack.encode(list(seen.values()))}
    answers.hand_in(channel, Recorded(len(seen), error), files)


def _run(order: Order, seen: dict[str, inline.Extension]) -> str:
    """Import the candidate; construct its model where the import compiled nothing. What stopped it, in words."""
    try:
        pretend("meta", everything=True)
        candidate = contract.load("candidate", order.source, is_file=True)
        if seen:
            return ""
        if not order.problem:
            return "the candidate compiles in its constructor, and no problem was given to construct it for"
        problem = contract.load("problem", order.problem, is_file=True)
        args, named = contract.arguments(problem.get_init_inputs())
        candidate.ModelNew(*args, **named)
    except BaseException as error:  # the candidate's own, SystemExit among them: what was recorded counts
        return f"{type(error).__name__}: {error}"[:_MAX_ERROR]
    return ""
