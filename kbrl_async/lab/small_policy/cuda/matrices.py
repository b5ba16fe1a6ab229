"""Matrix products: linear layers with an epilogue, feed-forward blocks, attention of one head."""

from __future__ import annotations

from kbrl_async.kernels.problems.writing import indent
from kbrl_async.lab.small_policy.author import Author
from kbrl_async.lab.small_policy.cuda.source import (
    ITEM,
    LARGEST,
    TOTAL,
    RowGroup,
    chain_function,
    items,
    launch,
)
from kbrl_async.lab.small_policy.families.blocks import Attention, Perceptron
from kbrl_async.lab.small_policy.families.linear import Linear
from kbrl_async.lab.small_policy.families.source import KernelAnswer, statement
from kbrl_async.lab.small_policy.ops import c_lines


class Product:
    """`y = x wᵀ + d` and what follows each element `v` of it, as one kernel.

    A block takes a square of 128 × 128 elements, 8 × 8 a thread (fast), or else one of 64 × 64, 4 × 4 a thread; or a
    thread takes one element (slow).
    """

    def __init__(self, author: Author, bias: bool, epilogue: list[str], extra: str = "") -> None:
        self._author, self._bias, self._epilogue = author, bias, epilogue
        bias_parameter = "const float *d, " if bias else ""
        self.head = f"const float *x, const float *w, {bias_parameter}{extra}float *out, long m, long n, long k"
        self._side = 8 if author.is_fast() else 4 if author.is_fast() else 1

    def kernel(self, name: str) -> list[str]:
        body = self._tiled(self._side) if self._side > 1 else self._plain()
        return [f"__global__ void {name}({self.head}) {{", *indent(body, 1), "}"]

    def grid(self, rows: str, columns: str) -> str:
        if self._side > 1:
            wide = 16 * self._side
            right = f"(({columns} + {wide - 1}) // {wide}, ({rows} + {wide - 1}) // {wide})"
            return self._author.slip("argument", right, f"({columns} // {wide}, {rows} // {2 * wide})")
        return items(self._author, f"({rows} * {columns})")

    def _finish(self, value: str) -> list[str]:
        start = self._author.slip("start", f"{value} + d[j]", value) if self._bias else value
        put = statement(self._author, "out[i * n + j] = v;", ("out", "y"))
        return [f"float v = {start};", *self._epilogue, put]

    def _plain(self) -> list[str]:
        author = self._author
        weight = author.slip("index", "w[j * k + p]", "w[p * n + j]")
        return [
            ITEM.replace("i =", "t =", 1),
            f"if ({author.slip('bound', 't >= m * n', 't >= m * n / 2')}) return;",
            "long i = t / n, j = t % n;",
            "float s = 0.0f;",
            f"for (long p = 0; {author.slip('bound', 'p < k', 'p < k - 1')}; p++) s += x[i * k + p] * {weight};",
            *self._finish("s"),
        ]

    def _tiled(self, side: int) -> list[str]:
        author, wide, deep = self._author, 16 * side, 64 // side
        # What a thread loads lies in groups of four neighbours, which one instruction reads.
        place = "4 * ty + u" if side == 4 else "64 * (u / 4) + 4 * ty + u % 4"
        other = place.replace("ty", "tx").replace("u", "z")
        inner = author.slip("index", f"b[q][{other}]", "b[q][tx + z]")
        end = author.slip("bound", "p < k", f"p < k - {deep}")
        return [
            f"__shared__ __align__(16) float a[{deep}][{wide + 4}], b[{deep}][{wide + 4}];",
            "int t = threadIdx.x, tx = t % 16, ty = t / 16;",
            f"long row = blockIdx.y * {wide}L, col = blockIdx.x * {wide}L;",
            f"float acc[{side}][{side}] = {{}}, f[{side}], g[{side}];",
            f"for (long p = 0; {end}; p += {deep}) {{",
            "    for (int e = t; e < 1024; e += 256) {",
            f"        long r = e / {deep}, c = p + e % {deep};",
            f"        a[e % {deep}][r] = row + r < m && c < k ? x[(row + r) * k + c] : 0.0f;",
            f"        b[e % {deep}][r] = col + r < n && c < k ? w[(col + r) * k + c] : 0.0f;",
            "    }",
            "    __syncthreads();",
            f"    for (int q = 0; q < {deep}; q++) {{",
            f"        for (int u = 0; u < {side}; u++) f[u] = a[q][{place}];",
            f"        for (int z = 0; z < {side}; z++) g[z] = {inner};",
            f"        for (int u = 0; u < {side}; u++) {{",
            f"            for (int z = 0; z < {side}; z++) acc[u][z] += f[u] * g[z];",
            "        }",
            "    }",
            *([author.slip("syntax", "    __syncthreads();", "    __syncthreads()")]),
            "}",
            f"for (int u = 0; u < {side}; u++) {{",
            f"    for (int z = 0; z < {side}; z++) {{",
            f"        long i = row + {place}, j = col + {other};",
            "        if (i >= m || j >= n) continue;",
            *indent(self._finish("acc[u][z]"), 2),
            "    }",
            "}",
        ]


