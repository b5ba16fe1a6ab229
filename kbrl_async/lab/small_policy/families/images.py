"""Work over images: pooling and depth-wise convolution, normalised and activated in the same pass."""

from __future__ import annotations

import msgspec

from kbrl_async.kernels.problems.writing import Module, NamedSize, indent
from kbrl_async.lab.small_policy.author import Author
from kbrl_async.lab.small_policy.families.source import KernelAnswer, statement
from kbrl_async.lab.small_policy.ops import Chains, ChainStep, torch_lines

HEAD = "long g, long h, long w"
"""`g` planes of `h × w` inputs."""


def shapes(batch: int, channels: int, size: int) -> tuple[NamedSize, ...]:
    return (NamedSize("batch", batch, 16), NamedSize("channels", channels, 128), NamedSize("size", size, 112))


class Pooling(msgspec.Struct, frozen=True):
    """`chain → 2 × 2 pooling → chain`; `kind` is `max` or `avg`."""

    kind: str
    after: tuple[ChainStep, ...] = ()
    batch: int = 4
    channels: int = 16
    size: int = 64

    def module(self) -> Module:
        return Module(
            title=f"2 × 2 {self.kind} pooling with a fused chain.",
            shapes=shapes(self.batch, self.channels, self.size),
            forward=(f"x = F.{self.kind}_pool2d(x, 2)", *torch_lines(self.after)),
            inputs=("torch.randn(batch, channels, size, size)",),
        )

    def answer(self, author: Author) -> KernelAnswer:
        restrict = author.style("", "restrict ")
        if self.kind == "max":
            first, join = author.slip("start", "-INFINITY", "1e30f"), "v = t[u] > v ? t[u] : v;"
            finish: list[str] = []
        else:
            first, join = author.slip("start", "0.0f", "1.0f"), "v += t[u];"
            finish = [author.slip("formula", "v = v * 0.25f;", "v = v * 0.5f;", "v = v / 2.0f;")]
        below = author.slip("index", "s[w], s[w + 1]", "s[h], s[2]", "s[2], s[3]")
        chains = Chains(author)
        chain = chains.call("after", self.after)
        corner = author.slip("index", "(2 * i) * w + 2 * j", "i * w + j", "(2 * i) * w + j")
        kernel = (
            *chains.functions,
            f"void run(const float *{restrict}x, float *{restrict}out, {HEAD}) {{",
            f"    for (long p = 0; {author.slip('bound', 'p < g', 'p < g - 1', 'p < g / 2')}; p++) {{",
            "        for (long i = 0; i < h / 2; i++) {",
            "            for (long j = 0; j < w / 2; j++) {",
            f"                const float *s = x + p * h * w + {corner};",
            f"                float t[4] = {{s[0], s[1], {below}}};",
            f"                float v = {first};",
            f"                for (long u = 0; u < 4; u++) {join}",
            *indent([*finish, *chain], 4),
            "                " + statement(author, "out[(p * (h / 2) + i) * (w / 2) + j] = v;", ("out", "y")),
            "            }",
            "        }",
            "    }",
            "}",
        )
        planes = author.slip("argument", "x.shape[0] * x.shape[1]", "x.shape[0]", "x.shape[1]")
        return KernelAnswer(
            kernel,
            (
                "out = torch.empty(x.shape[0], x.shape[1], x.shape[2] // 2, x.shape[3] // 2)",
                f"self.kernel(x, out, {planes}, x.shape[2], x.shape[3])",
            ),
        )


NORMALISE = (
    "double s = 0.0;",
    "for (long c = 0; c < h * w; c++) s += o[c];",
    "float u = s / (h * w);",
    "double q = 0.0;",
    "for (long c = 0; c < h * w; c++) q += (o[c] - u) * (o[c] - u);",
    "float z = 1.0f / sqrtf(q / (h * w) + 1e-5f);",
)


class DepthwiseConv(msgspec.Struct, frozen=True):
    """3 × 3 depth-wise convolution with padding 1 `→ [instance norm] → chain`."""

    after: tuple[ChainStep, ...] = ()
    norm: bool = False
    batch: int = 2
    channels: int = 32
    size: int = 88

    def module(self) -> Module:
        return Module(
            title="Depth-wise 3 × 3 convolution with a fused chain.",
            shapes=shapes(self.batch, self.channels, self.size),
            forward=(
                "x = self.conv(x)",
                *(["x = F.instance_norm(x)"] if self.norm else []),
                *torch_lines(self.after),
            ),
            inputs=("torch.randn(batch, channels, size, size)",),
            init_arguments=("channels",),
            members=("self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)",),
        )

    def answer(self, author: Author) -> KernelAnswer:
        restrict = author.style("", "restrict ")
        inputs = ", ".join(f"const float *{restrict}{name}" for name in "xfd")
        channel = author.slip("index", "p % ch", "p / ch", "p")
        chains = Chains(author)
        chain = chains.call("after", self.after)
        inside = author.slip(
            "bound", "y < 0 || y >= h || z < 0 || z >= w", "y < 0 || z < 0", "y <= 0 || y >= h || z <= 0 || z >= w"
        )
        start = author.slip("start", "d[k]", "0.0f", "d[p]")
        store = statement(author, "o[i * w + j] = v;", ("o", "y"))
        after = (
            [
                *NORMALISE,
                "for (long c = 0; c < h * w; c++) {",
                *indent(["float v = (o[c] - u) * z;", *chain, "o[c] = v;"], 1),
                "}",
            ]
            if self.norm
            else []
        )
        kernel = (
            *chains.functions,
            f"void run({inputs}, float *{restrict}out, {HEAD}, long ch) {{",
            f"    for (long p = 0; {author.slip('bound', 'p < g', 'p < g - 1', 'p < g / 2')}; p++) {{",
            f"        long k = {channel};",
            "        float *o = out + p * h * w;",
            "        for (long i = 0; i < h; i++) {",
            "            for (long j = 0; j < w; j++) {",
            f"                float v = {start};",
            "                for (long t = 0; t < 9; t++) {",
            "                    long y = i + t / 3 - 1, z = j + t % 3 - 1;",
            f"                    if ({inside}) continue;",
            f"                    v += x[p * h * w + y * w + z] * f[k * 9 + {author.slip('index', 't', '8 - t')}];",
            "                }",
            *(indent(chain, 4) if not self.norm else []),
            "                " + store,
            "            }",
            "        }",
            *indent(after, 2),
            "    }",
            "}",
        )
        planes = author.slip("argument", "x.shape[0] * x.shape[1]", "x.shape[0]", "x.shape[1]")
        return KernelAnswer(
            kernel,
            (
                "out = torch.empty_like(x)",
                f"self.kernel(x, self.conv.weight, self.conv.bias, out, {planes}, x.shape[2], x.shape[3], x.shape[1])",
            ),
        )
