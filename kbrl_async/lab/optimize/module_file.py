"""The text of `optimized_X.py`: the kernel's own source between a docstring that says how to use it and, for a function
or class, a drop-in of its name. Pure.

The whole file is a candidate again, so that what is verified is what is used.
"""

from __future__ import annotations

from kbrl_async.lab.optimize.targets import Target

_FUNCTION = '''

_module = None


def {name}({signature}):
    """Takes the place of {origin}."""
    global _module
    if _module is None:
        _module = ModelNew()
    return _module({arguments})
'''
_CLASS = "\n\n{name} = ModelNew\n"


def render(target: Target, source: str, file_name: str, backend: str, version: str) -> str:
    """The file that replaces `target` by the kernel in `source`."""
    stem = file_name.removesuffix(".py")
    lines = [
        f'"""{_plain(target.title)}, by a verified kernel (backend {backend}), found by `kbrl optimize` {version}.',
        "",
        f"Usage: {_usage(target, stem)}",
        "",
        f"What was proven, on which inputs and hardware, and how fast it is: {stem}.evidence.md and .json beside this",
        "file. It needs the package kbrl-async, and a C compiler for backend c: the kernel is built at first use.",
        '"""',
        "",
    ]
    return "\n".join(lines) + source.strip("\n") + "\n" + _drop_in(target)


def _usage(target: Target, stem: str) -> str:
    if target.kind == "function":
        return f"from {stem} import {target.name}"
    if target.kind == "class":
        return f"from {stem} import {target.name}; new = {target.name}(…); new.load_state_dict(old.state_dict())"
    return f"from {stem} import ModelNew; new = ModelNew(…); new.load_state_dict(old.state_dict())"


def _drop_in(target: Target) -> str:
    if target.kind == "function":
        names = ", ".join(target.arguments)
        return _FUNCTION.format(name=target.name, signature=names, arguments=names, origin=_plain(target.title))
    return _CLASS.format(name=target.name) if target.kind == "class" and target.name != "ModelNew" else ""


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''").replace("\n", " ")
