"""A correct candidate's kernels on a GPU: by Nsight Compute where the host has and allows it, else a timeline."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from kbrl_async.kernels.backends.building.context import BuildContext
from kbrl_async.kernels.backends.sanitize.parts import SanitizeTask
from kbrl_async.kernels.backends.sanitize.sanitize import ENOUGH_ADDRESSES, PACKAGES, python_environment
from kbrl_async.kernels.profile import nsight
from kbrl_async.kernels.profile.facts import KernelFacts
from kbrl_async.kernels.profile.watched import TIMELINE_FILE
from kbrl_async.kernels.sandbox import BadOutput, read_output
from protocols.records import Candidate, Problem

_MODULE = "kbrl_async.kernels.profile.watched"
_DEADLINE_S = 120.0
_MAX_TIMELINE = 1 << 16
_PASSED = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")


def kernels(
    context: BuildContext, problem: Problem, candidate: Candidate, artifacts: dict[str, str], device: str
) -> tuple[tuple[KernelFacts, ...], str]:
    """What ran in one forward, longest first, and why there is not more; both may be empty."""
    with context.folder() as folder:
        task = SanitizeTask(problem.source, candidate.source, artifacts, str(folder), device, backend=candidate.backend)
        (folder / "task.json").write_bytes(msgspec.json.encode(task))
        environment = {**python_environment(folder), **{n: os.environ[n] for n in _PASSED if n in os.environ}}
        found, why = _by_nsight(context, task, folder, environment)
        return (found, why) if found else _timeline(context, task, folder, environment, why)


def _by_nsight(
    context: BuildContext, task: SanitizeTask, folder: Path, environment: dict[str, str]
) -> tuple[tuple[KernelFacts, ...], str]:
    program = nsight.program()
    if not program:
        return (), "occupancy and stalls: Nsight Compute (ncu) is not installed"
    command = nsight.command(program, _MODULE, "task.json")
    output = _run(context, command, task, folder, environment, *nsight.folders(program))
    if nsight.FORBIDDEN in output:
        return (), "occupancy and stalls: this host lets only administrators read the GPU's counters"
    found = nsight.read(output)
    return found, "" if found else f"occupancy and stalls: Nsight Compute gave no table{_last_words(output)}"


def _last_words(output: str) -> str:
    """What it said at the end, in brackets: most often the reason."""
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    plain = "".join(letter for letter in last.strip()[:120] if letter.isprintable())
    return f" ({plain})" if plain else ""


def _timeline(
    context: BuildContext, task: SanitizeTask, folder: Path, environment: dict[str, str], why: str
) -> tuple[tuple[KernelFacts, ...], str]:
    output = _run(context, [sys.executable, "-m", _MODULE, "task.json", "--timeline"], task, folder, environment)
    try:
        data = read_output(folder, TIMELINE_FILE, _MAX_TIMELINE)
        return tuple(map(_plain, msgspec.json.decode(data, type=list[KernelFacts]))), why
    except (BadOutput, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):  # written where the candidate ran
        return (), (f"{why}; no timeline either" if why else "no timeline") + _last_words(output)


def _plain(kernel: KernelFacts) -> KernelFacts:
    """The fields that a timeline has, and a name without line breaks."""
    name = "".join(letter for letter in kernel.name[:80] if letter.isprintable())
    return KernelFacts(name, kernel.us, kernel.calls)


def _run(
    context: BuildContext, command: list[str], task: SanitizeTask, folder: Path, environment: dict[str, str], *read: str
) -> str:
    return context.run(
        command,
        folder,
        deadline_s=_DEADLINE_S,
        memory_bytes=ENOUGH_ADDRESSES,
        read=(*task.artifacts.values(), *map(str, PACKAGES), *read),
        environment=environment,
        on_gpu=task.device.startswith("cuda"),
    ).output
