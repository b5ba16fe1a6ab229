"""What a policy is told of backend `c`."""

from __future__ import annotations

from kbrl_async.kernels.backends import prompts
from kbrl_async.kernels.backends.c.symbols import RULES as C_RULES
from kbrl_async.kernels.backends.checks.python import RULES

_IMPORT = "from kbrl_async.launch import c_kernel\n"
_SCALE = """void run(const float *x, float *out, long n) {
    for (long i = 0; i < n; i++) out[i] = 2.0f * x[i];
}"""
_RULES = """
Tensors arrive as pointers to contiguous data, Python integers as `long`, Python floats as `float`. OpenMP and the
standard headers are there. `forward` may allocate and reshape, but all arithmetic must happen in your C code.
"""
_STRICT = prompts.FRESH + C_RULES + RULES


def _kernel(name: str) -> str:
    return prompts.example(
        name,
        f"self.kernel({prompts.PASSED[name]})",
        make='        self.kernel = c_kernel(SOURCE, "run")\n',
        imports=_IMPORT,
        top=prompts.source("#include <math.h>\n" + prompts.LOOPS[name]),
    )


CONTRACTS = {
    "": prompts.contract(
        "CPU kernels in C",
        "that declares its C code with `c_kernel`\nand launches it in `forward`",
        f"{prompts.HEAD}{_IMPORT}\n{prompts.source(_SCALE)}"
        + prompts.scaling('self.kernel = c_kernel(SOURCE, "run")', "self.kernel(x, out, x.numel())"),
        _RULES + _STRICT,
    ),
    "plan": prompts.plan_contract("CPU kernels in C", "that declares C code and a launch plan", _SCALE),
}
SHOTS = prompts.shots(_kernel)
