"""Row-wise work: normalisations that keep the shape, and reductions that give one number a row."""

from __future__ import annotations

import msgspec

from kbrl_async.kernels.problems.writing import Module, NamedSize, indent
from kbrl_async.lab.small_policy.author import Author
from kbrl_async.lab.small_policy.families.source import KernelAnswer, statement
from kbrl_async.lab.small_policy.ops import Chains, ChainStep, torch_lines

LOOP = "for (long c = 0; c < cols; c++) {"
MAXIMUM = "m = b[c] > m ? b[c] : m;"
NORM_TORCH = {
    "softmax": "x = torch.softmax(x, dim=-1)",
    "log_softmax": "x = torch.log_softmax(x, dim=-1)",
    "layer_norm": "x = F.layer_norm(x, (x.shape[-1],), self.weight, self.bias)",
    "rms_norm": "x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight",
    "l2_norm": "x = x / (x.norm(dim=-1, keepdim=True) + 1e-6)",
}
NORM_MEMBERS = {
    "layer_norm": ("self.weight = nn.Parameter(torch.rand(cols))", "self.bias = nn.Parameter(torch.rand(cols))"),
    "rms_norm": ("self.weight = nn.Parameter(torch.rand(cols))",),
}
REDUCE_TORCH = {
    "sum": "x = x.sum(dim=-1)",
    "mean": "x = x.mean(dim=-1)",
    "max": "x = x.max(dim=-1).values",
    "logsumexp": "x = torch.logsumexp(x, dim=-1)",
    "norm": "x = x.norm(dim=-1)",
    "std": "x = x.std(dim=-1)",
}


class Alone(msgspec.Struct, frozen=True):
    """Who works on a row: one loop, and no others to join results with."""

    def loop(self, *body: str) -> list[str]:
        return [LOOP, *indent(body, 1), "}"]

    def sum(self, name: str = "s") -> list[str]:
        return []

    def max(self, *start: str) -> list[str]:
        """`m`, the largest of `b`."""
        return [*start, *self.loop(MAXIMUM)]


def statistics(kind: str, author: Author, group: Alone) -> tuple[list[str], str]:
    """Lines that compute the row's statistics from `b`, and the expression that normalises `b[c]`."""
    total = f"float s = {author.slip('start', '0.0f', '1.0f')};"
    exp = author.style("exp", "expf")
    if kind in ("softmax", "log_softmax"):
        top = group.max(author.slip("start", "float m = -INFINITY;", "float m = 1e30f;"))
        if kind == "softmax":
            last = author.slip("formula", "b[c] / s", "b[c]", "b[c] * s")
            return [*top, total, *group.loop(f"b[c] = {exp}(b[c] - m);", "s += b[c];"), *group.sum()], last
        last = author.slip("formula", "b[c] - m - logf(s)", "b[c] - logf(s)", "b[c] - m + logf(s)")
        return [*top, total, *group.loop(f"s += {exp}(b[c] - m);"), *group.sum()], last
    if kind == "layer_norm":
        spread = author.slip("formula", "(b[c] - u) * (b[c] - u)", "b[c] * b[c]")
        root = author.slip("formula", "sqrtf(q / cols + 1e-5f)", "sqrtf(q + 1e-5f)", "(q / cols + 1e-5f)")
        mean = [total, *group.loop("s += b[c];"), *group.sum(), "float u = s / cols;"]
        variance = ["float q = 0.0f;", *group.loop(f"q += {spread};"), *group.sum("q"), f"float k = 1.0f / {root};"]
        return [*mean, *variance], "(b[c] - u) * k * w[c] + d[c]"
    squares = [total, *group.loop("s += b[c] * b[c];"), *group.sum()]
    if kind == "rms_norm":
        root = author.slip("formula", "sqrtf(s / cols + 1e-6f)", "sqrtf(s + 1e-6f)", "(s / cols + 1e-6f)")
        return [*squares, f"float k = 1.0f / {root};"], "b[c] * k * w[c]"
    root = author.slip("formula", "sqrtf(s)", "s")
    return [*squares, f"float k = 1.0f / ({root} + 1e-6f);"], "b[c] * k"


