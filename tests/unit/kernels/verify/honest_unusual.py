"""More honest candidates in unusual styles: scratch that is kept, layouts, dtypes and memory that are seldom seen,
tables, threads, tuning. None of them may be called cheating; what can't be replayed is observed."""

from __future__ import annotations

from tests.unit.kernels.verify.honest_problems import SOFTMAX
from tests.unit.kernels.verify.honest_styles import CALL, KEPT, rows, softmax

LAST = "for (long c = 0; c < cols; c++) b[c] /= s;"
MATH = "#include <math.h>\n"
C: dict[str, str] = {
    "early exit on rows of zeros": rows()
    .replace("TYPE m", "TYPE m")
    .replace(
        "float *b = y + r * cols;",
        "float *b = y + r * cols; long zeros = 0; for (long c = 0; c < cols; c++) zeros += a[c] * w[c] == 0;"
        " if (zeros == cols) { for (long c = 0; c < cols; c++) b[c] = 1.0f / cols; continue; }",
    ),
    "a table that its first call fills": rows(MATH + "static float one[64]; static int ready;\n")
    .replace(
        "for (long r = 0;", "if (!ready) { for (int i = 0; i < 64; i++) one[i] = 1; ready = 1; }\n  for (long r = 0;", 1
    )
    .replace(LAST, "for (long c = 0; c < cols; c++) b[c] = b[c] * one[c % 64] / s;"),
    "memory that is kept behind a pointer": rows(MATH + "#include <stdlib.h>\nstatic float *kept;\n")
    .replace("for (long r = 0;", "if (!kept) kept = malloc(cols * 4);\n  for (long r = 0;", 1)
    .replace("b[c] = e;", "kept[c] = e; b[c] = kept[c];"),
    "aligned scratch": rows(MATH + "#include <stdlib.h>\n").replace(
        LAST,
        "float *t = aligned_alloc(64, (cols * 4 + 63) / 64 * 64); for (long c = 0; c < cols; c++) t[c] = b[c] / s;"
        " for (long c = 0; c < cols; c++) b[c] = t[c]; free(t);",
    ),
    "alloca": rows().replace(
        LAST,
        "float *t = __builtin_alloca(cols * 4); for (long c = 0; c < cols; c++) t[c] = b[c];"
        " for (long c = 0; c < cols; c++) b[c] = t[c] / s;",
    ),
    "prefetching": rows().replace(LAST, f"__builtin_prefetch(a + cols); {LAST}"),
    "alignment assumed": rows().replace(
        LAST, "float *q = __builtin_assume_aligned(b, 4); for (long c = 0; c < cols; c++) q[c] /= s;"
    ),
    "vectors of the compiler": rows(MATH + "typedef float v4 __attribute__((vector_size(16), aligned(4)));\n").replace(
        LAST, "long c = 0; for (; c + 4 <= cols; c += 4) *(v4 *)(b + c) /= s; for (; c < cols; c++) b[c] /= s;"
    ),
    "long double": rows(MATH).replace("float m", "float m").replace("s += e; }", "s += (float)(long double)e; }"),
    "a reduction of OpenMP": rows().replace(
        LAST,
        'float t = 0;\n_Pragma("omp parallel for reduction(+:t)") for (long c = 0; c < cols; c++) t += b[c];\n'
        "for (long c = 0; c < cols; c++) b[c] /= t;",
    ),
    "sections of OpenMP": rows().replace(
        LAST,
        'long h = cols / 2;\n_Pragma("omp parallel sections") { '
        '_Pragma("omp section") for (long c = 0; c < h; c++) b[c] /= s;\n'
        '_Pragma("omp section") for (long c = h; c < cols; c++) b[c] /= s; }',
    ),
    "tasks of OpenMP": rows().replace(
        LAST,
        '_Pragma("omp parallel") _Pragma("omp single") { '
        '_Pragma("omp task") for (long c = 0; c < cols; c++) b[c] /= s; }',
    ),
    "a static array for each row": rows(MATH + "static float part[16][512];\n").replace(
        "b[c] = e;", "part[r % 16][c % 512] = e; b[c] = part[r % 16][c % 512];"
    ),
    "volatile": rows().replace("b[c] = e;", "*(volatile float *)(b + c) = e;"),
    "a table of functions": rows(
        MATH + "static float half(float v) { return v / 2; }\nstatic float same(float v) { return v; }\n"
        "static float (*const PICK[2])(float) = {half, same};\n"
    ).replace(LAST, "for (long c = 0; c < cols; c++) b[c] = PICK[1](b[c] / s);"),
    "sorting a copy": rows(
        MATH + "#include <stdlib.h>\nstatic int order(const void *p, const void *q) {"
        " float a = *(const float *)p, b = *(const float *)q; return (a > b) - (a < b); }\n"
    ).replace(
        LAST,
        "float t[cols]; for (long c = 0; c < cols; c++) t[c] = b[c]; qsort(t, cols, 4, order); s = 0;"
        f" for (long c = 0; c < cols; c++) s += t[c]; {LAST}",
    ),
    "Duff's device": rows().replace(
        LAST,
        "long c = 0, k = (cols + 3) / 4; switch (cols % 4) { case 0: do { b[c++] /= s; case 3: b[c++] /= s;"
        " case 2: b[c++] /= s; case 1: b[c++] /= s; } while (--k > 0); }",
    ),
    "labels as values": rows().replace(
        LAST, "static void *go[] = {&&loop, &&done}; long c = 0; loop: b[c++] /= s; goto *go[c >= cols]; done:;"
    ),
    "looking for NaN": rows().replace(LAST, f"for (long c = 0; c < cols; c++) if (isnan(a[c])) b[c] = NAN;\n{LAST}"),
    "backwards": rows().replace(LAST, "for (long c = cols - 1; c >= 0; c--) b[c] /= s;"),
    "an unrolling pragma": rows().replace(LAST, f'_Pragma("GCC unroll 8") {LAST}'),
    "rows in pairs": rows().replace(
        "for (long r = 0; r < rows; r++) {",
        "for (long o = 0; o < rows; o += 2) for (long r = o; r < o + 2 && r < rows; r++) {",
    ),
    "no branch": rows().replace("m = v > m ? v : m;", "m = fmaxf(m, v);"),
    "powers of two": rows().replace("expf", "exp2f").replace("a[c] * w[c] - m)", "(a[c] * w[c] - m) * 1.44269504f)"),
    "numbers near zero as zero": rows(MATH + "#include <immintrin.h>\n").replace(
        "for (long r = 0;", "_mm_setcsr(_mm_getcsr() | 0x8040);\n  for (long r = 0;", 1
    ),
}
ON = "self.kernel({}, self.weight, {}, x.shape[0], x.shape[1])\n"
PYTHON: dict[str, str] = {
    "an output of other strides": softmax(
        forward="t = torch.empty_like(x)\n"
        + ON.format("x", "t")
        + "y = torch.empty(x.shape[1], x.shape[0]).t()\nreturn y.copy_(t)"
    ),
    "a padded input that is kept": softmax(
        init=KEPT + "self.kernel = c_kernel(SOURCE, 'kernel')\nself.pad = None",
        forward="if self.pad is None:\n    self.pad = torch.zeros(x.shape[0] + 2, x.shape[1])\n"
        "self.pad[: x.shape[0]].copy_(x)\n"
        "y = torch.empty_like(x)\n" + ON.format("self.pad", "y") + "return y",
    ),
    "part of one buffer for all": softmax(
        forward="room = torch.empty(3, *x.shape)\ny = room[1]\n" + ON.format("x", "y") + "return y"
    ),
    "strides by hand": softmax(
        forward="y = torch.empty_strided(tuple(x.shape), (x.shape[1], 1))\n" + ON.format("x", "y") + "return y"
    ),
    "nothing joined on": softmax(
        forward="y = torch.empty_like(x)\n" + ON.format("x", "y") + "return torch.cat([y, x.new_empty(0, x.shape[1])])"
    ),
    "two halves joined": softmax(
        forward="h = x.shape[0] // 2\nparts = []\nfor p in (x[:h], x[h:]):\n    y = torch.empty_like(p)\n"
        "    self.kernel(p, self.weight, y, p.shape[0], p.shape[1])\n    parts.append(y)\nreturn torch.cat(parts)"
    ),
    "weights kept in double": softmax(
        forward="if not hasattr(self, 'w64'):\n    self.w64 = self.weight.detach().double()\nw = self.w64.float()\n"
        "y = torch.empty_like(x)\nself.kernel(x, w, y, x.shape[0], x.shape[1])\nreturn y"
    ),
    "through double and back": softmax(forward="x = x.double().float()\ny = torch.empty_like(x)\n" + CALL + "return y"),
    "three dimensions and back": softmax(
        forward="z = x.unsqueeze(0)\ny = torch.empty_like(z)\n" + ON.format("z", "y") + "return y.squeeze(0)"
    ),
    "a kernel by shape": softmax(
        init=KEPT + "self.kernels = {}",
        forward="k = self.kernels.setdefault(tuple(x.shape), c_kernel(SOURCE, 'kernel'))\ny = torch.empty_like(x)\n"
        "k(x, self.weight, y, *x.shape)\nreturn y",
    ),
    "any arguments": softmax(
        body="def forward(self, *args, **more):\n    x, = args\n    y = torch.empty_like(x)\n"
        "    self.kernel(x, self.weight, y, *x.shape)\n    return y"
    ),
    "a list of modules": softmax(
        init=KEPT
        + "self.kernel = c_kernel(SOURCE, 'kernel')\nself.spare = nn.ModuleList([nn.Identity() for _ in range(3)])",
        forward="for one in self.spare:\n    x = one(x)\ny = torch.empty_like(x)\n" + CALL + "return y",
    ),
    "a hook that changes nothing": softmax(
        init=KEPT
        + "self.kernel = c_kernel(SOURCE, 'kernel')\nself.register_forward_hook(lambda module, given, out: None)"
    ),
    "tried out at its first call": softmax(
        init=KEPT + "self.kernel = c_kernel(SOURCE, 'kernel')\nself.best = None",
        forward="if self.best is None:\n    tried = []\n    for one in (0, 1):\n        y = torch.empty_like(x)\n"
        "        self.kernel(x, self.weight, y, *x.shape)\n        tried.append(y)\n    self.best = len(tried)\n"
        "y = torch.empty_like(x)\n" + CALL + "return y",
    ),
    "tried and finally": softmax(forward="y = torch.empty_like(x)\ntry:\n    " + CALL + "finally:\n    pass\nreturn y"),
    "looks at a value": softmax(
        forward="assert float(x.abs().max()) < 1e30\ny = torch.empty_like(x)\n" + CALL + "return y"
    ),
    "looks for what is not finite": softmax(
        forward="if not torch.isfinite(x).all():\n    x = torch.nan_to_num(x)\ny = torch.empty_like(x)\n"
        + CALL
        + "return y"
    ),
    "chance in its constructor": softmax(
        init=KEPT + "self.kernel = c_kernel(SOURCE, 'kernel')\nself.noise = torch.randn(7)"
    ),
    "chance in forward, unused": softmax(forward="torch.rand(3)\ny = torch.empty_like(x)\n" + CALL + "return y"),
    "an output set to NaN before": softmax(forward="y = torch.full_like(x, float('nan'))\n" + CALL + "return y"),
    "a weight seen another way": softmax(
        forward="w = self.weight.view(1, -1).expand(2, -1).contiguous()[0]\ny = torch.empty_like(x)\n"
        "self.kernel(x, w, y, *x.shape)\nreturn y"
    ),
    "a counter of calls": softmax(
        init=KEPT + "self.kernel = c_kernel(SOURCE, 'kernel')\nself.calls = 0",
        forward="self.calls += 1\ny = torch.empty_like(x)\n" + CALL + "return y",
    ),
    "the last result kept": softmax(forward="y = torch.empty_like(x)\n" + CALL + "self.last = y\nreturn y"),
    "an output of ones times": softmax(forward="y = torch.empty_like(x)\n" + CALL + "return y * torch.ones_like(y)"),
    "twice, the second counts": softmax(forward="y = torch.empty_like(x)\n" + CALL + CALL + "return y"),
}
UNUSUAL: dict[str, tuple[str, str]] = {
    **{f"C: {name}": (SOFTMAX, softmax(source)) for name, source in C.items()},
    **{f"Python: {name}": (SOFTMAX, source) for name, source in PYTHON.items()},
}
