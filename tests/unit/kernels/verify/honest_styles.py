"""Honest candidates in unusual but legitimate styles. Most share one C source, so that the set compiles quickly."""

from __future__ import annotations

import textwrap

from tests.unit.kernels.verify.honest_problems import (
    ARGMAX,
    HALF,
    IN_PLACE,
    LINEAR,
    NORM,
    PRODUCT,
    RELU_OF_POSITIVE,
    SOFTMAX,
    TOP_TWO,
    TRIANGULAR,
)

ROWS = """
void kernel(const float *x, const float *w, float *y, long rows, long cols) {
  PARALLEL
  for (long r = 0; r < rows; r++) {
    const float *a = x + r * cols; float *b = y + r * cols;
    TYPE m = -INFINITY, s = 0;
    for (long c = 0; c < cols; c++) { TYPE v = a[c] * w[c]; m = v > m ? v : m; }
    for (long c = 0; c < cols; c++) { TYPE e = EXP(a[c] * w[c] - m); b[c] = e; s += e; }
    for (long c = 0; c < cols; c++) b[c] /= s;
  }
}
"""


def rows(before: str = "#include <math.h>", kind: str = "float", exp: str = "expf", parallel: str = "") -> str:
    return before + ROWS.replace("TYPE", kind).replace("EXP", exp).replace("PARALLEL", parallel)


HEAD = """
import torch
import torch.nn as nn
{imports}
from kbrl_async.launch import c_kernel

SOURCE = r\"\"\"{source}\"\"\"
{top}

class ModelNew(nn.Module):
    def __init__(self, {arguments}):
        super().__init__()
{init}

{body}
"""


def module(
    source: str,
    forward: str,
    *,
    arguments: str = "dim",
    init: str = "self.weight = nn.Parameter(torch.empty(dim))\nself.kernel = c_kernel(SOURCE, 'kernel')",
    top: str = "",
    imports: str = "",
    inputs: str = "x",
    body: str = "",
) -> str:
    """A candidate; `body` replaces the whole part after `__init__`."""
    forward = textwrap.indent(textwrap.dedent(forward), " " * 8)
    body = textwrap.indent(textwrap.dedent(body), " " * 4) or f"    def forward(self, {inputs}):\n{forward}"
    init = textwrap.indent(textwrap.dedent(init), " " * 8)
    top = textwrap.dedent(top)
    return HEAD.format(source=source, init=init, arguments=arguments, body=body, top=top, imports=imports)


PLAIN = """
y = torch.empty_like(x)
self.kernel(x, self.weight, y, x.shape[0], x.shape[1])
return y
"""
CALL = "self.kernel(x, self.weight, y, x.shape[0], x.shape[1])\n"
KEPT = "self.weight = nn.Parameter(torch.empty(dim))\n"


def softmax(source: str = "", forward: str = PLAIN, **parts: str) -> str:
    return module(source or rows(), forward, **parts)


