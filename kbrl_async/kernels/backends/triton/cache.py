"""Triton in a confined child: kernels compiled elsewhere, its launches counted, its interpreter where there is no GPU.

::

    farm (no GPU) ── JITFunction.warmup ─▶ BundleCache ─▶ one bundle: metadata and machine code by cache key
    bench child ◀── prepare(bundle) ── the same keys hit; a miss compiles to PTX here, and the driver does the rest

Triton's own cache keys name the build of Triton and of its assembler; ours name their versions, so that a farm with
another Python serves the same bench. No C compiler is needed: `triton_driver` launches through the driver's own API.

Invariants
* Interpreting and compiling never mix in one process: `prepare` decides before the candidate's source runs.
* Everything here runs in a process that is never trusted; a bundle is unpacked where its kernels run, nowhere else.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from kbrl_async.kernels.backends.launch import bundle
from kbrl_async.kernels.backends.launch.recorder import RECORDER
from kbrl_async.kernels.backends.triton.tuning import only_compiled

PREFIX = "triton:"
_KEPT = (".json", ".cubin")
MISSES = "KBRL_TRITON_MISSES"
"""Name of the environment variable that counts, in this process, kernels that were not in the bundle."""


class BundleCache:
    """What Triton asks for cache files: finds those of the bundle, keeps new ones for this process alone."""

    files: ClassVar[dict[str, bytes]] = {}
    """`KEY.NAME` → content."""
    folder = ""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self.key = key

    def _path(self, name: str) -> Path:
        return Path(self.folder or _make_folder()) / f"{self.key}.{name}"

    def get_file(self, filename: str) -> str | None:
        content = self.files.get(f"{self.key}.{filename}")
        if content is None:
            return None
        path = self._path(filename)
        path.write_bytes(content)  # over what a candidate before may have left: machine code names its source's folder
        return str(path)

    def get_group(self, filename: str) -> dict[str, str] | None:
        stem = filename.removesuffix(".json")
        paths = {stem + end: self.get_file(stem + end) for end in _KEPT}
        found = {name: path for name, path in paths.items() if path is not None}
        return found if len(found) == len(_KEPT) else None

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        content = data if isinstance(data, bytes) else str(data).encode()
        path = self._path(filename)
        path.write_bytes(content)
        if filename.endswith(_KEPT):
            self.files[f"{self.key}.{filename}"] = content
        return str(path)

    def put_group(self, filename: str, group: dict[str, str]) -> None:
        """Nothing to note: a group is its two kept files."""


def key(source: str) -> str:
    """The name of a Triton candidate's bundle in `BuildReport.artifacts`."""
    return PREFIX + hashlib.sha256(source.encode()).hexdigest()


def _make_folder() -> str:
    """In the child's private scratch folder, which it was started in, or where TMPDIR says."""
    here = os.environ.get("TMPDIR") or os.getcwd()
    BundleCache.folder = tempfile.mkdtemp(prefix="triton-", dir=here)
    return BundleCache.folder


def use_bundle_cache(files: dict[str, bytes]) -> None:
    """From now on Triton finds `files` and adds to them. Keys depend on versions, never on paths or builds."""
    import triton
    from triton import knobs
    from triton.backends.nvidia import compiler
    from triton.runtime import cache

    BundleCache.files = files
    knobs.cache.manager_class = BundleCache
    knobs.autotuning.cache = False
    cache.triton_key = lambda: f"kbrl {triton.__version__}"
    compiler.CUDABackend.hash = lambda self: f"kbrl {self.target.arch}"


def prepare(path: str, device: str) -> None:
    """Make this child ready for a candidate whose bundle lies at `path`."""
    if device == "cpu":
        _interpret()
        return
    files = bundle.unpack(Path(path).read_bytes())
    use_bundle_cache(files)
    only_compiled(files)
    _leave_assembling_to_the_driver()
    from triton.runtime import driver

    from kbrl_async.kernels.backends.triton.driver import LaunchDriver

    driver.set_active(LaunchDriver())


def preload() -> None:
    """What every child of a bench with a GPU needs; called once, before any fork, where programs may still be run."""
    import triton.testing  # noqa: F401
    from triton import knobs

    from kbrl_async.kernels.backends.triton import driver as triton_driver  # noqa: F401

    _ = knobs.nvidia.ptxas.version


def _leave_assembling_to_the_driver() -> None:
    """A confined child can't run ptxas: for what the farm could not foresee, the driver assembles the PTX as it
    loads it.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    def as_text(self: Any, src: str, metadata: dict[str, Any], opt: Any, capability: int) -> bytes:
        os.environ[MISSES] = str(int(os.environ.get(MISSES, "0")) + 1)
        return src.encode() + b"\0"

    CUDABackend.make_cubin = as_text


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import driver
    from triton.runtime.interpreter import GridExecutor

    from kbrl_async.kernels.backends.launch.pretend import pretend
    from kbrl_async.kernels.backends.launch.uncompiled import leave_uncompiled
    from kbrl_async.kernels.backends.triton.driver import PretendDriver

    _interpret_the_language()
    leave_uncompiled(also_traced=True)
    run = GridExecutor.__call__
    GridExecutor.__call__ = lambda self, *args, **kwargs: RECORDER.call(
        self.fn.__name__, lambda: run(self, *args, **kwargs)
    )
    driver.set_active(PretendDriver(90))
    pretend("cpu")


def _interpret_the_language() -> None:
    """`tl.sum` and its kind are kernels too. Where triton was imported already (torch does so in places), they were
    made for compiling.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for name, module in list(sys.modules.items()):
        if name.startswith("triton.language"):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, attribute, InterpretedFunction(value.fn))


def kernel_names(files: dict[str, bytes]) -> list[str]:
    """Names of the kernels in a bundle's files, read from the files' names alone."""
    return sorted({name.split(".")[1] for name in files if name.endswith(".json")})
