"""The bench as a tool of verifiers v1, in a process of its own; run by the library."""

from __future__ import annotations

import verifiers.v1 as vf

from kbrl_async.errors import KbrlError
from kbrl_kernels import judging
from kbrl_kernels.judging import Settings


class KernelToolsetConfig(vf.ToolsetConfig):
    problems: str = ""
    backend: str = "c"
    preset: str = "stage3"
    timing: bool = True


class KernelToolset(vf.Toolset[KernelToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def verify(self, problem_id: str, source: str) -> str:
        """Build a candidate (a Python file with ModelNew), check it on secret inputs, and time it against PyTorch."""
        config = self.config
        settings = Settings(config.problems, config.backend, config.preset, timing=config.timing)
        try:
            return (await judging.judge(settings, problem_id, source)).feedback
        except KbrlError as error:
            return f"not verified, and no fault of the kernel: {error}"


if __name__ == "__main__":
    KernelToolset.run()