C_STYLES = {
    "openmp": rows(parallel="#pragma omp parallel for"),
    "openmp with threads asked for": rows(parallel="#pragma omp parallel for num_threads(4) schedule(static)"),
    "simd pragma": rows().replace(
        "for (long c = 0; c < cols; c++) b", '_Pragma("omp simd") for (long c = 0; c < cols; c++) b'
    ),
    "restrict": rows().replace("float *x", "float *restrict x").replace("float *y", "float *restrict y"),
    "double accumulation": rows(kind="double", exp="exp"),
    "fast math pragma": rows('#pragma GCC optimize("Ofast")\n#include <math.h>'),
    "static scratch": rows().replace("b[c] = e;", "static float scratch[4096]; scratch[c] = e; b[c] = scratch[c];"),
    "tiled": rows().replace(
        "for (long c = 0; c < cols; c++) b[c] /= s;",
        "for (long t = 0; t < cols; t += 16) for (long c = t; c < t + 16 && c < cols; c++) b[c] /= s;",
    ),
    "static inline helper": rows(
        "#include <math.h>\nstatic inline float my_exp(float v) { return expf(v); }\n", exp="my_exp"
    ),
    "intrinsics": rows("#include <immintrin.h>\n#include <math.h>").replace(
        "s += e; }", "s += _mm_cvtss_f32(_mm_set_ss(e)); }"
    ),
    "kahan summation": rows()
    .replace("s = 0;", "s = 0; float lost = 0;")
    .replace("s += e; }", "float t = e - lost, u = s + t; lost = (u - s) - t; s = u; }"),
    "recursion": rows(
        "#include <math.h>\nstatic float total(const float *v, long n) {"
        " return n == 1 ? v[0] : total(v, n / 2) + total(v + n / 2, n - n / 2); }\n"
    )
    .replace("b[c] /= s;", "b[c] /= all;")
    .replace(
        "for (long c = 0; c < cols; c++) b[c] /=", "float all = total(b, cols); for (long c = 0; c < cols; c++) b[c] /="
    ),
    "struct and union": rows(
        "#include <math.h>\ntypedef struct { float top, sum; } row_t;\ntypedef union { float f; unsigned u; } bits_t;\n"
    ).replace("b[c] /= s;", "{ row_t row = {m, s}; bits_t q; q.f = row.sum; b[c] /= q.f; }"),
    "memcpy and memset": rows("#include <math.h>\n#include <string.h>\n").replace(
        "float *b = y + r * cols;",
        "float *b = y + r * cols; float row[512]; memset(row, 0, sizeof row); memcpy(row, a, cols * 4);",
    ),
    "malloc and free": rows("#include <math.h>\n#include <stdlib.h>\n").replace(
        "float *b = y + r * cols;", "float *b = y + r * cols; float *row = malloc(cols * 4); free(row);"
    ),
    "variable length array": rows()
    .replace("s = 0;", "s = 0; float kept[cols];")
    .replace("b[c] = e;", "kept[c] = e; b[c] = kept[c];"),
    "lookup table": rows("#include <math.h>\nstatic const float TWO[8] = {1, 2, 4, 8, 16, 32, 64, 128};\n").replace(
        "b[c] /= s;", "b[c] = b[c] * TWO[3] / (s * TWO[3]);"
    ),
    "macros and goto": rows("#include <math.h>\n#define AT(v, i) (v)[(i)]\n").replace(
        "b[c] /= s;", "{ if (s == 1) goto next; AT(b, c) /= s; next:; }"
    ),
    "function pointer": rows(
        "#include <math.h>\ntypedef float (*map_t)(float);\nstatic map_t chosen = expf;\n", exp="chosen"
    ),
    "unrolled by hand": rows().replace(
        "for (long c = 0; c < cols; c++) b[c] /= s;",
        "long c = 0; for (; c + 4 <= cols; c += 4) { b[c] /= s; b[c+1] /= s; b[c+2] /= s; b[c+3] /= s; }"
        " for (; c < cols; c++) b[c] /= s;",
    ),
    "reciprocal": rows().replace("b[c] /= s;", "b[c] *= 1.0f / s;"),
    "while loops and pointers": rows().replace(
        "for (long c = 0; c < cols; c++) b[c] /= s;", "float *p = b, *end = b + cols; while (p != end) *p++ /= s;"
    ),
    "online softmax": rows().replace(
        "for (long c = 0; c < cols; c++) { TYPE v", "for (long c = 0; c < cols; c++) { TYPE v"
    ),
}

