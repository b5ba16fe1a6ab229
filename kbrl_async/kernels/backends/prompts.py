"""What the prompts of our backends are made of: the frame of a contract, and the references of the worked examples.

The references are none of the suite's problems nor KernelBench's, and their kernels right rather than fastest: they
show the form of an answer.
"""

from __future__ import annotations

from collections.abc import Callable

from kbrl_async.kernels.backends.backend import Shot

HEAD = "import torch\nimport torch.nn as nn\n"
_OPENING = """You write fast {what}. Replace the module `Model` below by `ModelNew` with the
same constructor, parameters and results. Answer with one fenced Python file {how}:

```python
"""
_CLOSING = """
The module to replace:

```python
{source}```
"""
_MODULE = """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        {make}

    def forward(self, x):
        {prepare}out = torch.empty_like(x)
        {launch}
        return out
```
"""
_PLAN = '''
SOURCE = r"""
{kernel}
"""
PLAN = {
    "inputs": ["x"],
    "sizes": {"n": "x.numel"},
    "kernels": {"run": {"source": SOURCE}},
    "buffers": {"out": {"shape": ["x.shape[0]", "x.shape[1]"], "dtype": "float32"}},
    "steps": [{"kernel": "run", "args": ["x", "out", "n"]{where}}],
    "outputs": ["out"],
}
```
'''
_PLAN_RULES = """
The file holds literals only: a launch plan, run without any Python of yours. Sizes are expressions over numbers,
earlier sizes, `x.shape[0]`, `x.numel`, + - * / // %, max, min, cdiv, next_pow2 and sqrt. `"init"` names the
constructor's arguments; a weight is the argument `"param:NAME"` with its name in the module's state dict. Buffers are
new in each call, and empty unless they say `"zero": True`.
"""
FRESH = "Return a new tensor from each call, change no input, and keep nothing from one call to the next.\n"
SCALE_IN_CUDA = """__global__ void {name}(const float *x, float *out, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2.0f * x[i];
}"""
REFERENCES = {
    "gate": """
class Model(nn.Module):
    def forward(self, x, y):
        return x * torch.sigmoid(y)
""",
    "centre": """
class Model(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=-1, keepdim=True)
""",
    "weighted": """
class Model(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(rows))

    def forward(self, x):
        return (x * self.weight[:, None]).sum(dim=0)
""",
}
_NO_WEIGHTS = "    def __init__(self):\n        super().__init__()\n"
INIT = {
    "gate": _NO_WEIGHTS,
    "centre": _NO_WEIGHTS,
    "weighted": "    def __init__(self, rows):\n        super().__init__()\n"
    "        self.weight = nn.Parameter(torch.rand(rows))\n",
}
ARGUMENTS = {"gate": "x, y", "centre": "x", "weighted": "x"}
PASSED = {
    "gate": "x, y, out, x.numel()",
    "centre": "x, out, x.shape[0], x.shape[1]",
    "weighted": "x, self.weight, out, x.shape[0], x.shape[1]",
}
LOOPS = {
    "gate": """void run(const float *x, const float *y, float *out, long n) {
    for (long i = 0; i < n; i++) out[i] = x[i] / (1.0f + expf(-y[i]));
}""",
    "centre": """void run(const float *x, float *out, long rows, long cols) {
    for (long r = 0; r < rows; r++) {
        float s = 0.0f;
        for (long c = 0; c < cols; c++) s += x[r * cols + c];
        for (long c = 0; c < cols; c++) out[r * cols + c] = x[r * cols + c] - s / cols;
    }
}""",
    "weighted": """void run(const float *x, const float *w, float *out, long rows, long cols) {
    for (long c = 0; c < cols; c++) out[c] = 0.0f;
    for (long r = 0; r < rows; r++) {
        for (long c = 0; c < cols; c++) out[c] += w[r] * x[r * cols + c];
    }
}""",
}
"""In C, which is C++ too."""
IN_CUDA = {
    "gate": """__global__ void run(const float *x, const float *y, float *out, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] / (1.0f + expf(-y[i]));
}""",
    "centre": """__global__ void run(const float *x, float *out, long rows, long cols) {
    __shared__ float part[256];
    long r = blockIdx.x;
    float s = 0.0f;
    for (long c = threadIdx.x; c < cols; c += blockDim.x) s += x[r * cols + c];
    part[threadIdx.x] = s;
    __syncthreads();
    for (int k = 128; k > 0; k /= 2) {
        if (threadIdx.x < k) part[threadIdx.x] += part[threadIdx.x + k];
        __syncthreads();
    }
    for (long c = threadIdx.x; c < cols; c += blockDim.x) out[r * cols + c] = x[r * cols + c] - part[0] / cols;
}""",
    "weighted": """__global__ void run(const float *x, const float *w, float *out, long rows, long cols) {
    long c = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (c >= cols) return;
    float s = 0.0f;
    for (long r = 0; r < rows; r++) s += w[r] * x[r * cols + c];
    out[c] = s;
}""",
}
_OUT = {
    "gate": "torch.empty_like(x)",
    "centre": "torch.empty_like(x)",
    "weighted": "torch.empty(x.shape[1], device=x.device)",
}


def contract(what: str, how: str, code: str, rules: str) -> str:
    """A contract: `{what}` is written `{how}`, an example that scales by two, and rules."""
    opening = _OPENING.replace("{what}", what).replace("{how}", how)
    return opening + code.lstrip("\n") + "\n" + rules.strip() + "\n" + _CLOSING


def scaling(make: str, launch: str, prepare: str = "") -> str:
    """The module of a contract's example."""
    return _MODULE.replace("{make}", make).replace("{launch}", launch).replace("{prepare}", prepare)


def plan_contract(what: str, how: str, kernel: str, where: str = "") -> str:
    """The contract of a launch plan; `where` is its step's grid and block."""
    return contract(what, how, _PLAN.replace("{kernel}", kernel.strip()).replace("{where}", where), _PLAN_RULES)


def source(text: str) -> str:
    return f'SOURCE = r"""\n{text}\n"""\n'


def example(name: str, launch: str, *, make: str = "", imports: str = "", top: str = "") -> str:
    """A worked example's kernel file, whose `forward` allocates and launches."""
    contiguous = "".join(f"        {a} = {a}.contiguous()\n" for a in ARGUMENTS[name].split(", "))
    return (
        f"{HEAD}{imports}\n{top}\nclass ModelNew(nn.Module):\n{INIT[name]}{make}\n"
        f"    def forward(self, {ARGUMENTS[name]}):\n{contiguous}        out = {_OUT[name]}\n"
        f"        {launch}\n        return out\n"
    )


def shots(kernel: Callable[[str], str]) -> tuple[Shot, ...]:
    """The worked examples, given what writes the kernel of each of `REFERENCES`; the plainest first."""
    return tuple(Shot(HEAD + text, kernel(name)) for name, text in REFERENCES.items())
