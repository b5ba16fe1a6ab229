"""Runs a candidate's kernels under sanitizers: they see what a right answer hides, as one element written too far.

::

    c     recording child ─calls, buffers─▶ a C program, each buffer as long as its tensor ─ASan, UBSan─▶ findings
    cpp   extension built with ASan, UBSan ─▶ the model in a Python that has their runtime loaded ─▶ findings
    cuda, cuda-nvrtc, triton on a GPU      the model in one process under compute-sanitizer's tools ─▶ findings

All of it is confined like a compiler. A candidate can hide from a sanitizer (it runs in the same process), so a clean
report is a hint and a finding is the candidate's fault.

`Backend.sanitize` says how on a CPU; here is what several ways share, and the one of every backend for GPUs.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import msgspec

import kbrl_async
import protocols
from kbrl_async.kernels.backends.backend import backend
from kbrl_async.kernels.backends.building.context import BuildContext, isolation_of
from kbrl_async.kernels.backends.building.store import ArtifactStore
from kbrl_async.kernels.backends.sanitize import reports
from kbrl_async.kernels.backends.sanitize.parts import CALLS_FILE, RecordedLaunches, Sanitized, SanitizeTask, read
from kbrl_async.kernels.backends.sanitize.reports import SanitizerFinding
from kbrl_async.kernels.sandbox import Access, BadOutput, Limits, Zygote, read_output
from kbrl_async.kernels.settings import CompileFarm
from protocols.records import Candidate, Problem

_FARM = CompileFarm(deadline_s=30.0, nice=0)
"""Watched programs run in it too, slowly, while nobody times."""
SANITIZERS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined")
ENOUGH_ADDRESSES = 1 << 46
"""ASan reserves terabytes of addresses; its own limit on one allocation holds instead."""
_OPTIONS = {
    "asan": "detect_leaks=0:abort_on_error=0:allocator_may_return_null=1:max_allocation_size_mb={memory}",
    "ubsan": "print_stacktrace=0:halt_on_error=0",
}
"""Compiled into the program: the runtime reads them from /proc, which is not there for a confined process."""
_MAX_RECORDING = 4 << 20
"""Bytes of `calls.json`: far more than `SanitizeTask.max_calls` calls with tens of arguments each."""
PACKAGES = [Path(protocols.__file__).resolve().parent, Path(kbrl_async.__file__).resolve().parent]
GPU_TOOLS = ("memcheck", "racecheck", "initcheck")
_COMPUTE_SANITIZER = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")


class Sanitizer:
    """Starts what it needs at the first candidate::

    with Sanitizer(store) as sanitizer:
        found = sanitizer.run(problem, candidate, artifacts)
    """

    def __init__(self, store: ArtifactStore) -> None:
        self.context, self.deadline_s = BuildContext(store, _FARM), _FARM.deadline_s
        self._recorders = Zygote(("torch", "numpy", "kbrl_async.kernels.backends.sanitize.recording"), profile="tool")

    def __enter__(self) -> Sanitizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.context.close()
        self._recorders.close()

    def run(self, problem: Problem, candidate: Candidate, artifacts: dict[str, Path], device: str = "cpu") -> Sanitized:
        """`artifacts` as `Bench.evaluate` takes them. Raises `MissingTool`, `DiskFull` or `InfraError`."""
        started = time.perf_counter()
        paths = {key: str(path) for key, path in artifacts.items()}
        with self.context.folder() as folder:
            task = SanitizeTask(problem.source, candidate.source, paths, str(folder), device, backend=candidate.backend)
            one = backend(candidate.backend)
            is_on_gpu = device.startswith("cuda") and "cuda" in one.runs_on
            found = on_gpu(self, task, folder) if is_on_gpu else one.sanitize(self, task, folder)
        return msgspec.structs.replace(found, seconds=time.perf_counter() - started)

    def record(self, task: SanitizeTask, folder: Path) -> RecordedLaunches:
        """The kernel calls of one forward; what came before a crash, where it crashes."""
        limits = Limits(
            cpu_s=int(self.deadline_s) + 1,
            memory_bytes=self.context.memory_bytes,
            file_bytes=self.context.file_bytes,
        )
        access = Access(read=tuple(task.artifacts.values()), write=(str(folder),))
        payload = msgspec.msgpack.encode(task)
        child = self._recorders.spawn(
            "kbrl_async.kernels.backends.sanitize.recording:record", payload, (), limits, access
        )
        try:
            isolation_of(child)
            child.result(self.deadline_s)
        finally:
            child.close()
        try:
            data = read_output(folder, CALLS_FILE, _MAX_RECORDING)
        except BadOutput:
            return RecordedLaunches([], error="the model ended before its first kernel call")
        return read(data) or RecordedLaunches([], error="what was recorded of its calls can't be read")


def options_of(memory_mb: int) -> list[str]:
    """C functions that the sanitizers' runtime asks for its options."""
    texts = {tool: words.format(memory=memory_mb) for tool, words in _OPTIONS.items()}
    return [f'const char *__{tool}_default_options(void) {{ return "{text}"; }}' for tool, text in texts.items()]


def compute_sanitizer() -> str:
    """The program's path; empty where the host has none."""
    found = shutil.which("compute-sanitizer")
    return found or next((path for path in _COMPUTE_SANITIZER if os.access(path, os.X_OK)), "")


def gpu_command(program: str, tool: str, task_file: str) -> list[str]:
    """compute-sanitizer's `tool` over one run of the model."""
    options = ["--tool", tool, "--error-exitcode", str(reports.GPU_EXIT), "--print-limit", "20", "--target-processes"]
    return [program, *options, "all", sys.executable, "-m", "kbrl_async.kernels.backends.sanitize.recording", task_file]


def on_gpu(sanitizer: Sanitizer, task: SanitizeTask, folder: Path) -> Sanitized:
    program = compute_sanitizer()
    if not program:
        return Sanitized(not_run="compute-sanitizer is not installed: it comes with the CUDA toolkit")
    (folder / "task.json").write_bytes(msgspec.json.encode(task))
    findings: list[SanitizerFinding] = []
    ran: list[str] = []
    reasons: list[str] = []
    passed = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH") if name in os.environ}
    # Each tensor an allocation of its own: beyond the end of one is then beyond memory that is known.
    variables = {**python_environment(folder), **passed, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in GPU_TOOLS:
        run = sanitizer.context.run(
            gpu_command(program, tool, "task.json"),
            folder,
            deadline_s=sanitizer.deadline_s * 10,
            memory_bytes=ENOUGH_ADDRESSES,
            read=(*task.artifacts.values(), *map(str, PACKAGES), str(Path(program).resolve().parent)),
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


def python_environment(folder: Path) -> dict[str, str]:
    """For a Python that imports us: a confined process may read our packages, but not list the folder they lie in."""
    site = folder / "site"
    site.mkdir()
    for package in PACKAGES:
        (site / package.name).symlink_to(package)
    return {"PYTHONPATH": str(site), "HOME": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
