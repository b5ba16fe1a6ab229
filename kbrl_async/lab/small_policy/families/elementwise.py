"""Chains of element-wise operations over one or two tensors."""

from __future__ import annotations

import msgspec

from kbrl_async.kernels.problems.writing import Module, NamedSize, indent
from kbrl_async.lab.small_policy.author import Author
from kbrl_async.lab.small_policy.families.source import KernelAnswer, statement
from kbrl_async.lab.small_policy.ops import Chains, ChainStep, torch_lines

SECOND = {
    "add": ("x = x + y", "v = v + b[i];", "v = v - b[i];"),
    "mul": ("x = x * y", "v = v * b[i];", "v = v + b[i];"),
}
"""How a second input joins before the chain: PyTorch, C, wrong C."""


class Elementwise(msgspec.Struct, frozen=True):
    """`x → step → step …`, optionally `x ∘ y` first."""

    steps: tuple[ChainStep, ...]
    rows: int = 512
    cols: int = 1024
    second: str = ""

    def module(self) -> Module:
        names = ("x", "y") if self.second else ("x",)
        return Module(
            title="Element-wise chain over " + (" and ".join(names)) + ".",
            shapes=(NamedSize("rows", self.rows, 4096), NamedSize("cols", self.cols, 8192)),
            forward=(*([SECOND[self.second][0]] if self.second else []), *torch_lines(self.steps)),
            inputs=("torch.randn(rows, cols)",) * len(names),
            arguments=names,
        )

    def answer(self, author: Author) -> KernelAnswer:
        restrict = author.style("", "restrict ")
        second = f"const float *{restrict}b, " if self.second else ""
        join = [author.slip("formula", *SECOND[self.second][1:])] if self.second else []
        bound = author.slip("bound", "i < n", "i < n - 1", "i <= n - 2", "i < n / 2")
        size = author.slip("argument", "x.numel()", "x.shape[0]", "x.size(1)")
        chains = Chains(author)
        chain = chains.call("after", self.steps)
        kernel = (
            *chains.functions,
            f"void run(const float *{restrict}a, {second}float *{restrict}out, long n) {{",
            f"    for (long i = 0; {bound}; i++) {{",
            f"        float v = {author.slip('index', 'a[i]', 'a[0]', 'a[i + 1]')};",
            *indent([*join, *chain], 2),
            "        " + statement(author, "out[i] = v;", ("out", "y")),
            "    }",
            "}",
        )
        tensors = "x, y, out" if self.second else "x, out"
        return KernelAnswer(kernel, ("out = torch.empty_like(x)", f"self.kernel({tensors}, {size})"))
