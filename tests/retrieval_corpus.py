"""Makes files with the schemas of KernelBook and the AI-CUDA-Engineer-Archive, and near-copies of their references.

The hub can't be reached where this is developed, so these files stand in for it: modules are composed at random from
torch operations in the styles that people write (submodules, `nn.Sequential`, functions, methods), and one row in fifty
is as broken as rows of real data sets are. Deterministic in the seed.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ACTIVATIONS = {
    "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "ELU": "elu", "SELU": "selu", "CELU": "celu", "Mish": "mish",
    "Tanh": "tanh", "Sigmoid": "sigmoid", "Softplus": "softplus", "Softsign": "softsign", "LogSigmoid": "logsigmoid",
    "Hardtanh": "hardtanh", "Hardswish": "hardswish", "Hardsigmoid": "hardsigmoid", "LeakyReLU": "leaky_relu",
    "ReLU6": "relu6", "Tanhshrink": "tanhshrink",
}  # fmt: skip
"""Module and function of the same operation."""
MODULES = (
    "nn.Linear({a}, {b})", "nn.LayerNorm({a})", "nn.BatchNorm1d({a})", "nn.BatchNorm2d({a})", "nn.GroupNorm({g}, {a})",
    "nn.InstanceNorm2d({a})", "nn.Conv1d({a}, {b}, {k})", "nn.Conv2d({a}, {b}, {k})", "nn.Conv3d({a}, {b}, {k})",
    "nn.ConvTranspose2d({a}, {b}, {k})", "nn.MaxPool2d({k})", "nn.AvgPool2d({k})", "nn.MaxPool1d({k})",
    "nn.AdaptiveAvgPool2d({g})", "nn.Dropout({p})", "nn.PReLU()", "nn.PixelShuffle({g})", "nn.Bilinear({a}, {b}, {a})",
    "nn.RMSNorm({a})", "nn.LSTMCell({a}, {b})", "nn.Embedding({a}, {b})", "nn.Upsample(scale_factor={g})",
)  # fmt: skip
EXPRESSIONS = (
    "torch.exp({x})", "torch.log({x}.abs() + {p})", "torch.sin({x})", "torch.cos({x})", "torch.sqrt({x}.abs())",
    "{x} * {p}", "{x} + {p}", "{x} / {p}", "{x} - {y}", "{x} * {y}", "{x} + {y}", "torch.clamp({x}, {p})",
    "{x}.pow({g})",
    "torch.softmax({x}, dim={g})", "F.log_softmax({x}, dim={g})", "torch.logsumexp({x}, dim={g}, keepdim=True)",
    "{x}.mean(dim={g}, keepdim=True)", "{x}.sum(dim={g}, keepdim=True)", "torch.amax({x}, dim={g}, keepdim=True)",
    "torch.cumsum({x}, dim={g})", "{x}.std(dim={g}, keepdim=True)", "torch.flip({x}, [{g}])", "{x}.transpose({g}, 0)",
    "torch.matmul({x}, {y})", "torch.bmm({x}, {y})", "torch.maximum({x}, {y})", "torch.minimum({x}, {y})",
    "F.normalize({x}, dim={g})", "torch.where({x} > {p}, {x}, {y})", "torch.einsum('bij,bjk->bik', {x}, {y})",
    "torch.cat([{x}, {y}], dim={g})", "F.pad({x}, ({g}, {g}))", "torch.roll({x}, {g})", "torch.tril({x})",
    "torch.erf({x})",
    "torch.rsqrt({x}.abs() + {p})", "F.mse_loss({x}, {y})", "F.smooth_l1_loss({x}, {y})",
    "F.cosine_similarity({x}, {y})",
    "F.kl_div({x}, {y})", "torch.abs({x})", "torch.reciprocal({x})", "torch.floor({x})", "F.glu({x}, dim={g})",
)  # fmt: skip
SIBLINGS = 0.3
"""Share of modules that differ from the one before in one operation."""
NAMES = ["x", "h", "out", "y", "z", "hidden", "feats", "tmp", "t", "res", "value", "acc", "state"]
MEMBERS = ["layer", "conv", "norm", "proj", "fc", "head", "block", "act", "gate", "mix"]


def _filled(rng: random.Random, template: str, x: str = "", y: str = "") -> str:
    return template.format(
        x=x, y=y, a=rng.choice((16, 32, 64, 128, 256, 512)), b=rng.choice((16, 32, 64, 128, 1024)),
        g=rng.choice((1, 2)), k=rng.choice((1, 3, 5)), p=round(rng.uniform(0.01, 2.0), 2),
    )  # fmt: skip


def reference(rng: random.Random, name: str, *, nested_init: bool = False) -> str:
    """A module of three to nine operations, in a random style."""
    first, second = rng.sample(NAMES, 2)
    members, sentences = [], []
    for number in range(rng.randint(3, 9)):
        member = f"self.{rng.choice(MEMBERS)}{number}"
        kind = rng.random()
        if kind < 0.3:
            members.append(f"{member} = {_filled(rng, rng.choice(MODULES))}")
            sentences.append(f"{first} = {member}({first})")
        elif kind < 0.4:
            inner = ", ".join(
                [_filled(rng, rng.choice(MODULES)), f"nn.{rng.choice(list(ACTIVATIONS))}()"][: rng.randint(1, 2)]
            )
            members.append(f"{member} = nn.Sequential({inner})")
            sentences.append(f"{first} = {member}({first})")
        elif kind < 0.65:
            sentences.append(_activation(rng, member, members, first))
        else:
            sentences.append(f"{first} = {_filled(rng, rng.choice(EXPRESSIONS), first, second)}")
    a = rng.choice((16, 64, 256))
    init = f"[[], {{'size': {a}}}]" if nested_init else f"[{a}]"
    lines = [
        "import torch",
        "import torch.nn as nn",
        "import torch.nn.functional as F",
        "",
        "",
        f"class {name}(nn.Module):",
    ]
    lines += [f'    """{rng.choice(("A block.", "Fused operations.", "Layer of a network."))}"""', ""] * rng.randint(
        0, 1
    )
    lines += [
        "    def __init__(self, size):",
        f"        {rng.choice(('super().__init__()', f'super({name}, self).__init__()'))}",
    ]
    lines += [f"        {member}" for member in members]
    lines += [
        "",
        f"    def forward(self, {first}, {second}):",
        *(f"        {s}" for s in sentences),
        f"        return {first}",
    ]
    lines += [
        "",
        "",
        "def get_inputs():",
        f"    return [torch.rand([4, {a}, {a}, {a}]), torch.rand([4, {a}, {a}, {a}])]",
    ]
    return "\n".join([*lines, "", "", "def get_init_inputs():", f"    return {init}", ""])


_ACTIVATION = re.compile(r"\bF\.(" + "|".join(ACTIVATIONS.values()) + r")\(|\bnn\.(" + "|".join(ACTIVATIONS) + r")\(\)")


def sibling(rng: random.Random, source: str) -> str:
    """The same module but for one activation: what a search must not mistake for the module itself."""
    found = list(_ACTIVATION.finditer(source))
    if not found:
        return source.replace("return [torch.rand", "return [1 - torch.rand").replace(
            "        return ", "        return -", 1
        )
    place = rng.choice(found)
    others = [pair for pair in ACTIVATIONS.items() if place.group(1) != pair[1] and place.group(2) != pair[0]]
    module, function = rng.choice(others)
    return source[: place.start()] + (f"F.{function}(" if place.group(1) else f"nn.{module}()") + source[place.end() :]


def _activation(rng: random.Random, member: str, members: list[str], name: str) -> str:
    module, function = rng.choice(list(ACTIVATIONS.items()))
    if rng.random() < 0.5:
        members.append(f"{member} = nn.{module}()")
        return f"{name} = {member}({name})"
    return f"{name} = F.{function}({name})"


def triton_kernel(rng: random.Random, name: str) -> str:
    """Text of the length and look of a generated Triton kernel."""
    loads = "\n".join(
        f"    tmp{i} = tl.load(in_ptr0 + (x{rng.randint(0, 3)} + {rng.randint(1, 4096)} * x{i % 4}), xmask)"
        for i in range(30)
    )
    return (
        "import torch\nimport triton\nimport triton.language as tl\n\n\n@triton.jit\n"
        f"def triton_poi_fused_{rng.randint(0, 99)}(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):\n{loads}\n"
        f"    tl.store(out_ptr0 + x0, tmp{rng.randint(0, 29)}, xmask)\n\n\nclass {name}New(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x\n"
    )


def kernelbook_row(rng: random.Random, number: int) -> dict[str, Any]:
    name = rng.choice(("Net", "Block", "Fusion", "Layer", "Unit")) + str(number)
    triton = triton_kernel(rng, name)
    return {
        "uuid": number, "entry_point": name, "triton_code": triton,
        "python_code": reference(rng, name, nested_init=True),
        "original_triton_code": triton[:200], "repo_name": f"someone/repo{number % 997}", "module_name": name,
        "synthetic": rng.random() < 0.5,
        "licenses": rng.choice((["MIT"], ["Apache-2.0", "MIT"], [], None, "BSD-3-Clause")),
        "stars": rng.randint(0, 5000), "sha": f"{rng.getrandbits(160):040x}",
        "repo_link": f"https://example.org/someone/repo{number % 997}",
    }  # fmt: skip


def sakana_row(rng: random.Random, number: int, module: str, level: int) -> dict[str, Any]:
    correct = rng.random() < 0.6
    code = f"#include <torch/extension.h>\n__global__ void run{number}(const float* x, float* y, int n) {{\n" + "".join(
        f"    y[threadIdx.x + {rng.randint(0, 4096)}] += x[{i}];\n" for i in range(40)
    )
    return {
        "Op_Name": f"op_{number % 250}", "Level_ID": level, "Task_ID": number % 100 + 1, "Kernel_Name": f"op_{number}",
        "CUDA_Runtime": 0.1, "PyTorch_Native_Runtime": 0.2, "PyTorch_Compile_Runtime": 0.15,
        "CUDA_Speedup_Native": round(rng.uniform(0.1, 4), 3) if correct else None, "CUDA_Speedup_Compile": 1.0,
        "CUDA_Code": code + "}\n", "PyTorch_Code_Module": module, "PyTorch_Code_Functional": module, "Correct": correct,
        "Max_Diff": 0.0, "Error": None if correct else "mismatch", "NCU_Profile": None, "Torch_Profile": None,
        "Clang_Tidy": None,
    }  # fmt: skip


def hostile(rng: random.Random, row: dict[str, Any]) -> bytes:
    """A row as real data sets hold them, too; no line of it may stop a build."""
    code, kernel = ("python_code", "triton_code") if "python_code" in row else ("PyTorch_Code_Module", "CUDA_Code")
    broken: dict[str, Any] = dict(row)
    match rng.randrange(13):
        case 0:
            del broken[kernel]
        case 1:
            broken[code] = None
        case 2:
            broken[code] = row[code] + "# long\n" * 9_000
        case 3:
            broken[kernel] = row[kernel] + "# long\n" * 15_000
        case 4:
            broken[code] = "def broken(:\n"
        case 5:
            broken[code] = {"not": "text"}
        case 6:
            broken[kernel] = ""
        case 7:
            return json.dumps(row).encode()[: len(row[code]) // 2] + b"\n"
        case 8:
            return b'{"python_code": "\xff\xfe\xfa"}\n'
        case 9:
            broken[kernel] = row[kernel] + "\ud800"
        case 10:
            broken[code] = "x = " + "(" * 3_000 + ")" * 3_000 + "\n" + row[code]
        case 11:
            return b"[1, 2, 3]\n"
        case _:
            broken[code] = "import os\nprint('no module here')\n\0"
    return json.dumps(broken).encode() + b"\n"


def kernelbook_lines(seed: int, count: int, hostile_share: float = 0.02) -> Iterator[bytes]:
    """`count` lines; broken ones, and rows that came before, are among them."""
    rng = random.Random(seed)
    row = kernelbook_row(rng, 0)
    for number in range(count):
        before, row = row, kernelbook_row(rng, number)
        if rng.random() < SIBLINGS:
            row["python_code"] = sibling(rng, before["python_code"]).replace(before["entry_point"], row["entry_point"])
        if rng.random() < hostile_share:
            yield hostile(rng, row)
        else:
            yield json.dumps(row).encode() + b"\n"
        if rng.random() < hostile_share / 4:
            yield json.dumps(row).encode() + b"\n"


def sakana_lines(seed: int, count: int, problems: int = 250, hostile_share: float = 0.02) -> Iterator[bytes]:
    """`count` kernels for a few problems, like the archive's."""
    rng = random.Random(seed)
    modules = [reference(rng, "Model") for _ in range(problems)]
    for number in range(count):
        which = rng.randrange(problems)
        row = sakana_row(rng, number, modules[which], 1 + which % 4)
        yield hostile(rng, row) if rng.random() < hostile_share else json.dumps(row).encode() + b"\n"


