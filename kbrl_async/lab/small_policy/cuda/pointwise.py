"""One result an item: chains of element-wise operations, pooling, depth-wise convolution."""

from __future__ import annotations

from kbrl_async.kernels.problems.writing import indent
from kbrl_async.lab.small_policy.author import Author
from kbrl_async.lab.small_policy.cuda.source import ITEM, TOTAL, RowGroup, chain_function, items, launch
from kbrl_async.lab.small_policy.families.elementwise import Elementwise
from kbrl_async.lab.small_policy.families.images import DepthwiseConv, Pooling
from kbrl_async.lab.small_policy.families.source import KernelAnswer, statement
from kbrl_async.lab.small_policy.ops import c_lines

SECOND = {"add": ("v = v + w;", "v = v - w;"), "mul": ("v = v * w;", "v = v + w;")}
RUN = 32
"""Consecutive items of one thread in the slow form: neighbours then read far from each other."""


def elementwise(spec: Elementwise, author: Author) -> KernelAnswer:
    """A thread takes four items at once (fast), or else one, or 32 in a row (slow)."""
    join = author.slip("formula", *SECOND[spec.second]) if spec.second else ""
    call = "f(a[i], b[i])" if spec.second else "f(a[i])"
    read = author.slip("index", call, call.replace("a[i]", "a[0]"), call.replace("a[i]", "a[n - 1 - i]"))
    put = statement(author, f"out[i] = {read};", ("out", "y"))
    bound = author.slip("bound", "i < n", "i < n - 1", "i < n / 2")
    parameters = (
        "const float *a, const float *b, float *out, long n" if spec.second else "const float *a, float *out, long n"
    )
    if author.is_fast():
        body, each = _by_four(spec, author, bound, put), 1024
    elif author.is_fast():
        body, each = [ITEM, f"if ({bound}) {put}"], 256
    else:
        body = [ITEM.replace("i =", "t =", 1), f"for (long i = {RUN} * t; {bound} && i < {RUN} * t + {RUN}; i++) {put}"]
        each = RUN * 256
    source = (*chain_function(spec.steps, author, join), f"__global__ void run({parameters}) {{", *indent(body, 1), "}")
    tensors = ("x", "y", "out") if spec.second else ("x", "out")
    size = author.slip("argument", "x.numel()", "x.shape[0]")
    return KernelAnswer(
        source, ("out = torch.empty_like(x)", f"n = {size}", launch("run", items(author, "n", each), *tensors, "n"))
    )


def _by_four(spec: Elementwise, author: Author, bound: str, put: str) -> list[str]:
    second = ["float4 q = *(const float4 *)(b + i);"] if spec.second else []
    parts = ", ".join(f"f(p.{k}, q.{k})" if spec.second else f"f(p.{k})" for k in "xyzw")
    # What is left after a wrong bound is nobody's: were it the loop's, each thread would walk through half of `n`.
    whole = author.slip("bound", right := "i + 3 < n", "i + 3 < n / 2")
    rest = "else" if whole == right else "else if (i + 3 >= n)"
    return [
        ITEM,
        "i = 4 * i;",
        f"if ({whole}) {{",
        "    float4 p = *(const float4 *)(a + i);",
        *indent(second, 1),
        f"    *(float4 *)(out + i) = make_float4({parts});",
        f"}} {rest} {{",
        f"    for (; {bound}; i++) {put}",
        "}",
    ]


def pool(spec: Pooling, author: Author) -> KernelAnswer:
    """A thread an output (fast), or a row of outputs (slow)."""
    if spec.kind == "max":
        start, join = author.slip("start", "-INFINITY", "1e30f"), "v = t[u] > v ? t[u] : v;"
        finish: list[str] = []
    else:
        start, join = author.slip("start", "0.0f", "1.0f"), "v += t[u];"
        finish = [author.slip("formula", "v = v * 0.25f;", "v = v * 0.5f;")]
    below = author.slip("index", "s[w], s[w + 1]", "s[2], s[3]")
    corner = author.slip("index", "(2 * i) * w + 2 * j", "i * w + j")
    work = [
        f"const float *s = x + p * h * w + {corner};",
        f"float t[4] = {{s[0], s[1], {below}}};",
        f"float v = {start};",
        f"for (int u = 0; u < 4; u++) {join}",
        *finish,
        *c_lines(spec.after, author),
        statement(author, "out[(p * (h / 2) + i) * (w / 2) + j] = v;", ("out", "y")),
    ]
    fast = author.is_fast()
    body = _places(author, work, "(h / 2)", "(w / 2)", fast)
    source = ("__global__ void run(const float *x, float *out, long g, long h, long w) {", *indent(body, 1), "}")
    planes = author.slip("argument", "x.shape[0] * x.shape[1]", "x.shape[0]")
    return KernelAnswer(
        source,
        (
            "g, h, w = " + planes + ", x.shape[2], x.shape[3]",
            "out = torch.empty(x.shape[0], x.shape[1], h // 2, w // 2, device=x.device)",
            launch("run", items(author, "out.numel()" if fast else "(g * (h // 2))"), "x", "out", "g", "h", "w"),
        ),
    )


