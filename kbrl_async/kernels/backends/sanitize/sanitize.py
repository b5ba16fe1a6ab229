"""Runs a candidate's kernels under sanitizers: they see what a right answer hides, as one element written too far.

::

    c     recording child ─calls, buffers─▶ a C program, each buffer as long as its tensor ─ASan, UBSan─▶ findings
    cpp   extension built with ASan, UBSan ─▶ the model in a Python that has their runtime loaded ─▶ findings
    cuda, cuda-nvrtc, triton on a GPU      the model in one process under compute-sanitizer's tools ─▶ findings

All of it is confined like a compiler. A candidate can hide from a sanitizer (it runs in the same process), so a clean
report is a hint and a finding is the candidate's fault.

How to add a backend: a function of (`Sanitizer`, `Task`, folder) that gives `Sanitized`, and one line in `_WAYS`.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import kbrl_async
import protocols
from kbrl_async.kernels.backends.building.context import BuildContext, BuildOptions, ToolRun, isolation_of
from kbrl_async.kernels.backends.building.store import ArtifactStore
from kbrl_async.kernels.backends.c import launch
from kbrl_async.kernels.backends.inline import (
    flags as inline_flags,
)
from kbrl_async.kernels.backends.inline import (
    recording as inline_recording,
)
from kbrl_async.kernels.backends.inline import (
    toolchain as inline_toolchain,
)
from kbrl_async.kernels.backends.inline.build import Build
from kbrl_async.kernels.backends.sanitize import recording, reports
from kbrl_async.kernels.backends.sanitize.recording import CALLS_FILE, Argument, Call, Recording, Task, buffer_file
from kbrl_async.kernels.backends.sanitize.reports import Finding
from kbrl_async.kernels.sandbox import Access, BadOutput, Limits, Zygote, read_output
from protocols.records import Candidate, Problem

_C_SANITIZERS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined")
_ENOUGH_ADDRESSES = 1 << 46
"""ASan reserves terabytes of addresses; its own limit on one allocation holds instead."""
_OPTIONS = {
    "asan": "detect_leaks=0:abort_on_error=0:allocator_may_return_null=1:max_allocation_size_mb={memory}",
    "ubsan": "print_stacktrace=0:halt_on_error=0",
}
"""Compiled into the program: the runtime reads them from /proc, which is not there for a confined process."""
_OPTIONS_LIBRARY = "options-libasan.so"
"""Loaded before the runtime, whose own weak functions would win otherwise; it insists on being first, by name."""
_MAX_RECORDING = 4 << 20
"""Bytes of `calls.json`: far more than `Task.max_calls` calls with tens of arguments each."""
_PACKAGES = [Path(protocols.__file__).resolve().parent, Path(kbrl_async.__file__).resolve().parent]
GPU_TOOLS = ("memcheck", "racecheck", "initcheck")
_COMPUTE_SANITIZER = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")


class Sanitized(msgspec.Struct, frozen=True):
    findings: tuple[Finding, ...] = ()
    ran: tuple[str, ...] = ()
    """Tools that came to an end."""
    not_run: str = ""
    """Why a tool could not say anything, or not about everything."""
    seconds: float = 0.0


class Sanitizer:
    """Starts what it needs at the first candidate::

    with Sanitizer(store) as sanitizer:
        found = sanitizer.run(problem, candidate, artifacts)
    """

    def __init__(self, store: ArtifactStore, options: BuildOptions | None = None) -> None:
        self.store, self.options = store, options or BuildOptions(deadline_s=30.0)
        self.workshop = BuildContext(store, self.options)
        self._recorders = Zygote(("torch", "numpy", "kbrl_async.kernels.backends.sanitize.recording"), profile="tool")

    def __enter__(self) -> Sanitizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.workshop.close()
        self._recorders.close()

    def run(self, problem: Problem, candidate: Candidate, artifacts: dict[str, Path], device: str = "cpu") -> Sanitized:
        """`artifacts` as `Bench.evaluate` takes them. Raises `MissingTool`, `DiskFull` or `InfraError`."""
        started = time.perf_counter()
        way = _WAYS.get((candidate.backend, device.partition(":")[0]))
        if way is None:
            return Sanitized(not_run=f"there is no sanitizer for {candidate.backend} on {device}")
        paths = {key: str(path) for key, path in artifacts.items()}
        with self.workshop.folder() as folder:
            task = Task(problem.source, candidate.source, paths, str(folder), device)
            found = way(self, task, folder)
        return msgspec.structs.replace(found, seconds=time.perf_counter() - started)

    def record(self, task: Task, folder: Path) -> Recording:
        """The kernel calls of one forward; what came before a crash, where it crashes."""
        limits = Limits(
            cpu_s=int(self.options.deadline_s) + 1,
            memory_bytes=self.options.memory_bytes,
            file_bytes=self.options.file_bytes,
            cores=self.options.cores,
        )
        access = Access(read=tuple(task.artifacts.values()), write=(str(folder),))
        payload = msgspec.msgpack.encode(task)
        child = self._recorders.spawn(
            "kbrl_async.kernels.backends.sanitize.recording:record", payload, (), limits, access
        )
        try:
            isolation_of(child)
            child.result(self.options.deadline_s)
        finally:
            child.close()
        try:
            data = read_output(folder, CALLS_FILE, _MAX_RECORDING)
        except BadOutput:
            return Recording([], error="the model ended before its first kernel call")
        return recording.read(data) or Recording([], error="what was recorded of its calls can't be read")


def _sanitize_c(sanitizer: Sanitizer, task: Task, folder: Path) -> Sanitized:
    seen = sanitizer.record(task, folder)
    if not seen.calls:
        return Sanitized(not_run=seen.error or "the model called no kernel")
    sources = _sources(task.candidate)
    findings: list[Finding] = []
    for key in dict.fromkeys(call.source_key for call in seen.calls):
        if key not in sources:
            continue
        calls = [call for call in seen.calls if call.source_key == key]
        run = _build_and_run(sanitizer.workshop, folder, sources[key], calls)
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


def _build_and_run(workshop: BuildContext, recorded: Path, source: str, calls: list[Call]) -> ToolRun:
    """In a folder of its own: where the candidate could write, a name may be a link to any file of ours. Only the
    confined program opens what lies in `recorded`.
    """
    gcc = shutil.which("gcc") or "/usr/bin/gcc"
    kept = [flag for flag in launch.C_FLAGS if flag not in ("-O3", "-shared", "-fPIC")]
    with workshop.folder() as folder:
        (folder / "kernel.c").write_text(source)
        (folder / "main.c").write_text(driver(calls, workshop.options.memory_bytes >> 20))
        program = str(folder / "run")
        own = [gcc, *kept, *_C_SANITIZERS, "-Dmain=kernel_main", "-c", "kernel.c", "-o", "kernel.o"]
        link = [gcc, "-fopenmp", *_C_SANITIZERS, "main.c", "kernel.o", "-o", program]
        for command in (own, [*link, *launch.C_LIBRARIES]):
            built = workshop.run(command, folder)
            if built.status != 0:
                return built
        return workshop.run(
            [program, str(recorded)],
            folder,
            memory_bytes=_ENOUGH_ADDRESSES,
            read=(str(recorded),),
            environment={"OMP_NUM_THREADS": "2"},
        )


def driver(calls: list[Call], memory_mb: int = 2048) -> str:
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
    head += _options(memory_mb)
    prototypes = {f"void {call.name}({', '.join(map(_c_type, call.arguments)) or 'void'});" for call in calls}
    if len(prototypes) > len({call.name for call in calls}):  # one kernel launched with several shapes of arguments
        prototypes = {f"void {call.name}();" for call in calls}
    body = [line for call in calls for line in _one_call(call)]
    main = ["int main(int count, char **words) {", "  if (count != 2 || chdir(words[1])) exit(5);"]
    return "\n".join([*head, *sorted(prototypes), *main, *body, "  return 0;", "}", ""])


def _options(memory_mb: int) -> list[str]:
    """C functions that the sanitizers' runtime asks for its options."""
    texts = {tool: words.format(memory=memory_mb) for tool, words in _OPTIONS.items()}
    return [f'const char *__{tool}_default_options(void) {{ return "{text}"; }}' for tool, text in texts.items()]


