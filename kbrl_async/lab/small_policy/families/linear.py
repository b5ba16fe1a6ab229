"""A linear layer over a small batch, with what follows fused into its epilogue."""

from __future__ import annotations

import msgspec

from kbrl_async.kernels.problems.writing import Module, NamedSize, indent
from kbrl_async.lab.small_policy.author import Author
from kbrl_async.lab.small_policy.families.source import KernelAnswer, statement
from kbrl_async.lab.small_policy.ops import Chains, ChainStep, torch_lines

WEIGHT_ROWS_OUTSIDE = ("for (long j = 0; j < n; j++) {", "    for (long i = 0; i < m; i++) {")
BATCH_OUTSIDE = ("for (long i = 0; i < m; i++) {", "    for (long j = 0; j < n; j++) {")
RESIDUAL = ("x = x + y", "v = v + e[i * n + j];", "v = v - e[i * n + j];", "v = v + e[j];")


def product(author: Author, bias: bool = True) -> list[str]:
    """`v = bias[j] + x[i] · w[j]`, as C lines."""
    start = author.slip("start", "d[j]", "0.0f", "d[i]") if bias else "0.0f"
    weight = author.slip("index", "w[j * k + p]", "w[p * n + j]", "w[i * k + p]")
    return [
        f"float v = {start};",
        f"for (long p = 0; {author.slip('bound', 'p < k', 'p < k - 1', 'p < n')}; p++) {{",
        f"    v += x[i * k + p] * {weight};",
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
                NamedSize("batch", self.batch, 4096),
                NamedSize("inputs", self.inputs, 4096),
                NamedSize("outputs", self.outputs, 4096),
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
        loops = author.style(*("\n".join(pair) for pair in (BATCH_OUTSIDE, WEIGHT_ROWS_OUTSIDE))).split("\n")
        join = [author.slip("formula", *RESIDUAL[1:])] if self.residual else []
        chains = Chains(author)
        body = [*product(author, self.bias), *join, *chains.call("after", self.steps)]
        store = statement(author, "out[i * n + j] = v;", ("out", "y"))
        parameters = ", ".join(f"const float *{restrict}{name}" for name in names)
        kernel = (
            *chains.functions,
            f"void run({parameters}, float *{restrict}out, long m, long n, long k) {{",
            *indent(loops, 1),
            *indent([*body, store], 3),
            "        }",
            "    }",
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
