"""What a policy is told of backend `cuda-nvrtc`."""

from __future__ import annotations

from kbrl_async.kernels.backends import prompts
from kbrl_async.kernels.backends.checks.device import RULES

_IMPORT = "from kbrl_async.launch import cuda_kernel\n"
_SCALE = prompts.SCALE_IN_CUDA.replace("{name}", "run")
_RULES = """
`kernel[grid, block](…)` or `kernel[grid, block, shared_bytes](…)`; grid and block are integers or tuples of up to
three. Tensors must be contiguous and on the GPU, and arrive as pointers; numbers arrive as the parameters are declared.
CUDA's headers are there (cuda_fp16.h, mma.h, cooperative_groups.h), templates are named as "run<float>". No host code.
"""
_CONSTANT = "The CUDA source and the kernel's name are literals; options are those that change the code that is made.\n"
_GRIDS = {"gate": "(x.numel() + 255) // 256", "centre": "x.shape[0]", "weighted": "(x.shape[1] + 255) // 256"}


def _kernel(name: str) -> str:
    return prompts.example(
        name,
        f"self.kernel[{_GRIDS[name]}, 256]({prompts.PASSED[name]})",
        make='        self.kernel = cuda_kernel(SOURCE, "run")\n',
        imports=_IMPORT,
        top=prompts.source(prompts.IN_CUDA[name]),
    )


CONTRACTS = {
    "": prompts.contract(
        "CUDA kernels",
        "that declares device code with `cuda_kernel`\nand launches it in `forward`",
        f"{prompts.HEAD}{_IMPORT}\n{prompts.source(_SCALE)}"
        + prompts.scaling(
            'self.kernel = cuda_kernel(SOURCE, "run")',
            "self.kernel[(x.numel() + 255) // 256, 256](x, out, x.numel())",
            "x = x.contiguous()\n        ",
        ),
        _RULES + prompts.FRESH + RULES + _CONSTANT,
    ),
    "plan": prompts.plan_contract(
        "CUDA kernels",
        "that declares device code and a launch plan",
        _SCALE,
        ', "grid": ["cdiv(n, 256)"], "block": [256]',
    ),
}
SHOTS = prompts.shots(_kernel)