def _places(author: Author, work: list[str], high: str, wide: str, fast: bool) -> list[str]:
    """Names the place (plane p, row i, column j) of an output, or walks along a row of them."""
    item = ITEM.replace("i =", "id =", 1)
    if fast:
        end = author.slip("bound", f"g * {high} * {wide}", f"g * {high} * {wide} / 2", f"{high} * {wide}")
        place = f"long p = id / ({high} * {wide}), i = id / {wide} % {high}, j = id % {wide};"
        return [item, f"if (id >= {end}) return;", place, *work]
    end = author.slip("bound", f"g * {high}", f"g * {high} / 2", high)
    rows = [f"long p = id / {high}, i = id % {high};", f"for (long j = 0; j < {wide}; j++) {{", *indent(work, 1), "}"]
    return [item, f"if (id >= {end}) return;", *rows]


def depthwise(spec: DepthwiseConv, author: Author) -> KernelAnswer:
    """As `pool`; with a norm a block takes a whole plane (fast), or a thread does (slow)."""
    channel = author.slip("index", "p % ch", "p / ch")
    inside = author.slip("bound", "y < 0 || y >= h || z < 0 || z >= w", "y <= 0 || y >= h || z <= 0 || z >= w")
    chain = c_lines(spec.after, author)
    work = [
        f"float v = {author.slip('start', f'd[{channel}]', '0.0f')};",
        "for (int e = 0; e < 9; e++) {",
        "    long y = i + e / 3 - 1, z = j + e % 3 - 1;",
        f"    if ({inside}) continue;",
        f"    v += x[p * h * w + y * w + z] * k[({channel}) * 9 + {author.slip('index', 'e', '8 - e')}];",
        "}",
    ]
    head = (
        "__global__ void run(const float *x, const float *k, const float *d, float *out,",
        "        long g, long h, long w, long ch) {",
    )
    sizes = (
        "out = torch.empty_like(x)",
        f"g, ch, h, w = {author.slip('argument', 'x.shape[0] * x.shape[1]', 'x.shape[0]')}, *x.shape[1:]",
    )
    arguments = ("x", "self.conv.weight", "self.conv.bias", "out", "g", "h", "w", "ch")
    if not spec.norm:
        put = statement(author, "out[p * h * w + i * w + j] = v;", ("out", "o"))
        fast = author.is_fast()
        body = _places(author, [*work, *chain, put], "h", "w", fast)
        grid = items(author, "x.numel()" if fast else "(g * h)")
        return KernelAnswer((*head, *indent(body, 1), "}"), (*sizes, launch("run", grid, *arguments)))
    group = RowGroup(author.is_fast())
    # one thread adds up a whole plane: too long a sum for a float
    number = "float" if group.together else "double"
    put = statement(author, "o[c] = v;", ("o", "out"))
    body = [
        *group.prologue(author, "g"),
        "long p = r, cols = h * w;",
        "float *o = out + p * cols;",
        f"{number} s = {author.slip('start', '0.0f', '1.0f')};",
        *group.loop("long i = c / w, j = c % w;", *work, put, "s += v;"),
        *group.sum(),
        "float u = s / cols;",
        f"{number} q = 0.0f;",
        *group.loop("q += (o[c] - u) * (o[c] - u);"),
        *group.sum("q"),
        f"float z = 1.0f / {author.slip('formula', 'sqrtf(q / cols + 1e-5f)', 'sqrtf(q + 1e-5f)')};",
        *group.loop("float v = (o[c] - u) * z;", *chain, "o[c] = v;"),
    ]
    source = (*group.helpers(TOTAL), *head, *indent(body, 1), "}")
    return KernelAnswer(source, (*sizes, launch("run", group.grid(author, "g"), *arguments, block=group.block)))
