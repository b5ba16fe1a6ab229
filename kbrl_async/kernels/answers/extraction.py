"""Takes the candidate out of a response, however messy.

Order: thoughts are dropped; `<KERNEL>…</KERNEL>` wins; else the last fenced block that defines `ModelNew` with a
forward. Taking the first block instead loses answers that quote the problem or think aloud first. A response without
any fence is taken whole where it is a Python file.

::

    response ─ without thoughts ─▶ text ─▶ tagged or fenced blocks ─ tidy ─▶ the last that defines the model
                                                 └─ a fence in the code's own text: the first end that parses

Invariants
* Nothing is repaired: what was cut off, or is a diff, is said to be so. Only the wrapping is taken off (line ends,
  indentation and quote marks of the block, HTML escapes of the whole of it).
* Nothing is executed.
"""

from __future__ import annotations

import ast
import html
import re
import textwrap
import warnings
from collections.abc import Iterator

import msgspec

from kbrl_async.kernels.answers.thoughts import is_cut_off, without_thoughts

TAGGED = re.compile(r"<KERNEL>(.*?)</KERNEL>", re.DOTALL | re.IGNORECASE)
MODEL = re.compile(r"^class\s+ModelNew\b.*?def\s+forward\b|^PLAN\s*=\s*\{", re.DOTALL | re.MULTILINE)
"""A module, or a launch plan in its place."""
_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<mark>`{3,}|~{3,})(?P<info>[^`\n]*)$")
_DIFF = re.compile(r"^\+class\s+ModelNew\b", re.MULTILINE)
_ESCAPED = re.compile(r"&(?:lt|gt|amp|quot|#39|#x27);")
INNER = 8
"""Most fences inside of one block that are looked past."""
MOST_INNER = 64
"""And in all: a response is hostile text, and extraction runs where others wait."""
_INVISIBLE = dict.fromkeys(map(ord, "\0\ufeff\u200b\u200c\u200d\u2060"))
NO_BLOCK = "no closed code block was found; answer with one ```python … ``` block"


class Extraction(msgspec.Struct, frozen=True):
    """Exactly one of `source` and `problem` is filled."""

    source: str = ""
    problem: str = ""


def extract(response: str, *, opened_thought: bool = False) -> Extraction:
    """The candidate's file, or what is wrong with the response.

    `opened_thought`: the prompt ended in `<think>`, so the response begins inside of it.
    """
    plain = response.replace("\r\n", "\n").replace("\r", "\n").translate(_INVISIBLE)
    text = without_thoughts(plain, opened=opened_thought)
    if is_cut_off(plain, opened=opened_thought):
        return Extraction(problem="the response ended before its thought did; " + NO_BLOCK)
    tagged = [_inside(block) for block in TAGGED.findall(text)]
    for block in reversed(tagged):
        if MODEL.search(block):
            return Extraction(block)
    blocks = list(_blocks(text))
    for block in reversed(blocks):
        if MODEL.search(block):
            return Extraction(_inside(block) if _FENCE.match(block.partition("\n")[0]) else block)
    if not blocks and not tagged and "```" not in text and "~~~" not in text:
        bare = _tidy(text)
        if MODEL.search(bare) and _parses(bare):
            return Extraction(bare)
    return Extraction(problem=_problem(blocks or tagged))


def _problem(blocks: list[str]) -> str:
    if not blocks:
        return NO_BLOCK
    if any(_DIFF.search(block) for block in blocks):
        return "the code block is a diff; answer with the whole file, no code block defines `class ModelNew`"
    return "no code block defines `class ModelNew` with a `forward`"


def _inside(tagged: str) -> str:
    """What stands in a pair of tags: its last fenced block, or all of it."""
    blocks = list(_blocks(tagged))
    return next((block for block in reversed(blocks) if MODEL.search(block)), _tidy(tagged))


def _blocks(text: str) -> Iterator[str]:
    """The fenced blocks, in order. As in CommonMark an end is as long as its beginning and carries no word."""
    lines = text.split("\n")
    fences = [(at, found) for at, line in enumerate(lines) if (found := _FENCE.match(_unquoted(line)))]
    after = looked_past = 0
    for number, (at, opened) in enumerate(fences):
        if at < after:
            continue
        ends = [end for end, fence in fences[number + 1 : number + 2 + INNER] if _closes(fence, opened["mark"])]
        ends = ends or [end for end, fence in fences[number + 1 :] if _closes(fence, opened["mark"])][:1]
        if not ends:
            yield from _glued(lines[at + 1 :], opened["mark"])
            return
        body, after = _body(lines, at, ends if looked_past < MOST_INNER else ends[:1])
        looked_past += len(ends) - 1
        yield body


def _body(lines: list[str], start: int, ends: list[int]) -> tuple[str, int]:
    """The block from `start` to its end, and the line after it.

    Code may hold fences itself, in a docstring say: then the block goes to the first end with which it parses.
    """
    nearest = _tidy("\n".join(lines[start + 1 : ends[0]]))
    may_go_on = len(ends) > 1 and (_is_torn(nearest) or (MODEL.search(nearest) and not _parses(nearest)))
    for end in ends[1:] if may_go_on else []:
        body = _tidy("\n".join(lines[start + 1 : end]))
        if MODEL.search(body) and _parses(body):
            return body, end + 1
    return nearest, ends[0] + 1


def _is_torn(code: str) -> bool:
    """An open string at its end: the fence that ended it stood in that string."""
    return code.count('"""') % 2 == 1 or code.count("'''") % 2 == 1


def _closes(fence: re.Match[str], mark: str) -> bool:
    return fence["mark"].startswith(mark) and not fence["info"].strip()


def _glued(rest: list[str], mark: str) -> Iterator[str]:
    """A block whose end stands behind its last line of code, at the end of the response."""
    body = "\n".join(rest).rstrip()
    if body.endswith(mark):
        yield _tidy(body.removesuffix(mark))


def _unquoted(line: str) -> str:
    return re.sub(r"^[ \t]*> ?", "", line)


def _tidy(code: str) -> str:
    """Without what wraps it: quote marks, common indentation, invisible characters, HTML escapes."""
    lines = code.replace("\u00a0", " ").split("\n")
    if any(line.strip() for line in lines) and all(line.lstrip().startswith(">") for line in lines if line.strip()):
        lines = [_unquoted(line) for line in lines]
    text = textwrap.dedent("\n".join(lines)).strip("\n").rstrip() + "\n"
    return html.unescape(text) if _ESCAPED.search(text) and "<" not in text else text


def _parses(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings: the candidate's own affair
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def kernel_span(response: str, source: str) -> tuple[int, int]:
    """Characters of the response that `extract` took as `source`; (0, 0) where they are not in it."""
    text = source.rstrip()
    start = response.rfind(text) if text else -1
    return (start, start + len(text)) if start >= 0 else (0, 0)
