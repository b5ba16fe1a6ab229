"""Which torch, compilers and libraries extensions are built with. Finds them without importing torch.

A host without a GPU has a torch without CUDA libraries: extensions link there too, because libtorch.so brings those
libraries on the bench. What only they define may then stay open at link time (`may_stay_open`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import msgspec

from kbrl_async.errors import MissingTool

SLIM = Path(__file__).parent / "slim"
CXX_CURE = "Install it with `apt-get install g++` (Debian/Ubuntu)"
NVCC_CURE = (
    "Install the CUDA toolkit or `pip install nvidia-cuda-nvcc nvidia-cuda-cccl nvidia-cuda-runtime`, or set CUDA_HOME"
)
_PYTHON_SYMBOL = re.compile(r"_?Py[A-Z_]\w*")
_CUDA_SYMBOL = re.compile(r"(c10|at)::cuda::|cu(blas|dnn|sparse|solver|fft|rand|da|rtc)|vtable for (c10|at)::cuda")
_NVIDIA_WHEELS = ("cu13", "cu12", "cuda_nvcc", "cuda_runtime")


class Toolchain(msgspec.Struct, frozen=True, dict=True):
    torch: Path
    """The package's folder."""
    torch_version: str
    cxx: str
    cxx_version: str
    nvcc: str = ""
    nvcc_version: str = ""
    cuda: Path = Path()
    """The toolkit's folder, where there is one."""

    @property
    def include(self) -> Path:
        return self.torch / "include"

    @property
    def libraries(self) -> Path:
        return self.torch / "lib"

    @property
    def has_cuda_torch(self) -> bool:
        return (self.libraries / "libc10_cuda.so").exists()

    @functools.cached_property
    def standard(self) -> str:
        """The C++ standard that this torch compiles extensions with."""
        text = (self.torch / "utils" / "cpp_extension.py").read_text()
        found = re.search(r"common_cflags \+ \['-fPIC', '-std=(c\+\+\d+)'\]", text)
        return found[1] if found else "c++17"

    @functools.cached_property
    def slim_defines(self) -> list[str] | None:
        """What the stand-in headers must know of this torch; None where they do not fit it."""
        python_variable = _text(self.include / "torch" / "csrc" / "autograd" / "python_variable.h")
        shim = _text(self.include / "torch" / "csrc" / "inductor" / "aoti_torch" / "c" / "shim.h")
        is_plain = re.search(
            r"struct THPVariable \{\s*PyObject_HEAD\s*(//[^\n]*\s*)*at::Tensor cdata;", python_variable
        )
        if not is_plain or "aoti_torch_new_tensor_handle" not in shim or sysconfig.get_config_var("Py_GIL_DISABLED"):
            return None
        blas = _text(self.include / "ATen" / "cuda" / "CUDAContextLight.h")
        return ["-DKBRL_BLAS_SETUP"] if "getCurrentCUDABlasHandle(bool" in blas else []

    @functools.cached_property
    def dispatches_types(self) -> bool:
        """Whether `AT_DISPATCH_…(x.type(), …)` compiles, as it did before torch 2.6."""
        headers = (("ATen",), ("torch", "headeronly", "core"), ("torch", "headeronly"))
        return any("DeprecatedTypeProperties" in _text(self.include.joinpath(*at, "Dispatch.h")) for at in headers)

    def includes(self, is_slim: bool, with_cuda: bool) -> list[str]:
        full = [self.include / "torch" / "csrc" / "api" / "include"]
        folders = [*([SLIM] if is_slim else full)]
        first = [f"-I{SLIM}"] if is_slim else []
        system = [self.include, *([] if is_slim else folders)]
        if with_cuda and self.nvcc:
            system.append(self.cuda / "include")
        system.append(Path(sysconfig.get_path("include")))
        return [*first, *(part for path in system for part in ("-isystem", str(path)))]

    def cuda_library(self, name: str) -> list[str]:
        """Link arguments for a library of the toolkit; none where it is not here (libtorch brings it)."""
        for folder in (self.cuda / "lib64", self.cuda / "lib", self.cuda / "lib64" / "stubs"):
            found = sorted(folder.glob(f"lib{name}.so*")) if self.nvcc else []
            if found:
                return [f"-L{folder}", f"-l:{found[0].name}"]
        return []

    def may_stay_open(self, symbol: str) -> bool:
        """Whether the process that loads the extension defines it, though no library here does."""
        if _PYTHON_SYMBOL.match(symbol):
            return True
        return bool(_CUDA_SYMBOL.match(symbol)) and not self.has_cuda_torch

    def readable(self) -> tuple[str, ...]:
        """Folders that the confined compilers read beyond the system's."""
        folders = [self.torch, SLIM, Path(sysconfig.get_path("include")), *([self.cuda] if self.nvcc else [])]
        return tuple(str(path.resolve()) for path in folders if path.exists())

    def label(self, with_cuda: bool) -> str:
        """Everything that decides what a source compiles to, but its own flags."""
        nvcc = f" nvcc {self.nvcc_version}" if with_cuda else ""
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return f"torch {self.torch_version} g++ {self.cxx_version}{nvcc} python {python}"


@functools.cache
def toolchain() -> Toolchain:
    """Of this host. Raises `MissingTool` without torch or g++; without nvcc its field is empty."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise MissingTool("torch is not installed", "Install it with `pip install torch`")
    torch = Path(spec.submodule_search_locations[0])
    cxx = shutil.which("g++")
    if cxx is None:
        raise MissingTool("g++ is not installed", CXX_CURE)
    version = re.search(r"__version__ = '([^']+)'", _text(torch / "version.py"))
    nvcc = find_nvcc()
    return Toolchain(
        torch,
        version[1] if version else "unknown",
        cxx,
        _words([cxx, "-dumpfullversion"]).strip(),
        nvcc,
        _nvcc_version(nvcc),
        Path(nvcc).resolve().parent.parent if nvcc else Path(),
    )


@functools.cache
def find_nvcc() -> str:
    """CUDA_HOME, PATH, /usr/local/cuda, then NVIDIA's wheels; empty where it is nowhere. What lies on PATH alone,
    without its toolkit's headers beside it, is a wrapper and passed over.
    """
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    for folder in sys.path:
        candidates += [Path(folder) / "nvidia" / wheel / "bin" / "nvcc" for wheel in _NVIDIA_WHEELS]
    return next((str(path) for path in map(Path.resolve, candidates) if _is_whole(path)), "")


def _is_whole(nvcc: Path) -> bool:
    return os.access(nvcc, os.X_OK) and (nvcc.parent.parent / "include" / "cuda_runtime.h").exists()


@functools.cache
def slim_version() -> str:
    """Of the stand-in headers and of what writes their generated half."""
    digest = hashlib.sha256()
    for path in sorted([*SLIM.rglob("*.h"), *SLIM.rglob("*.cuh"), *Path(__file__).parent.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _nvcc_version(nvcc: str) -> str:
    found = re.search(r"release [\d.]+, V([\d.]+)", _words([nvcc, "--version"])) if nvcc else None
    return found[1] if found else ""


def _words(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
