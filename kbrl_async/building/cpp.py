"""Backend `cpp`: `load_inline(cpp_sources=…)`, compiled by g++ for the CPU. See `inline.py`."""

from __future__ import annotations

from kbrl_async.building.inline import InlineBackend
from kbrl_async.building.inline_toolchain import toolchain
from kbrl_async.errors import MissingTool


class CppBackend(InlineBackend):
    def __init__(self) -> None:
        super().__init__("cpp")

    def missing(self) -> str:
        try:
            toolchain()
        except MissingTool as error:
            return str(error)
        return ""
