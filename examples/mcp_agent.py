"""An agent without a model: from a naive kernel to a proven faster one by the tools of `kbrl mcp` alone.

    pip install 'kbrl-async[mcp]'
    python examples/mcp_agent.py

It does what the skill page teaches (`kbrl mcp --skill`): verify something simple, profile it, change what the profile
complains of, verify again, and claim nothing before `compare` and `bench` have said so. A model takes the place of
`improved`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import textwrap
from typing import Any

from mcp import Client
from mcp.client.stdio import StdioServerParameters

PROBLEM = "L2/06_shift_sigmoid_scale_tanh"
"""Four passes in PyTorch and one in ours, which is four times faster: a gain that a busy host can't hide."""
NAIVE = '''
import torch
from torch import nn

from kbrl_async.launch import c_kernel

SOURCE = r"""
#include <math.h>
void run(const float *x, float *out, long n) {
    for (long i = 0; i < n; i++) {
        float v = 2.0f / (1.0f + expf(-(x[i] + 0.1f)));
        float e = expf(-2.0f * v);
        out[i] = (1.0f - e) / (1.0f + e);
    }
}
"""


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = c_kernel(SOURCE, "run")

    def forward(self, x):
        out = torch.empty_like(x)
        self.kernel(x, out, x.numel())
        return out
'''


CHANGES = {
    "not vectorised": ("#include", '#pragma GCC optimize("Ofast")\n#include'),
    "NaN": ("expf(-(x[i] + 0.1f))", "expf(fminf(-(x[i] + 0.1f), 80.0f))"),
}
"""What a model would write: here one change for each complaint."""


def improved(source: str, complaint: str) -> str:
    for words, (old, new) in CHANGES.items():
        if words in complaint and new not in source:
            return source.replace(old, new, 1)
    return source


BUSY, TRIES, PAUSE_S = "others had the core", 10, 15


class ToolRefusal(Exception):  # noqa: N818 - reads as what it is
    """A tool's own words."""


def go_first() -> None:
    """Where the host allows it (root, CAP_SYS_NICE) the server that is started has its core before all others, as with
    `chrt -r 1 kbrl mcp`: what they do can't blur its times."""
    with contextlib.suppress(AttributeError, PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


async def main(command: list[str]) -> int:
    async with Client(StdioServerParameters(command=command[0], args=command[1:])) as client:

        async def ask(tool: str, **arguments: Any) -> dict[str, Any]:
            def print_progress(done: float, _: float | None, doing: str | None) -> Any:
                return asyncio.sleep(0, print(f"   … {doing}, step {done:g}", file=sys.stderr))

            answer = await client.call_tool(tool, arguments, progress_callback=print_progress)
            if answer.is_error:
                raise ToolRefusal(answer.content[0].text)
            return dict(answer.structured_content)

        async def proven(tool: str, **arguments: Any) -> dict[str, Any]:
            """On a busy host nothing can be proven: asked again later, it may be quiet."""
            for _ in range(TRIES):
                found = await ask(tool, **arguments)
                if BUSY not in str(found):
                    break
                print(f"{tool}: {BUSY}; again in {PAUSE_S} s", flush=True)
                await asyncio.sleep(PAUSE_S)
            return found

        problem = await ask("get_problem", problem_id=PROBLEM)
        print(f"{problem['problem_id']}: {len(problem['source'])} characters to replace")
        source, kernels = NAIVE, []
        for turn in range(4):
            report = await ask("verify", problem=PROBLEM, candidate=source)
            told = report["message"]
            if report["ok"]:
                kernels.append(report["kernel_id"])
                told = (await ask("profile", problem=PROBLEM, candidate=kernels[-1]))["text"]
            print(f"turn {turn}: {report['fault']}\n{textwrap.indent(told, '    ')}")
            before, source = source, improved(source, told)
            if source == before:
                break
        first, last = kernels[0], kernels[-1]
        both = await proven("compare", problem=PROBLEM, first=first, second=last)
        print(f"compare:  {both['claim']}, {both['ratio']:.2f}× ({both['lo']:.2f} … {both['hi']:.2f})")
        speed = (await proven("bench", problem=PROBLEM, candidate=last))["speed"]
        print(f"bench:    {speed['speedup']:.2f}× ({speed['lo']:.2f} … {speed['hi']:.2f}) of PyTorch, {speed['claim']}")
        best = (await ask("history", problem_id=PROBLEM))["best"]
        print(f"best of {PROBLEM}: {best['kernel_id']}")
    return 0 if speed["proven_faster"] else 1


if __name__ == "__main__":
    go_first()
    try:
        sys.exit(asyncio.run(main(sys.argv[1:] or ["kbrl", "mcp"])))
    except* ToolRefusal as refused:  # from within the client's task groups
        inner: BaseException = refused
        while isinstance(inner, BaseExceptionGroup):
            inner = inner.exceptions[0]
        sys.exit(str(inner))
