"""An extension for the CPU under sanitizers: built with them, called in a Python that has their runtime."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from kbrl_async.kernels.backends.building.context import BuildContext
from kbrl_async.kernels.backends.inline.build import Build
from kbrl_async.kernels.backends.inline.flags import chosen
from kbrl_async.kernels.backends.inline.recording import read
from kbrl_async.kernels.backends.inline.toolchain import toolchain
from kbrl_async.kernels.backends.sanitize import reports
from kbrl_async.kernels.backends.sanitize.parts import Sanitized, Sanitizes, SanitizeTask
from kbrl_async.kernels.backends.sanitize.sanitize import (
    ENOUGH_ADDRESSES,
    PACKAGES,
    SANITIZERS,
    options_of,
    python_environment,
)

_OPTIONS_LIBRARY = "options-libasan.so"
"""Loaded before the runtime, whose own weak functions would win otherwise; it insists on being first, by name."""


def sanitize(sanitizer: Sanitizes, task: SanitizeTask, folder: Path) -> Sanitized:
    """The extension built with sanitizers, called by the model itself in a Python that has their runtime."""
    extensions = read(ast.parse(task.candidate))
    if extensions is None:
        return Sanitized(not_run="which extension it compiles can't be read from its text")
    artifacts = {}
    for number, extension in enumerate(extensions):
        flags = chosen(extension, sanitizer.context.farm.arch)
        watched = msgspec.structs.replace(flags, host=[*flags.host, *SANITIZERS], link=[*flags.link, SANITIZERS[-1]])
        build = Build(extension, watched, toolchain(), sanitizer.context)
        attempt = build.fast()
        attempt = attempt if attempt.is_built else build.full()
        if not attempt.is_built:
            return Sanitized(not_run="it can't be built with sanitizers")
        path = folder / f"extension{number}.so"
        path.write_bytes(attempt.content)
        artifacts[extension.key] = str(path)
    (folder / "task.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(task, artifacts=artifacts)))
    return _watched_python(sanitizer.context, folder)


def _watched_python(context: BuildContext, folder: Path) -> Sanitized:
    gcc = shutil.which("gcc") or "/usr/bin/gcc"
    (folder / "options.c").write_text("\n".join(options_of(context.memory_bytes >> 20)))
    built = context.run([gcc, "-shared", "-fPIC", "options.c", "-o", _OPTIONS_LIBRARY], folder)
    runtime = subprocess.run([gcc, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False).stdout
    if built.status != 0 or not os.path.isabs(runtime.strip()):
        return Sanitized(not_run="gcc has no libasan here")
    preload = f"{folder / _OPTIONS_LIBRARY} {Path(runtime.strip()).resolve()}"
    run = context.run(
        [sys.executable, "-m", "kbrl_async.kernels.backends.sanitize.recording", "task.json"],
        folder,
        deadline_s=4 * context.farm.deadline_s,
        memory_bytes=ENOUGH_ADDRESSES,
        read=tuple(map(str, PACKAGES)),
        environment={"LD_PRELOAD": preload, **python_environment(folder)},
    )
    findings = reports.distinct([*reports.asan(run.output), *reports.ubsan(run.output)])
    if run.status == 0 or findings:
        return Sanitized(findings, ("asan", "ubsan"))
    return Sanitized(not_run=f"the model ended with status {run.status}: {run.output.strip()[-200:]}")