def _one_call(call: Call) -> list[str]:
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


def compute_sanitizer() -> str:
    """The program's path; empty where the host has none."""
    found = shutil.which("compute-sanitizer")
    return found or next((path for path in _COMPUTE_SANITIZER if os.access(path, os.X_OK)), "")


def gpu_command(program: str, tool: str, task_file: str) -> list[str]:
    """compute-sanitizer's `tool` over one run of the model."""
    options = ["--tool", tool, "--error-exitcode", str(reports.GPU_EXIT), "--print-limit", "20", "--target-processes"]
    return [program, *options, "all", sys.executable, "-m", "kbrl_async.kernels.backends.sanitize.recording", task_file]


def _sanitize_gpu(sanitizer: Sanitizer, task: Task, folder: Path) -> Sanitized:
    program = compute_sanitizer()
    if not program:
        return Sanitized(not_run="compute-sanitizer is not installed: it comes with the CUDA toolkit")
    (folder / "task.json").write_bytes(msgspec.json.encode(task))
    findings: list[Finding] = []
    ran: list[str] = []
    reasons: list[str] = []
    passed = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH") if name in os.environ}
    # Each tensor an allocation of its own: beyond the end of one is then beyond memory that is known.
    variables = {**_python_environment(folder), **passed, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in GPU_TOOLS:
        run = sanitizer.workshop.run(
            gpu_command(program, tool, "task.json"),
            folder,
            deadline_s=sanitizer.options.deadline_s * 10,
            memory_bytes=_ENOUGH_ADDRESSES,
            read=(*task.artifacts.values(), *map(str, _PACKAGES), str(Path(program).resolve().parent)),
            environment=variables,
            on_gpu=True,
        )
        found = reports.compute_sanitizer(tool, run.output)
        findings += found
        if run.status == 0 or found:
            ran.append(tool)
        else:
            reasons.append(f"{tool}: status {run.status}, {run.output.strip()[-200:]}")
    return Sanitized(reports.distinct(findings), tuple(ran), "; ".join(reasons))


def _sanitize_cpp(sanitizer: Sanitizer, task: Task, folder: Path) -> Sanitized:
    """The extension built with sanitizers, called by the model itself in a Python that has their runtime."""
    extensions = inline_recording.read(ast.parse(task.candidate))
    if extensions is None:
        return Sanitized(not_run="which extension it compiles can't be read from its text")
    artifacts = {}
    for number, extension in enumerate(extensions):
        flags = inline_flags.chosen(extension, sanitizer.options.arch or "sm_90")
        watched = msgspec.structs.replace(
            flags, host=[*flags.host, *_C_SANITIZERS], link=[*flags.link, _C_SANITIZERS[-1]]
        )
        build = Build(extension, watched, inline_toolchain.toolchain(), sanitizer.workshop)
        attempt = build.fast()
        attempt = attempt if attempt.is_built else build.full()
        if not attempt.is_built:
            return Sanitized(not_run="it can't be built with sanitizers")
        path = folder / f"extension{number}.so"
        path.write_bytes(attempt.content)
        artifacts[extension.key] = str(path)
    (folder / "task.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(task, artifacts=artifacts)))
    return _watched_python(sanitizer.workshop, folder)


def _watched_python(workshop: BuildContext, folder: Path) -> Sanitized:
    gcc = shutil.which("gcc") or "/usr/bin/gcc"
    (folder / "options.c").write_text("\n".join(_options(workshop.options.memory_bytes >> 20)))
    built = workshop.run([gcc, "-shared", "-fPIC", "options.c", "-o", _OPTIONS_LIBRARY], folder)
    runtime = subprocess.run([gcc, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False).stdout
    if built.status != 0 or not os.path.isabs(runtime.strip()):
        return Sanitized(not_run="gcc has no libasan here")
    preload = f"{folder / _OPTIONS_LIBRARY} {Path(runtime.strip()).resolve()}"
    run = workshop.run(
        [sys.executable, "-m", "kbrl_async.kernels.backends.sanitize.recording", "task.json"],
        folder,
        deadline_s=4 * workshop.options.deadline_s,
        memory_bytes=_ENOUGH_ADDRESSES,
        read=tuple(map(str, _PACKAGES)),
        environment={"LD_PRELOAD": preload, **_python_environment(folder)},
    )
    findings = reports.distinct([*reports.asan(run.output), *reports.ubsan(run.output)])
    if run.status == 0 or findings:
        return Sanitized(findings, ("asan", "ubsan"))
    return Sanitized(not_run=f"the model ended with status {run.status}: {run.output.strip()[-200:]}")


def _python_environment(folder: Path) -> dict[str, str]:
    """For a Python that imports us: a confined process may read our packages, but not list the folder they lie in."""
    site = folder / "site"
    site.mkdir()
    for package in _PACKAGES:
        (site / package.name).symlink_to(package)
    return {"PYTHONPATH": str(site), "HOME": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


_Way = Callable[[Sanitizer, Task, Path], Sanitized]
_WAYS: dict[tuple[str, str], _Way] = {
    ("c", "cpu"): _sanitize_c,
    ("cpp", "cpu"): _sanitize_cpp,
    ("cuda", "cuda"): _sanitize_gpu,
    ("cuda-nvrtc", "cuda"): _sanitize_gpu,
    ("triton", "cuda"): _sanitize_gpu,
}