PYTHON_STYLES = {
    "plain": softmax(),
    "zeros and a view": softmax(
        forward="y = torch.zeros(x.shape[0] * x.shape[1], dtype=x.dtype).view(x.shape)\n" + CALL + "return y"
    ),
    "new_empty": softmax(forward="y = x.new_empty(x.shape)\n" + CALL + "return y"),
    "full": softmax(forward="y = torch.full(x.shape, 3.0)\n" + CALL + "return y"),
    "clone as output": softmax(forward="y = x.clone()\n" + CALL + "return y"),
    "packed weights kept": softmax(
        forward="""
        if not hasattr(self, "packed"):
            self.packed = self.weight.detach().clone()
        y = torch.empty(x.shape)
        self.kernel(x.contiguous(), self.packed, y, x.shape[0], x.shape[1])
        return y.reshape(x.shape)
        """
    ),
    "transposed and back": softmax(
        forward="x = x.t().contiguous().t().contiguous()\ny = torch.empty_like(x)\n" + CALL + "return y"
    ),
    "written by slices": softmax(
        forward="""
        y = torch.empty_like(x)
        for start in range(0, x.shape[0], 5):
            part = x[start : start + 5]
            self.kernel(part, self.weight, y[start : start + 5], part.shape[0], part.shape[1])
        return y
        """
    ),
    "rows in a list comprehension, joined": softmax(
        forward="""
        def one(row):
            y = torch.empty_like(row)
            self.kernel(row, self.weight, y, 1, row.numel())
            return y
        return torch.stack([one(row) for row in x])
        """
    ),
    "a padded output, sliced": softmax(
        forward="y = torch.empty(x.shape[0] + 3, x.shape[1])\n" + CALL + "return y[: x.shape[0]]"
    ),
    "buffers registered": softmax(
        init=KEPT + "self.register_buffer('ones', torch.ones(3))\nself.kernel = c_kernel(SOURCE, 'kernel')"
    ),
    "unused submodules": softmax(init=KEPT + "self.spare = nn.Linear(3, 3)\nself.kernel = c_kernel(SOURCE, 'kernel')"),
    "type hints and docstrings": softmax(
        imports="from __future__ import annotations\nfrom typing import Optional".splitlines()[1],
        body='''
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Row-wise softmax."""
            y: torch.Tensor = torch.empty_like(x)
            self.kernel(x, self.weight, y, x.shape[0], x.shape[1])
            return y
        ''',
    ),
    "default and keyword arguments": softmax(
        body="""
        def launch(self, x, y, *, rows=None, cols=None):
            self.kernel(x, self.weight, y, rows or x.shape[0], cols or x.shape[1])

        def forward(self, x, scale=1.0):
            y = torch.empty_like(x)
            self.launch(x, y, cols=x.shape[1])
            return y
        """
    ),
    "static method and property": softmax(
        body="""
        @staticmethod
        def room(x):
            return torch.empty_like(x)

        @property
        def scale(self):
            return self.weight.detach()

        def forward(self, x):
            y = self.room(x)
            self.kernel(x, self.scale, y, *x.shape)
            return y
        """
    ),
    "no_grad decorator": softmax(
        body="""
        @torch.no_grad()
        def forward(self, x):
            y = torch.empty_like(x)
            self.kernel(x, self.weight, y, x.shape[0], x.shape[1])
            return y
        """
    ),
    "inference mode": softmax(
        forward="with torch.inference_mode():\n    y = torch.empty_like(x)\n    " + CALL + "    return y"
    ),
    "helper class with slots": softmax(
        top="""
        class Launcher:
            __slots__ = ("kernel",)
            def __init__(self, name):
                self.kernel = c_kernel(SOURCE, name)
            def __call__(self, x, w):
                y = torch.empty_like(x)
                self.kernel(x, w, y, x.shape[0], x.shape[1])
                return y
        """,
        init=KEPT + "self.launch = Launcher('kernel')",
        forward="return self.launch(x, self.weight)",
    ),
    "dataclass configuration": softmax(
        imports="from dataclasses import dataclass",
        top="""
        @dataclass(frozen=True)
        class Config:
            name: str = "kernel"
            tile: int = 64
        """,
        init=KEPT + "self.config = Config()\nself.kernel = c_kernel(SOURCE, self.config.name)",
    ),
    "own module in a Sequential": softmax(
        top="""
        class Rows(nn.Module):
            def __init__(self):
                super().__init__()
                self.kernel = c_kernel(SOURCE, "kernel")
            def forward(self, pair):
                x, w = pair
                y = torch.empty_like(x)
                self.kernel(x, w, y, x.shape[0], x.shape[1])
                return y
        """,
        init=KEPT + "self.net = nn.Sequential(Rows())",
        forward="return self.net((x, self.weight))",
    ),
    "functional with a module-level kernel": softmax(
        top="""
        _KERNEL = c_kernel(SOURCE, "kernel")
        def fused(x, weight):
            y = torch.empty_like(x)
            _KERNEL(x, weight, y, x.shape[0], x.shape[1])
            return y
        """,
        init=KEPT,
        forward="return fused(x, self.weight)",
    ),
    "lambda": softmax(
        init=KEPT + "kernel = c_kernel(SOURCE, 'kernel')\nself.run = lambda *given: kernel(*given)",
        forward="y = torch.empty_like(x)\nself.run(x, self.weight, y, x.shape[0], x.shape[1])\nreturn y",
    ),
    "functools.partial and a cache": softmax(
        imports="import functools",
        top="""
        @functools.lru_cache(maxsize=None)
        def get(name):
            return c_kernel(SOURCE, name)
        """,
        init=KEPT + "self.run = functools.partial(get('kernel'))",
        forward="y = torch.empty_like(x)\nself.run(x, self.weight, y, x.shape[0], x.shape[1])\nreturn y",
    ),
    "kernels in a dictionary": softmax(
        init=KEPT + "self.kernels = {name: c_kernel(SOURCE, name) for name in ('kernel',)}",
        forward="y = torch.empty_like(x)\nself.kernels['kernel'](x, self.weight, y, x.shape[0], x.shape[1])\nreturn y",
    ),
    "try around the import": softmax(
        imports="try:\n    from kbrl_async.launch import c_kernel as found\nexcept ImportError:\n    found = None"
    ),
    "asserts and shape checks": softmax(forward="assert x.dim() == 2 and x.is_contiguous(), 'rows'\n" + PLAIN.strip()),
    "branches by shape, both own": softmax(
        forward="y = torch.empty_like(x)\nif x.shape[1] > 1024:\n    " + CALL + "else:\n    " + CALL + "return y"
    ),
    "class attribute as source": softmax(
        body="""
        TEXT = SOURCE
        NAME = "kernel"

        def forward(self, x):
            y = torch.empty_like(x)
            c_kernel(self.TEXT, self.NAME)(x, self.weight, y, x.shape[0], x.shape[1])
            return y
        """,
        init=KEPT,
    ),
    "a scratch buffer kept, the output fresh": softmax(
        init=KEPT + "self.scratch = torch.empty(0)\nself.kernel = c_kernel(SOURCE, 'kernel')",
        forward="""
        if self.scratch.numel() != x.numel():
            self.scratch = torch.empty_like(x)
        self.kernel(x, self.weight, self.scratch, x.shape[0], x.shape[1])
        return self.scratch.clone()
        """,
    ),
    "constructor of the reference kept": softmax(
        init="self.weight = nn.Parameter(torch.randn(dim))\nself.kernel = c_kernel(SOURCE, 'kernel')"
    ),
    "the reference pasted beside it, unused": softmax(top=SOFTMAX.replace("import torch\nimport torch.nn as nn\n", "")),
    "library call for a sub-step before": softmax(forward="x = torch.mul(x, 1.0)\n" + PLAIN.strip()),
    "library call for a sub-step after": softmax(forward=PLAIN.replace("return y", "return torch.clamp(y, 0.0, 1.0)")),
}

