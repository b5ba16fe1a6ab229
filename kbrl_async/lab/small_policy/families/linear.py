"""A linear layer over a small batch, with what follows fused into its epilogue."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kbrl_async.kernels.problems.writing import Module, NamedSize, indent
from kbrl_async.lab.small_policy.author import Author
from kbrl_async.lab.small_policy.families.source import KernelAnswer, statement
from kbrl_async.lab.small_policy.ops import Chains, ChainStep, torch_lines

RESIDUAL = ("x = x + y", "v = v + e[i * n + j];", "v = v - e[i * n + j];", "v = v + e[j];")


def product(author: Author, bias: bool, epilogue: Sequence[str]) -> list[str]:
    """`v = d[j] + x[i] · w[j]` and the epilogue for every `i < m` and `j < n`, as C lines.

    An element at a time (slow): the additions of one sum wait for one another. Tiles of 2 × 4 (fast): eight sums at
    once, and what is loaded is used two or four times. A tile at an edge computes the last row or column twice.
    """
    bound = author.slip("bound", "p < k", "p < k - 1", "p < n")
    if not author.is_fast():
        start = author.slip("start", "d[j]", "0.0f", "d[i]") if bias else "0.0f"
        weight = author.slip("index", "w[j * k + p]", "w[p * n + j]", "w[i * k + p]")
        return [
            "for (long i = 0; i < m; i++) {",
            "    for (long j = 0; j < n; j++) {",
            f"        float v = {start};",
            f"        for (long p = 0; {bound}; p++) {{",
            f"            v += x[i * k + p] * {weight};",
            "        }",
            *indent(epilogue, 2),
            "    }",
            "}",
        ]
    weight = author.slip("index", "b[u][p]", "b[p % 4][u]", "a[t][p]")
    start = author.slip("start", "s[t][u] + d[j]", "s[t][u]", "s[t][u] + d[i]") if bias else "s[t][u]"
    return [
        "for (long q = 0; q < n; q += 4) {",
        "    for (long r = 0; r < m; r += 2) {",
        "        const float *a[2], *b[4];",
        "        for (long t = 0; t < 2; t++) a[t] = x + (r + t < m ? r + t : m - 1) * k;",
        "        for (long u = 0; u < 4; u++) b[u] = w + (q + u < n ? q + u : n - 1) * k;",
        "        float s[2][4] = {0};",
        f"        for (long p = 0; {bound}; p++) {{",
        "            for (long t = 0; t < 2; t++) {",
        f"                for (long u = 0; u < 4; u++) s[t][u] += a[t][p] * {weight};",
        "            }",
        "        }",
        "        for (long z = 0; z < 8; z++) {",
        "            long t = z / 4, u = z % 4, i = r + t, j = q + u;",
        "            if (i >= m || j >= n) continue;",
        f"            float v = {start};",
        *indent(epilogue, 3),
        "        }",
        "    }",
        "}",
    ]


class Linear(msgspec.Struct, frozen=True):
    """`linear(+bias) → [+ residual] → chain`."""

    steps: tuple[ChainStep, ...] = ()
    bias: bool = True
    residual: bool = False
    batch: int = 16
    inputs: int = 768
    outputs: int = 1024

    def module(self) -> Module:
        names = ("x", "y") if self.residual else ("x",)
        return Module(
            title="A linear layer with a fused epilogue.",
            shapes=(
                NamedSize("batch", self.batch, 2048),
                NamedSize("inputs", self.inputs, 2048),
                NamedSize("outputs", self.outputs, 2048),
            ),
            forward=(
                "x = self.linear(x)",
                *([RESIDUAL[0]] if self.residual else []),
                *torch_lines(self.steps),
            ),
            inputs=("torch.randn(batch, inputs)", "torch.randn(batch, outputs)")[: len(names)],
            arguments=names,
            init_arguments=("inputs", "outputs"),
            members=("self.linear = nn.Linear(inputs, outputs" + ("" if self.bias else ", bias=False") + ")",),
        )

    def answer(self, author: Author) -> KernelAnswer:
        restrict = author.style("", "restrict ")
        names = ["x", "w", *(["d"] if self.bias else []), *(["e"] if self.residual else [])]
        tensors = [
            "x",
            "self.linear.weight",
            *(["self.linear.bias"] if self.bias else []),
            *(["y"] if self.residual else []),
        ]
        join = [author.slip("formula", *RESIDUAL[1:])] if self.residual else []
        chains = Chains(author)
        store = statement(author, "out[i * n + j] = v;", ("out", "y"))
        body = product(author, self.bias, [*join, *chains.call("after", self.steps), store])
        parameters = ", ".join(f"const float *{restrict}{name}" for name in names)
        kernel = (
            *chains.functions,
            f"void run({parameters}, float *{restrict}out, long m, long n, long k) {{",
            *indent(body, 1),
            "}",
        )
        width = "self.linear.weight.shape"
        sizes = author.slip(
            "argument", f"x.shape[0], {width}[0], {width}[1]", f"x.shape[0], {width}[1], {width}[0]", "x.shape[0]"
        )
        return KernelAnswer(
            kernel,
            (
                f"out = torch.empty(x.shape[0], {width}[0])",
                f"self.kernel({', '.join(tensors)}, out, {sizes})",
            ),
        )