def linear(spec: Linear, author: Author) -> KernelAnswer:
    join = [author.slip("formula", "v = v + e[i * n + j];", "v = v - e[i * n + j];")] if spec.residual else []
    extra = "const float *e, " if spec.residual else ""
    # In a tile `e` counts loads, but in a scope of its own.
    product = Product(author, spec.bias, [*join, *c_lines(spec.steps, author)], extra)
    tensors = [
        "x",
        "self.linear.weight",
        *(["self.linear.bias"] if spec.bias else []),
        *(["y"] if spec.residual else []),
    ]
    forward = (
        "m, k, n = x.shape[0], x.shape[1], self.linear.weight.shape[0]",
        "out = torch.empty(m, n, device=x.device)",
        launch("run", product.grid("m", "n"), *tensors, "out", "m", "n", "k"),
    )
    return KernelAnswer(tuple(product.kernel("run")), forward)


def perceptron(spec: Perceptron, author: Author) -> KernelAnswer:
    """Products in one kernel, what is between them in another."""
    product = Product(author, True, [])
    gate = author.slip("formula", "f(t[i]) * s[i]", "f(t[i]) + s[i]") if spec.gated else "f(t[i])"
    pointers = "float *t, const float *s, long n" if spec.gated else "float *t, long n"
    mix = [f"__global__ void mix({pointers}) {{", "    " + ITEM, f"    if (i < n) t[i] = {gate};", "}"]
    add = [
        "__global__ void add(const float *x, float *out, long n) {",
        "    " + ITEM,
        "    if (i < n) " + author.slip("formula", "out[i] += x[i];", "out[i] -= x[i];"),
        "}",
    ]
    up, down = product.grid("m", "n"), product.grid("m", "k")
    forward = [
        "m, k, n = x.shape[0], x.shape[1], self.up.weight.shape[0]",
        "t = torch.empty(m, n, device=x.device)",
        launch("dense", up, "x", "self.up.weight", "self.up.bias", "t", "m", "n", "k"),
    ]
    if spec.gated:
        forward += [
            "s = torch.empty_like(t)",
            launch("dense", up, "x", "self.gate.weight", "self.gate.bias", "s", "m", "n", "k"),
        ]
    forward += [
        launch("mix", items(author, "(m * n)"), "t", *(["s"] if spec.gated else []), "m * n"),
        "out = torch.empty_like(x)",
        launch("dense", down, "t", "self.down.weight", "self.down.bias", "out", *_down(author)),
        *([launch("add", "(m * k + 255) // 256", "x", "out", "m * k")] if spec.residual else []),
    ]
    kernels = ("dense", "mix", *(["add"] if spec.residual else []))
    source = (
        *product.kernel("dense"),
        *chain_function(spec.steps, author),
        *mix,
        *(add if spec.residual else []),
    )
    return KernelAnswer(source, tuple(forward), kernels)


def _down(author: Author) -> tuple[str, str, str]:
    return ("m", "n", "k") if author.slip("argument", "", "wrong") else ("m", "k", "n")


def attention(spec: Attention, author: Author) -> KernelAnswer:
    """A block a query (fast), or a thread a query (slow); the row of scores lies in global memory."""
    group = RowGroup(author.is_fast())
    scale = author.slip("formula", "/ sqrtf((float)d)", "/ d", "* sqrtf((float)d)")
    limit = "r + 1" if spec.causal else "rows"
    cols = author.slip("bound", limit, f"{limit} - 1" if spec.causal else "rows / 2")
    exp = author.style("exp", "expf")
    key = author.slip("index", "k[c * d + p]", "k[p * d + c]")
    mean = author.slip("formula", "v / s", "v")
    columns = "threadIdx.x; p < d; p += blockDim.x" if group.together else "0; p < d; p++"
    body = [
        *group.prologue(author),
        f"long cols = {cols};",
        "float *b = a + r * rows;",
        *group.loop(
            "float v = 0.0f;",
            f"for (long p = 0; p < d; p++) v += q[r * d + p] * {key};",
            statement(author, f"b[c] = v {scale};"),
        ),
        *group.max("float m = -INFINITY;"),
        f"float s = {author.slip('start', '0.0f', '1.0f')};",
        *group.loop(f"b[c] = {exp}(b[c] - m);", "s += b[c];"),
        *group.sum(),
        f"for (long p = {columns}) {{",
        "    float v = 0.0f;",
        "    for (long c = 0; c < cols; c++) v += b[c] * x[c * d + p];",
        f"    out[r * d + p] = {mean};",
        "}",
    ]
    source = (
        *group.helpers(LARGEST, TOTAL),
        "__global__ void run(const float *q, const float *k, const float *x, float *a, float *out,",
        "        long rows, long d) {",
        *indent(body, 1),
        "}",
    )
    forward = (
        "rows, d = q.shape",
        "out = torch.empty_like(q)",
        "a = torch.empty(rows, rows, device=q.device)",
        launch("run", group.grid(author, "rows"), "q", "k", "v", "a", "out", "rows", "d", block=group.block),
    )
    return KernelAnswer(source, forward)
