"""Compiler flags of extensions: what candidates may choose, what is ours to choose, what is refused.

Refused is what reads files, loads plug-ins or runs programs. An architecture is ours: the bench's GPU decides it.
"""

from __future__ import annotations

import re
import shlex

import msgspec

from kbrl_async.kernels.backends.inline.launch import Extension

_HOST = re.compile(
    r"-O([0-3sgz]|fast)?|-std=(c|gnu)\+\+\w+|-f(?!plugin|profile|dump|compare|lto|use-ld)[\w=,-]+|-m[\w.=+-]+|-W(?!l,|p,|a,)[\w=+-]*"
    r"|-w|-g\d?|-D\w+(=[\w.+\"'-]*)?|-U\w+|-pthread|-pipe|-ansi|-pedantic|-shared"
)
_NVCC_ALONE = re.compile(
    r"-O[0-3]|-{1,2}use_fast_math|-{1,2}(generate-)?line-?info|-{1,2}maxrregcount[= ]?\d+|-{1,2}fmad=(true|false)"
    r"|-{1,2}(ftz|prec-div|prec-sqrt)=(true|false)|-{1,2}std=c\+\+\d+|-D\w+(=[\w.+\"'-]*)?|-U\w+|-w|-g"
    r"|-{1,2}(expt-)?(relaxed-constexpr|extended-lambda)|-{1,2}extra-device-vectorization|-{1,2}restrict"
    r"|-{1,2}default-stream[= ](legacy|null|per-thread)|-(diag-suppress|Xcudafe)[= ]?[\w=,-]+"
    r"|-{1,2}(ptxas-options|Xptxas)=?[\w=,-]+|-{1,2}resource-usage|-{1,2}split-compile[= ]?\d+|-lineinfo"
)
_NVCC_PAIRS = {"-Xptxas": re.compile(r"[\w=,-]+"), "--ptxas-options": re.compile(r"[\w=,-]+")}
_NVCC_HOST = ("-Xcompiler", "--compiler-options")
_VALUED = ("-maxrregcount", "--maxrregcount", "-std", "--std", "-Xcudafe", "-diag-suppress", "--diag-suppress")
_OURS = re.compile(
    r"-{1,2}(gencode|arch|generate-code|gpu-architecture|gpu-code|code)\b|-t=?\d*$|-{1,2}threads|-{1,2}verbose$|-v$"
)
_ARCH = re.compile(r"(?:sm|compute)_(\d+[af]?)")
_LIBRARIES = frozenset(
    [
        *("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda", "torch_python", "cublas", "cublasLt", "cudnn", "cuda"),
        *("cudart", "cusparse", "cusolver", "curand", "cufft", "nvrtc", "m", "pthread", "gomp", "stdc++", "dl", "rt"),
    ]
)
_LD_IGNORED = re.compile(
    r"-L.*|-Wl,(-rpath|--no-as-needed|--as-needed|-O\d|-s\b|--strip-all|-z,(now|relro|defs)).*|-shared|-s"
)
_MAX_LETTERS = 1 << 15
_OURS_WITH_VALUE = frozenset(
    ("gencode", "arch", "generate-code", "gpu-architecture", "gpu-code", "code", "threads", "t")
)


class FlagRefused(Exception):  # noqa: N818 - an answer, turned into a report
    """A flag that no extension needs; its text names it."""


class Flags(msgspec.Struct, frozen=True):
    host: list[str]
    nvcc: list[str]
    libraries: list[str]
    """Names for `-l`."""
    link: list[str]
    arch: str
    """As `sm_90a`."""


def chosen(extension: Extension, arch: str) -> Flags:
    """The flags that an extension is built with for `arch`. Raises `FlagRefused`."""
    cflags, named = _without_libraries(_split(extension.cflags))
    given, more = _without_libraries(_split(extension.cuda_cflags))
    host = [_checked(flag, _HOST) for flag in cflags]
    libraries, link = _link([*_split(extension.ldflags), *named, *more])
    if "-fopenmp" in host and "-fopenmp" not in link:
        link.append("-fopenmp")  # torch's own loader needs no such flag: its libraries bring an OpenMP along
    for path in extension.include_paths:
        if not path.startswith(("/usr/local/cuda", "/usr/include")):
            raise FlagRefused(f"extra_include_paths={path!r}")
    return Flags(host, _nvcc(given), libraries, link, _arch(given, arch))


def _split(flags: tuple[str, ...]) -> list[str]:
    """torch writes flags into a shell line: one string may hold several."""
    if sum(map(len, flags)) > _MAX_LETTERS:  # more than a command may have
        raise FlagRefused(f"{flags[0][:80]} … of {sum(map(len, flags))} letters")
    try:
        return [word for flag in flags for word in shlex.split(flag)]
    except ValueError as error:
        raise FlagRefused(" ".join(flags)) from error


def _without_libraries(words: list[str]) -> tuple[list[str], list[str]]:
    """Flags for a compiler, and those for the linker that some write among them, where a compiler overlooks them."""
    kept, named = list[str](), list[str]()
    for word in words:
        is_value = bool(kept) and kept[-1] in (*_NVCC_PAIRS, *_NVCC_HOST, *_VALUED)
        is_library = word.startswith("-l") and word[2:] in _LIBRARIES and not is_value
        (named if is_library else kept).append(word)
    return kept, named


def _checked(flag: str, allowed: re.Pattern[str]) -> str:
    if not allowed.fullmatch(flag):
        raise FlagRefused(flag)
    return flag


def _nvcc(words: list[str]) -> list[str]:
    kept, rest = [], iter(words)
    for word in rest:
        name, _, value = word.partition("=")
        if name in _NVCC_HOST:
            values = (value or next(rest, "")).strip("'\"").split(",")
            kept += ["-Xcompiler", ",".join(_checked(item, _HOST) for item in values if item)]
        elif word in _NVCC_PAIRS:
            kept += [word, _checked(next(rest, ""), _NVCC_PAIRS[word])]
        elif word in _VALUED:
            kept += [word, _checked(next(rest, ""), re.compile(r"[\w=,+-]+"))]
        elif _OURS.match(word):
            if word.lstrip("-") in _OURS_WITH_VALUE:
                next(rest, "")
        else:
            kept.append(_checked(word, _NVCC_ALONE))
    return kept


def _arch(words: list[str], arch: str) -> str:
    """The bench's; with its family letter where the candidate asks for that one's special instructions."""
    number = arch.removeprefix("sm_").rstrip("af")
    asked = {found for word in words for found in _ARCH.findall(word)}
    special = sorted(found for found in asked if found.rstrip("af") == number and found != number)
    return f"sm_{special[0]}" if special else f"sm_{number}"


def _link(words: list[str]) -> tuple[list[str], list[str]]:
    libraries, link, rest = [], [], iter(words)
    for word in rest:
        name = word[2:] or next(rest, "") if word.startswith("-l") else ""
        if name:
            if name not in _LIBRARIES:
                raise FlagRefused(f"-l{name}")
            libraries.append(name)
        elif word in ("-fopenmp", "-pthread"):
            link.append(word)
        elif not _LD_IGNORED.fullmatch(word):
            raise FlagRefused(word)
    return libraries, link