BUILT = rows().replace("{", "{{").replace("}", "}}")
SOURCES_FROM_CONSTANTS = {
    "f-string": ('TILE = 4\nTEXT = f"""#define TILE {TILE}\n{SOURCE}"""', "TEXT"),
    "concatenation": ('TEXT = "#define TILE 4\\n" + SOURCE', "TEXT"),
    "format": ('TEXT = "#define TILE {tile}\\n".format(tile=4) + SOURCE', "TEXT"),
    "percent": ('TEXT = "#define TILE %d\\n" % 4 + SOURCE', "TEXT"),
    "replace": ('TEXT = SOURCE.replace("INFINITY", "1e30f")', "TEXT"),
    "join": ('TEXT = "\\n".join(["#define A 1", SOURCE])', "TEXT"),
    "dedent": ("import textwrap\nTEXT = textwrap.dedent(SOURCE)", "TEXT"),
    "repetition": ('TEXT = "/* pad */\\n" * 3 + SOURCE', "TEXT"),
    "loop in a comprehension": ('TEXT = "".join(f"#define N{i} {i * 4}\\n" for i in range(3)) + SOURCE', "TEXT"),
    "function of a constant": (
        'def make(tile=4):\n    """Source."""\n    return f"#define TILE {tile}\\n{SOURCE}"\n',
        "make(8)",
    ),
    "dictionary": ('TEXTS = {"a": SOURCE, "b": ""}', 'TEXTS["a"]'),
    "local variable": ("", 'SOURCE + "\\n"'),
}

