"""Compiler options of a candidate by which its arithmetic may differ from what its source says, found in its text.

They are a choice that a candidate may make and has to survive verification with. It was verified on the inputs that it
was given; on others, NaN and infinity above all, such a kernel may differ, so whoever uses it has to know.
"""

from __future__ import annotations

import re

MEANS = "sums may be reordered, quotients approximated, and NaN and infinity are taken never to occur"
_LOOSE = (
    *("Ofast", "ffast-math", "funsafe-math-optimizations", "fassociative-math", "freciprocal-math"),
    *("ffinite-math-only", "fno-signed-zeros", "fno-signaling-nans", "fcx-limited-range"),
)
_FLAG = re.compile(rf"(?<![\w-])-(?:{'|'.join(_LOOSE)})(?![\w-])")
_CUDA = re.compile(r"(?<![\w-])-{1,2}(?:use_fast_math|ftz=true|prec-div=false|prec-sqrt=false)(?![\w-])")
_OPTIMIZE = re.compile(r"\boptimize(?:__)?\s*\(([^()]*)\)")
_WORD = re.compile(r"[\w-]+")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def arithmetic_options(source: str) -> tuple[str, ...]:
    """As a compiler would be given them, `-Ofast`, whether as a flag, a pragma or an attribute; each once."""
    text = _COMMENT.sub(" ", source)
    found = [*_FLAG.findall(text), *_CUDA.findall(text)]
    for words in _OPTIMIZE.findall(text):
        found += [flag for word in _WORD.findall(words) if (flag := _as_flag(word)).removeprefix("-") in _LOOSE]
    return tuple(dict.fromkeys(found))


def _as_flag(word: str) -> str:
    """GCC takes `"Ofast"`, `"fast-math"` and `"-ffast-math"`."""
    bare = word.lstrip("-")
    return f"-{bare}" if bare.startswith(("O", "f")) and bare in _LOOSE else f"-f{bare}"
