"""Kernels in C under sanitizers: recorded calls are made again by a C program, buffers as long as tensors."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

from kbrl_async.kernels.backends.building.context import BuildContext, ToolRun
from kbrl_async.kernels.backends.c import launch
from kbrl_async.kernels.backends.sanitize import reports
from kbrl_async.kernels.backends.sanitize.parts import (
    Argument,
    RecordedLaunch,
    Sanitized,
    Sanitizes,
    SanitizeTask,
    buffer_file,
)
from kbrl_async.kernels.backends.sanitize.reports import SanitizerFinding
from kbrl_async.kernels.backends.sanitize.sanitize import ENOUGH_ADDRESSES, SANITIZERS, options_of


def sanitize(sanitizer: Sanitizes, task: SanitizeTask, folder: Path) -> Sanitized:
    seen = sanitizer.record(task, folder)
    if not seen.calls:
        return Sanitized(not_run=seen.error or "the model called no kernel")
    sources = _sources(task.candidate)
    findings: list[SanitizerFinding] = []
    for key in dict.fromkeys(call.source_key for call in seen.calls):
        if key not in sources:
            continue
        calls = [call for call in seen.calls if call.source_key == key]
        run = _build_and_run(sanitizer.context, folder, sources[key], calls)
        if run.status is None:
            return Sanitized(tuple(findings), not_run=f"no end within {run.deadline_s:g} s under ASan")
        findings += reports.asan(run.output) + reports.ubsan(run.output)
        if run.status != 0 and not findings:
            words = run.output.strip()[-200:]
            return Sanitized(tuple(findings), not_run=f"the program ended with status {run.status}: {words}")
    left = f"{seen.left_out} more calls were too large to record" if seen.left_out else ""
    return Sanitized(reports.distinct(findings), ("asan", "ubsan"), left)


def _sources(candidate: str) -> dict[str, str]:
    """C sources by key: every string literal of the file, because a kernel's source is one of them."""
    texts = {node.value for node in ast.walk(ast.parse(candidate)) if isinstance(node, ast.Constant)}
    return {launch.source_key(text): text for text in texts if isinstance(text, str)}


def _build_and_run(context: BuildContext, recorded: Path, source: str, calls: list[RecordedLaunch]) -> ToolRun:
    """In a folder of its own: where the candidate could write, a name may be a link to any file of ours. Only the
    confined program opens what lies in `recorded`.
    """
    gcc = shutil.which("gcc") or "/usr/bin/gcc"
    kept = [flag for flag in launch.C_FLAGS if flag not in ("-O3", "-shared", "-fPIC")]
    with context.folder() as folder:
        (folder / "kernel.c").write_text(source)
        (folder / "main.c").write_text(driver(calls, context.memory_bytes >> 20))
        program = str(folder / "run")
        own = [gcc, *kept, *SANITIZERS, "-Dmain=kernel_main", "-c", "kernel.c", "-o", "kernel.o"]
        link = [gcc, "-fopenmp", *SANITIZERS, "main.c", "kernel.o", "-o", program]
        for command in (own, [*link, *launch.C_LIBRARIES]):
            built = context.run(command, folder)
            if built.status != 0:
                return built
        return context.run(
            [program, str(recorded)],
            folder,
            memory_bytes=ENOUGH_ADDRESSES,
            read=(str(recorded),),
            environment={"OMP_NUM_THREADS": "2"},
        )


def driver(calls: list[RecordedLaunch], memory_mb: int = 2048) -> str:
    """The C program that makes recorded calls once more, each with fresh buffers of the recorded sizes. Its argument is
    the folder of the recording.
    """
    head = [
        "#include <stdio.h>",
        "#include <stdlib.h>",
        "#include <unistd.h>",
        "static void *load(const char *name, size_t size) {",
        "  void *p = 0; if (posix_memalign(&p, 64, size)) exit(3);",
        '  FILE *f = fopen(name, "rb"); if (!f || fread(p, 1, size, f) != size) exit(4);',
        "  fclose(f); return p;",
        "}",
    ]
    head += options_of(memory_mb)
    prototypes = {f"void {call.name}({', '.join(map(_c_type, call.arguments)) or 'void'});" for call in calls}
    if len(prototypes) > len({call.name for call in calls}):  # one kernel launched with several shapes of arguments
        prototypes = {f"void {call.name}();" for call in calls}
    body = [line for call in calls for line in _one_call(call)]
    main = ["int main(int count, char **words) {", "  if (count != 2 || chdir(words[1])) exit(5);"]
    return "\n".join([*head, *sorted(prototypes), *main, *body, "  return 0;", "}", ""])


def _one_call(call: RecordedLaunch) -> list[str]:
    loads = [
        f'  void *b{call.index}_{i} = load("{buffer_file(call.index, i)}", {size}u);'
        for i, size in enumerate(call.buffers)
    ]
    words = f'  fprintf(stderr, "{reports.CALL_MARK} {call.index} {call.name}\\n");'
    arguments = ", ".join(_c_value(call.index, argument) for argument in call.arguments)
    frees = [f"  free(b{call.index}_{i});" for i in range(len(call.buffers))]
    return [words, *loads, f"  {call.name}({arguments});", *frees]


def _c_type(argument: Argument) -> str:
    if argument.buffer >= 0:
        return "void *"
    if "double" in argument.declared:
        return "double"
    is_float = "float" in argument.declared or (isinstance(argument.value, float) and not argument.declared)
    return "float" if is_float else "long long"


def _c_value(index: int, argument: Argument) -> str:
    if argument.buffer >= 0:
        return f"(char *)b{index}_{argument.buffer} + {argument.offset}"
    kind = _c_type(argument)
    number = float(argument.value).hex() if kind != "long long" else f"{int(argument.value)}LL"
    special = {"inf": "__builtin_inf()", "-inf": "-__builtin_inf()", "nan": '__builtin_nan("")'}
    return f"({kind}){special.get(number, number)}"
