"""Takes the candidate out of a response.

Order: text up to `</think>` is dropped; `<KERNEL>…</KERNEL>` wins; else the last fenced block that defines `ModelNew`
with a forward. Taking the first block instead loses answers that quote the problem or think aloud first.
"""

from __future__ import annotations

import re

import msgspec

TAGGED = re.compile(r"<KERNEL>\s*(.*?)\s*</KERNEL>", re.DOTALL)
FENCED = re.compile(r"^[ \t]*```[\w+-]*[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
MODEL = re.compile(r"^class\s+ModelNew\b.*?def\s+forward\b|^PLAN\s*=\s*\{", re.DOTALL | re.MULTILINE)
"""A module, or a launch plan in its place."""


class Extraction(msgspec.Struct, frozen=True):
    """Exactly one of `source` and `problem` is filled."""

    source: str = ""
    problem: str = ""


def extract(response: str) -> Extraction:
    """The candidate's file, or what is wrong with the response."""
    text = response.rpartition("</think>")[2]
    tagged = TAGGED.findall(text)
    blocks = [_unfence(block) for block in tagged] or FENCED.findall(text + "\n")
    if not blocks:
        return Extraction(problem="no closed code block was found; answer with one ```python … ``` block")
    for block in reversed(blocks):
        if MODEL.search(block):
            return Extraction(source=block.rstrip() + "\n")
    return Extraction(problem="no code block defines `class ModelNew` with a `forward`")


def _unfence(block: str) -> str:
    inner = FENCED.findall(block + "\n")
    return inner[-1] if inner else block
