"""The last step: the best few kernels as the very files that people would use, verified from disk, longer.

The search times hundreds of kernels briefly; the one that looked fastest was lucky too. So the best few are written to
hidden files, read back, verified on new secret inputs and timed anew for longer; the surest of them wins.

Invariant: the file's name appears only after its bytes were verified; it is put there by one rename, and nothing else
ever writes it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from kbrl_async.errors import InfraError, UserError
from kbrl_async.kernels.backends.checks.arithmetic import MEANS, arithmetic_options
from kbrl_async.kernels.funnel import Result, VerifyOptions
from kbrl_async.kernels.funnel.verifier import default_bench
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.timing import Recipe
from kbrl_async.kernels.timing.recipe import CAREFUL_PAIRS_A_PLACE
from kbrl_async.lab.optimize.driver import Verifies
from kbrl_async.lab.optimize.targets import UserModule
from protocols.records import Candidate, Problem

FINALISTS = 3
CAREFUL = Recipe.of(
    TimingBench(min_pairs=20, max_pairs=200, cap_s=1.5),
    warmup_s=0.025,
    resolution=0.01,
    margin=0.02,
    pairs_a_place=CAREFUL_PAIRS_A_PLACE,
    patience_s=5.0,
    reject_cap=8,
    enough_below=0.0,
)


class Final(msgspec.Struct, frozen=True):
    """One finalist's second examination."""

    attempt: int
    result: Result
    sha256: str
    """Of the file that was verified."""


class Proof(msgspec.Struct, frozen=True):
    """`path` is there, and its bytes are those of `winner`."""

    path: str
    winner: Final


def careful_options(options: VerifyOptions) -> VerifyOptions:
    """The same verification with a longer measurement."""
    bench = options.bench or default_bench(options.cores)
    return msgspec.structs.replace(options, bench=msgspec.structs.replace(bench, recipe=CAREFUL))


def prove(
    texts: Mapping[int, str],
    problem: Problem,
    verifier: Verifies,
    path: Path,
    backend: str,
    allow_slower: bool = False,
    is_over: Callable[[], bool] = lambda: False,
    to_beat: int | None = None,
) -> tuple[Proof | None, tuple[Final, ...]]:
    """Writes `path` with the surest finalist; None, and no file, where none holds. Blocks for seconds.

    :param texts: the whole file, by the number of the attempt that it would be made of, the best first.
    :param is_over: asked before each but the first one, whether there is time for it.
    :param to_beat: the first of them, where another has to be faster than it: one whose whole interval lies above its
        speedup. The first two are examined then, whatever time is left.
    :raises UserError: the folder can't be written.
    """
    finals: list[Final] = []
    with contextlib.ExitStack() as stack:
        hidden: dict[int, Path] = {}
        for number, text in texts.items():
            if len(finals) > (to_beat is not None) and is_over():
                break
            hidden[number] = stack.enter_context(_hidden(path, number))
            finals.append(_examine(number, text, hidden[number], problem, verifier, backend))
        held = _faster_than(to_beat, [f for f in finals if f.result.ok])
        held = [final for final in held if allow_slower or _is_faster(final)]
        if not held:
            return None, tuple(finals)
        winner = max(held, key=_floor)
        if _sha256(hidden[winner.attempt].read_bytes()) != winner.sha256:
            raise InfraError(f"{hidden[winner.attempt]} has changed since it was verified", "Try again")
        os.replace(hidden[winner.attempt], path)
    return Proof(str(path), winner), tuple(finals)


def _examine(number: int, text: str, hidden: Path, problem: Problem, verifier: Verifies, backend: str) -> Final:
    try:
        hidden.write_text(text)
    except OSError as error:
        raise UserError(f"{hidden.parent} can't be written: {error.strerror}", "Give --output FILE elsewhere") from None
    data = hidden.read_bytes()
    result = verifier.verify(problem, Candidate(data.decode(), backend))
    return Final(number, result, _sha256(data))


@contextlib.contextmanager
def _hidden(path: Path, number: int) -> Iterator[Path]:
    """A name beside `path` that is gone afterwards."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}.{number}")
    try:
        yield hidden
    finally:
        hidden.unlink(missing_ok=True)


def _is_faster(final: Final) -> bool:
    return final.result.timing is not None and final.result.timing.is_faster


def _faster_than(number: int | None, right: list[Final]) -> list[Final]:
    """Those that are shown to be faster than the one of this number; it alone where none is, all where it is wrong."""
    first = next((final for final in right if final.attempt == number), None)
    if first is None:
        return right
    timing = first.result.timing
    bar = math.inf if timing is None or timing.is_disturbed else timing.speedup
    return [final for final in right if _floor(final) > bar] or [first]


def _floor(final: Final) -> float:
    return final.result.timing.lo if final.result.timing is not None else 0.0


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ── the text of the file ─────────────────────────────────────────────────────────────────────────────────────────────


_FUNCTION = '''

_module = None


# By a rule of kbrl optimize.
def {name}({signature}):
    """Takes the place of {origin}."""
    global _module
    if _module is None:
        _module = ModelNew()
    return _module({arguments})
'''
_CLASS = "\n\n{name} = ModelNew  # by a rule of kbrl optimize\n"


def render(target: UserModule, source: str, file_name: str, backend: str, author: str, version: str) -> str:
    """The file that replaces `target` by the kernel in `source`, which `author` wrote; itself a candidate again."""
    stem, drop_in, options = file_name.removesuffix(".py"), _drop_in(target), arithmetic_options(source)
    last = f" but those of the last part, which makes it take the place of {target.name}" if drop_in else ""
    lines = [
        f"{_plain(target.title)}, by a verified kernel (backend {backend}), found by `kbrl optimize` {version}.",
        f"Written by {_plain(author)}: every line of code{last}.",
        *([f"Compiled with {', '.join(options)}: {MEANS}."] if options else []),
        "",
        f"Usage: {_usage(target, stem)}",
        "",
        f"What was proven, on which inputs and hardware, and how fast it is: {stem}.evidence.md and .json beside this",
        "file. It needs the package kbrl-async, and a C compiler for backend c: the kernel is built at first use.",
    ]
    return _as_head(lines, source) + source.strip("\n") + "\n" + drop_in


def _as_head(lines: Sequence[str], source: str) -> str:
    """A docstring; comments where the source has one, as imports of __future__ may stand behind that alone."""
    try:
        has_own = ast.get_docstring(ast.parse(source)) is not None
    except SyntaxError:
        has_own = False
    if has_own:
        return "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return "\n".join(['"""' + lines[0], *lines[1:], '"""', ""])


def _usage(target: UserModule, stem: str) -> str:
    if target.kind == "function":
        return f"from {stem} import {target.name}"
    if target.kind == "class":
        return f"from {stem} import {target.name}; new = {target.name}(…); new.load_state_dict(old.state_dict())"
    return f"from {stem} import ModelNew; new = ModelNew(…); new.load_state_dict(old.state_dict())"


def _drop_in(target: UserModule) -> str:
    if target.kind == "function":
        names = ", ".join(target.arguments)
        return _FUNCTION.format(name=target.name, signature=names, arguments=names, origin=_plain(target.title))
    return _CLASS.format(name=target.name) if target.kind == "class" and target.name != "ModelNew" else ""


def _plain(text: str) -> str:
    """One line of a docstring or of comments: a file's name may hold anything that ends one."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return shown.replace("\\", "/").replace('"""', "'''")
