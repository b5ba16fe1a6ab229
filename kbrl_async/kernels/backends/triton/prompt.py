"""What a policy is told of backend `triton`."""

from __future__ import annotations

from kbrl_async.kernels.backends import prompts
from kbrl_async.kernels.backends.checks.device import RULES

_IMPORTS = "import triton\nimport triton.language as tl\n"
_SCALE = (
    prompts.HEAD
    + _IMPORTS
    + """
@triton.jit
def run(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2.0 * tl.load(x + at, mask=at < n), mask=at < n)

class ModelNew(nn.Module):
    def forward(self, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        run[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
        return out
```
"""
)
_KERNELS = {
    "gate": """@triton.jit
def run(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n) * tl.sigmoid(tl.load(y + at, mask=at < n))
    tl.store(out + at, v, mask=at < n)
""",
    "centre": """@triton.jit
def run(x, out, cols, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * cols + at, mask=at < cols, other=0.0)
    tl.store(out + row * cols + at, v - tl.sum(v) / cols, mask=at < cols)
""",
    "weighted": """@triton.jit
def run(x, w, out, rows, cols, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for r in range(rows):
        total += tl.load(w + r) * tl.load(x + r * cols + at, mask=at < cols, other=0.0)
    tl.store(out + at, total, mask=at < cols)
""",
}
_LAUNCHES = {
    "gate": "run[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)",
    "centre": "run[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))",
    "weighted": "run[(triton.cdiv(x.shape[1], 256),)](x, self.weight, out, x.shape[0], x.shape[1], BLOCK=256)",
}


def _kernel(name: str) -> str:
    return prompts.example(name, _LAUNCHES[name], imports=_IMPORTS, top=_KERNELS[name])


CONTRACTS = {
    "": prompts.contract(
        "GPU kernels in Triton",
        "that defines `@triton.jit` kernels and launches\nthem in `forward`",
        _SCALE,
        "`torch` may allocate, view and do a sub-step; the kernels must do the work. `@triton.autotune` may try few.\n"
        + prompts.FRESH
        + RULES,
    )
}
SHOTS = prompts.shots(_kernel)