def write_lines(path: Path, lines: Iterator[bytes]) -> int:
    with path.open("wb") as file:
        return sum(1 for line in lines if file.write(line))


class _Renamed(ast.NodeTransformer):
    """Other names for variables and members, other numbers."""

    KEPT = frozenset({"self", "torch", "nn", "F", "super", "forward", "__init__", "get_inputs", "get_init_inputs"})

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._names: dict[str, str] = {}

    def _name(self, old: str) -> str:
        if old in self.KEPT:
            return old
        return self._names.setdefault(
            old, f"{self._rng.choice('abcdefghij')}{len(self._names)}_{self._rng.randint(0, 99)}"
        )

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(self._name(node.id), node.ctx), node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self._name(node.arg))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        own = isinstance(node.value, ast.Name) and node.value.id == "self"
        self.generic_visit(node)
        if own:
            node.attr = self._name(f"self.{node.attr}")
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.name = "Model"
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, float):
            return ast.Constant(round(node.value * self._rng.uniform(0.5, 2), 3))
        if isinstance(node.value, int) and not isinstance(node.value, bool) and node.value > 2:
            return ast.Constant(node.value * self._rng.choice((2, 4)) + self._rng.choice((0, 2)))
        return node


def mutated(rng: random.Random, source: str) -> str:
    """A near-copy: other names, numbers, comments and layout, and the members made in another order."""
    tree = _Renamed(rng).visit(ast.parse(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            start = next(i for i, s in enumerate(node.body) if isinstance(s, ast.Expr)) + 1
            tail = node.body[start:]
            rng.shuffle(tail)
            node.body[start:] = tail
    lines = ast.unparse(ast.fix_missing_locations(tree)).splitlines()
    out = ['"""Rewritten."""']
    for line in lines:
        out += ["# " + rng.choice(("see the paper", "TODO", "shapes: (B, N)"))] if rng.random() < 0.15 else []
        out.append(line + ("  # noqa" if rng.random() < 0.1 else ""))
    return "\n".join(out) + "\n"
