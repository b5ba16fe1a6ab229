"""Row-wise work: a thread a row (slow), or a block a row with its threads' sums joined (fast)."""

from __future__ import annotations

from kbrl_async.kernels.problems.writing import indent
from kbrl_async.lab.small_policy.author import Author
from kbrl_async.lab.small_policy.cuda.source import LARGEST, TOTAL, RowGroup, launch
from kbrl_async.lab.small_policy.families.rows import RowNorm, RowReduce, statistics
from kbrl_async.lab.small_policy.families.source import KernelAnswer, statement
from kbrl_async.lab.small_policy.ops import c_lines


def norm(spec: RowNorm, author: Author) -> KernelAnswer:
    group = RowGroup(author.is_fast())
    members = [member.split(" ")[0] for member in spec.module().members]
    tensors = ["x", *(["y"] if spec.residual else []), *members, "out"]
    letters = ["x", *(["y"] if spec.residual else []), *"wd"[: len(members)]]
    parameters = ", ".join(f"const float *{letter}" for letter in letters)
    join = [author.slip("formula", "v = v + y[r * cols + c];", "v = v + y[c];")] if spec.residual else []
    read = author.slip("index", "x[r * cols + c]", "x[r + c]", "x[c]")
    compute, last = statistics(spec.kind, author, group)
    body = [
        *group.prologue(author),
        f"float *b = out + r * {author.slip('index', 'cols', 'rows')};",
        *group.loop(
            f"float v = {read};", *join, *c_lines(spec.before, author), statement(author, "b[c] = v;", ("b", "o"))
        ),
        *compute,
        *group.loop(f"float v = {last};", *c_lines(spec.after, author), "b[c] = v;"),
    ]
    helpers = (LARGEST, TOTAL) if "softmax" in spec.kind else (TOTAL,)
    source = (
        *group.helpers(*helpers),
        f"__global__ void run({parameters}, float *out, long rows, long cols) {{",
        *indent(body, 1),
        "}",
    )
    return KernelAnswer(source, ("out = torch.empty_like(x)", *_launched(author, group, tensors)))


def _launched(author: Author, group: RowGroup, tensors: list[str]) -> tuple[str, ...]:
    sizes = author.slip("argument", "rows, cols = x.shape", "cols, rows = x.shape")
    return sizes, launch("run", group.grid(author, "rows"), *tensors, "rows", "cols", block=group.block)


def reduce(spec: RowReduce, author: Author) -> KernelAnswer:
    group = RowGroup(author.is_fast())
    read = author.slip("index", "x[r * cols + c]", "x[r + c]", "x[c]")
    item = [f"float v = {read};", *c_lines(spec.before, author)]
    body = [*group.prologue(author), *_reduction(spec.kind, author, group, item), "float v = s;"]
    body += c_lines(spec.after, author)
    put = statement(author, "out[r] = v;", ("out", "y"))
    body += [f"if (threadIdx.x == 0) {put}" if group.together else put]
    helpers = {"max": (LARGEST,), "logsumexp": (LARGEST, TOTAL)}.get(spec.kind, (TOTAL,))
    source = (
        *group.helpers(*helpers),
        "__global__ void run(const float *x, float *out, long rows, long cols) {",
        *indent(body, 1),
        "}",
    )
    forward = ("out = torch.empty(x.shape[0], device=x.device)", *_launched(author, group, ["x", "out"]))
    return KernelAnswer(source, forward)


def _reduction(kind: str, author: Author, group: RowGroup, item: list[str]) -> list[str]:
    """Lines that leave the row's number in `s`."""
    zero = f"float s = {author.slip('start', '0.0f', '1.0f')};"
    top = [
        f"float m = {author.slip('start', '-INFINITY', '1e30f')};",
        *group.loop(*item, author.slip("formula", "m = fmaxf(m, v);", "m = fminf(m, v);")),
        *group.join_max(),
    ]
    if kind == "max":
        return [*top, "float s = m;"]
    if kind == "logsumexp":
        exp = author.style("exp", "expf")
        finish = author.slip("formula", "s = m + logf(s);", "s = logf(s);")
        return [*top, zero, *group.loop(*item, f"s += {exp}(v - m);"), *group.sum(), finish]
    add = statement(author, "s += v * v;" if kind == "norm" else "s += v;", ("s", "sum"))
    summed = [zero, *group.loop(*item, add), *group.sum()]
    if kind == "std":
        spread = ["float q = 0.0f;", *group.loop(*item, "q += (v - u) * (v - u);"), *group.sum("q")]
        root = author.slip("formula", "s = sqrtf(q / (cols - 1));", "s = sqrtf(q / cols * 2);", "s = q / (cols - 1);")
        return [*summed, "float u = s / cols;", *spread, root]
    ways = {"sum": (), "mean": ("s = s / cols;", "s = s / rows;"), "norm": ("s = sqrtf(s);", "s = s;")}[kind]
    return [*summed, *([author.slip("formula", *ways)] if ways else [])]
