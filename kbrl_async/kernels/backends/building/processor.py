"""Which instruction sets a build may use, and which of them a host's processor lacks.

::

    farm: gcc -march=… ─ needed() ─▶ BuildReport.cpu ─▶ bench: lacking() ─ some ─▶ an error of ours (I4), no verdict

A compiler uses what `-march` names wherever it likes: on an older processor an innocent kernel dies of it.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from kbrl_async.errors import InfraError, MissingTool

NATIVE = "native"
_VECTORS = ("avx", "sse", "ssse", "fma", "bmi", "amx", "f16c", "gfni", "vaes", "vpclmulqdq", "popcnt", "movbe", "adx")
"""How the extensions begin that code is generated for; but for `_`, `.` and `-`, gcc and the kernel name most alike."""
_ENABLED = re.compile(r"^\s+-m([\w.-]+)\s+\[enabled\]", re.MULTILINE)
_OTHER_NAMES = {"sse3": "pni", "bmi": "bmi1"}
_NOT_EXTENSIONS = frozenset({"sse2avx", "sse4"})


def needed(gcc: str, march: str) -> tuple[str, str]:
    """The resolved architecture, such as `znver4`, and all that gcc says of it.

    :raises MissingTool: gcc does not know it.
    """
    query = [gcc, f"-march={march}", "-Q", "--help=target"]
    run = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    if run.returncode:
        cause = f"{gcc} knows no architecture '{march}' (compile_farm.march)"
        raise MissingTool(cause, f"Take one that `{gcc} --target-help` lists, or native")
    found = re.search(r"-march=\s+(\S+)", run.stdout)
    return (found[1] if found else march), run.stdout


def extensions(help_target: str) -> str:
    """Instruction sets that gcc's `-Q --help=target` shows as enabled, as the kernel names them."""
    enabled = {_plain(name) for name in _ENABLED.findall(help_target)} - _NOT_EXTENSIONS
    return " ".join(sorted(_OTHER_NAMES.get(name, name) for name in enabled if name.startswith(_VECTORS)))


def lacking(needs: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """What of `needs` this host's processor can't do; nothing where it does not say what it can."""
    here = _flags(cpuinfo)
    return [name for name in needs.split() if name not in here] if here else []


def check_processor(needs: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """:raises InfraError: what was built can't run here, and that is nobody's fault but ours (I4)."""
    if unknown := lacking(needs, cpuinfo):
        what = f"it was built for a newer processor than this host's, which knows no {' '.join(unknown[:5])}"
        raise InfraError(what, "Set compile_farm.march to what all hosts can do, such as x86-64-v3")


@functools.cache
def _flags(cpuinfo: Path) -> frozenset[str]:
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    return _all_plain(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _all_plain(names: Iterable[str]) -> frozenset[str]:
    return frozenset(_plain(name) for name in names)


def _plain(name: str) -> str:
    return re.sub(r"[_.-]", "", name)
