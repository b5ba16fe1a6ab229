"""Backend `cpp`: `load_inline(cpp_sources=…)`, compiled by g++ for the CPU. See `inline.py`."""

from __future__ import annotations

from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends.inline.backend import InlineBackend
from kbrl_async.kernels.backends.inline.toolchain import toolchain


class CppBackend(InlineBackend):
    def __init__(self) -> None:
        super().__init__("cpp")

    def missing(self) -> str:
        try:
            toolchain()
        except MissingTool as error:
            return str(error)
        return ""