class RowNorm(msgspec.Struct, frozen=True):
    """`chain → normalise each row → chain`, with an optional second tensor added first (residual or mask)."""

    kind: str
    before: tuple[ChainStep, ...] = ()
    after: tuple[ChainStep, ...] = ()
    residual: bool = False
    rows: int = 512
    cols: int = 1024

    def module(self) -> Module:
        names = ("x", "y") if self.residual else ("x",)
        return Module(
            title=f"{self.kind} over the last dimension with its neighbours fused.",
            shapes=(NamedSize("rows", self.rows, 8192), NamedSize("cols", self.cols, 4096)),
            forward=(
                *(["x = x + y"] if self.residual else []),
                *torch_lines(self.before),
                NORM_TORCH[self.kind],
                *torch_lines(self.after),
            ),
            inputs=("torch.randn(rows, cols)",) * len(names),
            arguments=names,
            init_arguments=("cols",) if self.kind in NORM_MEMBERS else (),
            members=NORM_MEMBERS.get(self.kind, ()),
        )

    def answer(self, author: Author) -> KernelAnswer:
        restrict = author.style("", "restrict ")
        tensors = ["x"]
        parameters = [f"const float *{restrict}x"]
        if self.residual:
            tensors.append("y")
            parameters.append(f"const float *{restrict}y")
        for letter, member in zip("wd", self.module().members, strict=False):
            tensors.append(member.split(" ")[0])
            parameters.append(f"const float *{restrict}{letter}")
        read = author.slip("index", "x[r * cols + c]", "x[r + c]", "x[c]")
        join = [author.slip("formula", "v = v + y[r * cols + c];", "v = v + y[c];")] if self.residual else []
        compute, last = statistics(self.kind, author, Alone())
        chains = Chains(author)
        before, after = chains.call("before", self.before), chains.call("after", self.after)
        body = [
            f"float *b = out + r * {author.slip('index', 'cols', 'rows')};",
            *Alone().loop(f"float v = {read};", *join, *before, statement(author, "b[c] = v;", ("b", "o"))),
            *compute,
            *Alone().loop(f"float v = {last};", *after, "b[c] = v;"),
        ]
        bound = author.slip("bound", "r < rows", "r < rows - 1", "r < rows / 2")
        kernel = (
            *chains.functions,
            f"void run({', '.join(parameters)}, float *{restrict}out, long rows, long cols) {{",
            f"    for (long r = 0; {bound}; r++) {{",
            *indent(body, 2),
            "    }",
            "}",
        )
        sizes = author.slip("argument", "x.shape[0], x.shape[1]", "x.shape[1], x.shape[0]", "x.shape[0]")
        return KernelAnswer(kernel, ("out = torch.empty_like(x)", f"self.kernel({', '.join(tensors)}, out, {sizes})"))


def reduction(kind: str, author: Author) -> tuple[list[str], str, list[str]]:
    """(declarations, accumulation of `v`, lines that finish `s`) of a reduction."""
    zero = author.slip("start", "0.0f", "1.0f")
    if kind in ("sum", "mean"):
        finish = [author.slip("formula", "s = s / cols;", "s = s / rows;")] if kind == "mean" else []
        return [f"float s = {zero};"], "s += v;", finish
    if kind == "max":
        start = author.slip("start", "-INFINITY", "1e30f")
        return [f"float s = {start};"], author.slip("formula", "s = v > s ? v : s;", "s = v < s ? v : s;"), []
    if kind == "norm":
        root = author.slip("formula", "s = sqrtf(s);", "s = s;")
        return [f"float s = {zero};"], "s += v * v;", [root]
    if kind == "std":
        root = author.slip("formula", "sqrtf((q - s * s / cols) / (cols - 1))", "sqrtf(q / cols)", "(q - s * s / cols)")
        return [f"float s = {zero};", "float q = 0.0f;"], "s += v, q += v * v;", [f"s = {root};"]
    exp = author.style("exp", "expf")
    return [f"float s = {zero};"], f"s += {exp}(v);", [author.slip("formula", "s = logf(s);", "s = log1pf(s);")]


class RowReduce(msgspec.Struct, frozen=True):
    """`chain → one number a row → chain`."""

    kind: str
    before: tuple[ChainStep, ...] = ()
    after: tuple[ChainStep, ...] = ()
    rows: int = 512
    cols: int = 1024

    def module(self) -> Module:
        return Module(
            title=f"{self.kind} over the last dimension with its neighbours fused.",
            shapes=(NamedSize("rows", self.rows, 4096), NamedSize("cols", self.cols, 8192)),
            forward=(*torch_lines(self.before), REDUCE_TORCH[self.kind], *torch_lines(self.after)),
            inputs=("torch.randn(rows, cols)",),
        )

    def answer(self, author: Author) -> KernelAnswer:
        restrict = author.style("", "restrict ")
        declare, accumulate, finish = reduction(self.kind, author)
        read = author.slip("index", "x[r * cols + c]", "x[r + c]", "x[c]")
        chains = Chains(author)
        before, then = chains.call("before", self.before), chains.call("after", self.after)
        after = ["float v = s;", *then, "out[r] = v;"]
        body = [
            *declare,
            *Alone().loop(f"float v = {read};", *before, statement(author, accumulate, ("s", "sum"))),
            *finish,
            *(after if self.after else [statement(author, "out[r] = s;")]),
        ]
        bound = author.slip("bound", "r < rows", "r < rows - 1", "r < rows / 2")
        kernel = (
            *chains.functions,
            f"void run(const float *{restrict}x, float *{restrict}out, long rows, long cols) {{",
            f"    for (long r = 0; {bound}; r++) {{",
            *indent(body, 2),
            "    }",
            "}",
        )
        sizes = author.slip("argument", "x.shape[0], x.shape[1]", "x.shape[1], x.shape[0]", "x.shape[0]")
        return KernelAnswer(kernel, ("out = torch.empty(x.shape[0])", f"self.kernel(x, out, {sizes})"))
