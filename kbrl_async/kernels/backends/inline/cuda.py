"""Backend `cuda`: `load_inline(cuda_sources=…)`, compiled by nvcc and g++ on any host. See `inline.py`."""

from __future__ import annotations

from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends.inline.backend import InlineBackend
from kbrl_async.kernels.backends.inline.toolchain import NVCC_CURE, toolchain


class CudaBackend(InlineBackend):
    def __init__(self) -> None:
        super().__init__("cuda")

    def missing(self) -> str:
        try:
            return "" if toolchain().nvcc else f"nvcc is not installed: {NVCC_CURE}"
        except MissingTool as error:
            return str(error)