CONTIGUOUS = "out = torch.empty(x.shape[0], self.linear.weight.shape[0])\n"
LINEAR_SOURCE = """
void kernel(const float *x, const float *w, const float *b, float *y, long rows, long n, long m) {
  for (long r = 0; r < rows; r++) for (long j = 0; j < m; j++) {
    float s = b[j];
    for (long k = 0; k < n; k++) s += x[r * n + k] * w[j * n + k];
    y[r * m + j] = s > 0 ? s : 0;
  }
}
void relu(float *y, long n) { for (long i = 0; i < n; i++) y[i] = y[i] > 0 ? y[i] : 0; }
"""
LINEAR_INIT = (
    "self.linear = nn.Linear(n, m)\nself.kernel = c_kernel(SOURCE, 'kernel')\nself.relu = c_kernel(SOURCE, 'relu')"
)


def linear(forward: str) -> str:
    return module(LINEAR_SOURCE, forward, arguments="n, m", init=LINEAR_INIT)


SMALL = """
#include <stdint.h>
#include <math.h>
#include <string.h>
void gather(const float *x, const int64_t *index, float *y, float *z, int rows, int chosen, int cols, float two) {
  for (int r = 0; r < chosen; r++) for (int c = 0; c < cols; c++) y[r * cols + c] = x[index[r] * cols + c];
  for (int i = 0; i < rows * cols; i++) z[i] = x[i] * two;
}
void twice(float *x, long n) { for (long i = 0; i < n; i++) x[i] = 2 * x[i] + 1; }
void product(const float *a, const float *b, float *y, long n, long k, long m) {
  memset(y, 0, n * m * sizeof(float));
  for (long i = 0; i < n; i++) for (long j = 0; j < k; j++)
    for (long l = 0; l < m; l++) y[i*m+l] += a[i*k+j] * b[j*m+l];
}
void sums(const uint16_t *x, uint16_t *y, long rows, long cols) {
  for (long r = 0; r < rows; r++) {
    float s = 0;
    for (long c = 0; c < cols; c++) {
      uint32_t bits = (uint32_t)x[r * cols + c] << 16; float v; memcpy(&v, &bits, 4);
      s += v; memcpy(&bits, &s, 4); bits &= 0xFFFFF000u; memcpy(&s, &bits, 4);
    }
    uint32_t bits; memcpy(&bits, &s, 4); y[r] = (uint16_t)((bits + 0x8000u) >> 16);
  }
}
void norm(const float *x, const float *w, const float *b, float *y, long rows, long n, float eps) {
  for (long r = 0; r < rows; r++) {
    float m = 0, v = 0;
    for (long i = 0; i < n; i++) m += x[r*n+i]; m /= n;
    for (long i = 0; i < n; i++) v += (x[r*n+i]-m)*(x[r*n+i]-m);
    float k = 1.0f / sqrtf(v / n + eps);
    for (long i = 0; i < n; i++) y[r*n+i] = (x[r*n+i] - m) * k * w[i] + b[i];
  }
}
void lower(const float *a, const float *b, float *y, long n) {
  for (long i = 0; i < n; i++) for (long j = 0; j < n; j++) {
    float s = 0;
    for (long k = j; k <= i; k++) s += a[i*n+k] * b[k*n+j];
    y[i*n+j] = j <= i ? s : 0;
  }
}
void top(const float *x, int64_t *place, float *value, long rows, long n) {
  for (long r = 0; r < rows; r++) {
    long best = 0;
    for (long i = 1; i < n; i++) if (x[r*n+i] >= x[r*n+best]) best = i;
    place[r] = best; value[r] = x[r*n+best];
  }
}
void relu(float *y, long n) { for (long i = 0; i < n; i++) y[i] = y[i] > 0 ? y[i] : 0; }
"""


