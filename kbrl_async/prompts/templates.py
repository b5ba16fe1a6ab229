"""Prompt templates. To add one: one entry in `TEMPLATES`; `{source}` is the problem file.

`compact` is for the project's small policy, which reads nothing but the problem; `zero_shot` explains the contract to a
model that never saw it.
"""

from __future__ import annotations

from kbrl_async.errors import ConfigError
from protocols.records import Problem

C_CONTRACT = '''You write fast CPU kernels in C. Replace the module `Model` below by `ModelNew` with the
same constructor, parameters and results. Answer with one fenced Python file that declares its C code with `c_kernel`
and launches it in `forward`:

```python
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = r"""
void run(const float *x, float *out, long n) {
    for (long i = 0; i < n; i++) out[i] = 2.0f * x[i];
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
```

Tensors arrive as pointers to contiguous data, Python integers as `long`, Python floats as `float`. OpenMP and the
standard headers are there. `forward` may allocate and reshape, but all arithmetic must happen in your C code.

The module to replace:

```python
{source}```
'''

TEMPLATES = {
    "compact": "{source}### ModelNew\n",
    "zero_shot": C_CONTRACT,
}


def render_prompt(option: str, problem: Problem) -> str:
    """The prompt of `problem` in template `option`."""
    try:
        template = TEMPLATES[option]
    except KeyError:
        raise ConfigError(f"no prompt option {option!r}", f"Take one of {', '.join(sorted(TEMPLATES))}") from None
    return template.replace("{source}", _body(problem.source) if option == "compact" else problem.source)


def _body(source: str) -> str:
    """The problem's classes without imports, blank lines, sizes and input code."""
    before_inputs = source.partition("\ndef get_inputs")[0]
    kept = [line for line in before_inputs.splitlines() if line.strip() and line.startswith((" ", "class "))]
    return "\n".join(kept) + "\n"
