"""Small blocks of networks: perceptrons, gated units and attention, each in one C function."""

from __future__ import annotations

import msgspec

from kbrl_async.kernels.problems.writing import Module, NamedSize, indent
from kbrl_async.lab.small_policy.author import Author
from kbrl_async.lab.small_policy.families.linear import product
from kbrl_async.lab.small_policy.families.rows import LOOP, Alone
from kbrl_async.lab.small_policy.families.source import KernelAnswer, statement
from kbrl_async.lab.small_policy.ops import Chains, ChainStep, torch_lines


def dense(author: Author, restrict: str) -> list[str]:
    """A C function `dense` that computes `y = x wᵀ + d`."""
    return [
        f"static void dense(const float *{restrict}x, const float *{restrict}w, const float *{restrict}d, "
        f"float *{restrict}y, long m, long n, long k) {{",
        *indent(product(author, True, [statement(author, "y[i * n + j] = v;", ("y", "o"))]), 1),
        "}",
    ]


class Perceptron(msgspec.Struct, frozen=True):
    """`linear → chain → linear`, optionally gated (`chain(up) · gate`) or with a residual."""

    steps: tuple[ChainStep, ...]
    gated: bool = False
    residual: bool = False
    batch: int = 8
    width: int = 512
    hidden: int = 1024

    def module(self) -> Module:
        members = ["self.up = nn.Linear(width, hidden)", "self.down = nn.Linear(hidden, width)"]
        if self.gated:
            members.insert(1, "self.gate = nn.Linear(width, hidden)")
        keep = self.gated or self.residual
        return Module(
            title="A feed-forward block.",
            shapes=(
                NamedSize("batch", self.batch, 2048),
                NamedSize("width", self.width, 1024),
                NamedSize("hidden", self.hidden, 4096),
            ),
            forward=(
                *(["y = x"] if keep else []),
                "x = self.up(x)",
                *torch_lines(self.steps),
                *(["x = x * self.gate(y)"] if self.gated else []),
                "x = self.down(x)",
                *(["x = x + y"] if self.residual else []),
            ),
            inputs=("torch.randn(batch, width)",),
            init_arguments=("width", "hidden"),
            members=tuple(members),
        )

    def answer(self, author: Author) -> KernelAnswer:
        restrict = author.style("", "restrict ")
        names = [
            "x",
            "a",
            "b",
            *(["c", "d"] if self.gated else []),
            "e",
            "f",
            "t",
            *(["s"] if self.gated else []),
            "out",
        ]
        parameters = ", ".join(
            ("float *" if name in ("t", "s", "out") else "const float *") + restrict + name for name in names
        )
        gate = [author.slip("formula", "v = v * s[i];", "v = v + s[i];")] if self.gated else []
        add = ["    for (long i = 0; i < m * k; i++) " + author.slip("formula", "out[i] += x[i];", "out[i] -= x[i];")]
        chains = Chains(author)
        chain = chains.call("after", self.steps)
        kernel = (
            *chains.functions,
            *dense(author, restrict),
            f"void run({parameters}, long m, long n, long k) {{",
            "    dense(x, a, b, t, m, n, k);",
            *(["    dense(x, c, d, s, m, n, k);"] if self.gated else []),
            "    for (long i = 0; i < m * n; i++) {",
            "        float v = t[i];",
            *indent([*chain, *gate], 2),
            "        " + statement(author, "t[i] = v;"),
            "    }",
            "    " + author.slip("argument", "dense(t, e, f, out, m, k, n);", "dense(t, e, f, out, m, n, k);"),
            *(add if self.residual else []),
            "}",
        )
        layers = ["up", *(["gate"] if self.gated else []), "down"]
        weights = ", ".join(f"self.{layer}.weight, self.{layer}.bias" for layer in layers)
        scratch = "t, s" if self.gated else "t"
        return KernelAnswer(
            kernel,
            (
                "t = torch.empty(x.shape[0], self.up.weight.shape[0])",
                *(["s = torch.empty_like(t)"] if self.gated else []),
                "out = torch.empty_like(x)",
                f"self.kernel(x, {weights}, {scratch}, out, x.shape[0], t.shape[1], x.shape[1])",
            ),
        )


class Attention(msgspec.Struct, frozen=True):
    """`softmax(q kᵀ · scale) v` of one head, optionally causal."""

    causal: bool = False
    length: int = 320
    dim: int = 64

    def module(self) -> Module:
        return Module(
            title="Scaled dot-product attention of one head.",
            shapes=(NamedSize("length", self.length, 2048), NamedSize("dim", self.dim, 128)),
            forward=(
                "s = q @ k.T / q.shape[-1] ** 0.5",
                *(["s = s.masked_fill(torch.ones_like(s).triu(1) > 0, float('-inf'))"] if self.causal else []),
                "x = torch.softmax(s, dim=-1) @ v",
            ),
            inputs=("torch.randn(length, dim)",) * 3,
            arguments=("q", "k", "v"),
        )

    def answer(self, author: Author) -> KernelAnswer:
        restrict = author.style("", "restrict ")
        scale = author.slip("formula", "/ sqrtf(d)", "/ d", "* sqrtf(d)")
        limit = "i + 1" if self.causal else "n"
        end = author.slip("formula", "o[p] / s", "o[p]")
        columns = f"    long cols = {author.slip('bound', limit, limit + ' - 1' if self.causal else 'n - 1', 'n / 2')};"
        exp = author.style("exp", "expf")
        inputs = ", ".join(f"const float *{restrict}{name}" for name in "qkx")
        key = author.slip("index", "k[c * d + p]", "k[p * d + c]")
        kernel = (
            f"void run({inputs}, float *{restrict}out, float *{restrict}b, long n, long d) {{",
            "    for (long i = 0; i < n; i++) {",
            "    " + columns,
            "        float *o = out + i * d;",
            "        " + LOOP,
            "            float v = 0.0f;",
            f"            for (long p = 0; p < d; p++) v += q[i * d + p] * {key};",
            "            " + statement(author, f"b[c] = v {scale};"),
            "        }",
            *indent(Alone().max("float m = -INFINITY;"), 2),
            f"        float s = {author.slip('start', '0.0f', '1.0f')};",
            "        for (long p = 0; p < d; p++) o[p] = 0.0f;",
            "        " + LOOP,
            f"            float e = {exp}(b[c] - m);",
            "            s += e;",
            "            for (long p = 0; p < d; p++) o[p] += e * x[c * d + p];",
            "        }",
            f"        for (long p = 0; p < d; p++) o[p] = {end};",
            "    }",
            "}",
        )
        sizes = author.slip("argument", "q.shape[0], q.shape[1]", "q.shape[1], q.shape[0]", "q.shape[0]")
        return KernelAnswer(
            kernel,
            ("out = torch.empty_like(q)", "b = torch.empty(q.shape[0])", f"self.kernel(q, k, v, out, b, {sizes})"),
        )