def small(name: str, forward: str, inputs: str = "x", arguments: str = "*none", init: str = "") -> str:
    init = init + f"self.kernel = c_kernel(SOURCE, '{name}')"
    return module(SMALL, forward, arguments=arguments, init=init, inputs=inputs)


OTHERS = {
    "a library module may hold the parameters": (
        LINEAR,
        linear(
            "y, held = torch.empty(x.shape[0], 17), self.linear\n"
            "self.kernel(x, held.weight, held.bias, y, x.shape[0], x.shape[1], 17)\nreturn y"
        ),
    ),
    "a product from the library, an own epilogue in place": (
        LINEAR,
        linear("y = self.linear(x)\nself.relu(y, y.numel())\nreturn y"),
    ),
    "several outputs and integer inputs": (
        TOP_TWO,
        small(
            "gather",
            """
            y = torch.empty(index.shape[0], x.shape[1])
            z = torch.empty_like(x)
            self.kernel(x, index, y, z, x.shape[0], index.shape[0], x.shape[1], 2.0)
            return y, (z, 3)
            """,
            inputs="x, index",
        ),
    ),
    "in place where the reference is in place": (IN_PLACE, small("twice", "self.kernel(x, x.numel())\nreturn x")),
    "out of place where the reference is in place": (
        IN_PLACE,
        small("twice", "y = x.clone()\nself.kernel(y, y.numel())\nreturn y"),
    ),
    "a product summed in plain float": (
        PRODUCT,
        small("product", "y = torch.empty(24, 20)\nself.kernel(a, b, y, 24, 300, 20)\nreturn y", inputs="a, b"),
    ),
    "a narrow accumulator where half precision allows it": (
        HALF,
        small("sums", "y = torch.empty(x.shape[0], dtype=x.dtype)\nself.kernel(x, y, *x.shape)\nreturn y"),
    ),
    "two passes for a variance": (
        NORM,
        small(
            "norm",
            """
            y = torch.empty_like(x)
            self.kernel(x, self.norm.weight, self.norm.bias, y, x.numel() // x.shape[-1], x.shape[-1], 1e-5)
            return y
            """,
            arguments="features",
            init="self.norm = nn.LayerNorm(features)\n",
        ),
    ),
    "using that the inputs are triangular": (
        TRIANGULAR,
        small("lower", "y = torch.empty_like(a)\nself.kernel(a, b, y, a.shape[0])\nreturn y", inputs="a, b"),
    ),
    "the last of equal maxima, in a dictionary": (
        ARGMAX,
        small(
            "top",
            """
            place = torch.empty(x.shape[0], dtype=torch.int64)
            value = torch.empty(x.shape[0])
            self.kernel(x, place, value, *x.shape)
            return dict(value=value, place=place)
            """,
        ),
    ),
    "in place on a copy where it changes nothing": (
        RELU_OF_POSITIVE,
        small("relu", "y = x.clone()\nself.kernel(y, y.numel())\nreturn y"),
    ),
}


def _from_constants(top: str, expression: str) -> str:
    top, imports = (top.partition("\n")[2], top.partition("\n")[0]) if top.startswith("import") else (top, "")
    init = KEPT + f"text = {expression}\nself.kernel = c_kernel(text, name='kernel')"
    return softmax(top=top, imports=imports, init=init)


STYLES: dict[str, tuple[str, str]] = {
    **{f"C: {name}": (SOFTMAX, softmax(source)) for name, source in C_STYLES.items()},
    **{f"Python: {name}": (SOFTMAX, source) for name, source in PYTHON_STYLES.items()},
    **{f"source by {name}": (SOFTMAX, _from_constants(*parts)) for name, parts in SOURCES_FROM_CONSTANTS.items()},
    **OTHERS,
}
