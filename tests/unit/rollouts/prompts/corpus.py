"""Messy responses, written by hand: what is said around, inside and instead of the one block that was asked for.

Each case is a name, a response and what must come of it: `MODEL` itself, another source, or words of the problem.
"""

from __future__ import annotations

import html

MODEL = """\
import torch
import torch.nn as nn
from kbrl_async.launch import cuda_kernel
SOURCE = r\"\"\"
__global__ void run(const float *x, float *out, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n && i >= 0) out[i] = 2.0f * x[i];
}
\"\"\"
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = cuda_kernel(SOURCE, "run")
    def forward(self, x):
        out = torch.empty_like(x)
        self.kernel[(x.numel() + 255) // 256, 256](x, out, x.numel())
        return out
"""
OLD = MODEL.replace("2.0f", "3.0f")
"""An earlier attempt: taking it is the mistake."""
QUOTED = "class Model(nn.Module):\n    def forward(self, x):\n        return 2 * x\n"
HELPER = "def helper(n):\n    return (n + 255) // 256\n"
PLAN = 'SOURCE = r"""\nvoid run(float *x) {}\n"""\nPLAN = {"inputs": ["x"], "kernels": {"run": {"source": SOURCE}}}\n'
NO_BLOCK = "no closed code block"
NO_MODEL = "no code block defines"


def f(code: str, word: str = "python", mark: str = "```") -> str:
    return f"{mark}{word}\n{code}{mark}\n"


def indented(text: str, by: str) -> str:
    return "".join(by + line if line.strip() else line for line in text.splitlines(keepends=True))


DOCUMENTED = MODEL.replace("class ModelNew", '"""Usage:\n```\nModelNew()(x)\n```\n"""\nclass ModelNew')
LABELLED = MODEL.replace("class ModelNew", '"""Usage:\n```python\nModelNew()(x)\n```\n"""\nclass ModelNew')
TWICE = MODEL + "\n" + MODEL.replace("2.0f", "4.0f").replace("import torch\n", "", 1)
BROKEN = MODEL.replace("        return out\n", "        return (out\n")
NO_FORWARD = "import torch\nclass ModelNew(torch.nn.Module):\n    pass\n"
DIFF = "".join("+" + line for line in MODEL.splitlines(keepends=True))
ESCAPED = html.escape(MODEL)
LAMBDA = MODEL.replace("class ModelNew(nn.Module):", "class ModelNew(nn.Module):  # größer, schneller – αβγ ≤ ∞ 🚀")
NBSP = MODEL.replace("        out = ", "\u00a0\u00a0      out = ")

CASES: list[tuple[str, str, str]] = [
    # ── one block, and what is said around it ───────────────────────────────────────────────────────────────────
    ("plain", f(MODEL), MODEL),
    ("words before", "Here is the kernel:\n\n" + f(MODEL), MODEL),
    ("words after", f(MODEL) + "\nIt is fast.", MODEL),
    ("words on both sides", "Sure!\n" + f(MODEL) + "Done.", MODEL),
    ("no line end after the fence", f(MODEL).rstrip(), MODEL),
    ("blank lines inside", "```python\n\n\n" + MODEL + "\n\n```", MODEL),
    ("blank line at the end of each", f(MODEL).replace("```python\n", "```python\n\n"), MODEL),
    ("spaces after the fences", f(MODEL).replace("```python", "```python  ").rstrip() + "   \n", MODEL),
    ("a heading before", "### Solution\n" + f(MODEL), MODEL),
    ("a rule around", "---\n" + f(MODEL) + "---\n", MODEL),
    ("bold label", "**ModelNew**\n" + f(MODEL), MODEL),
    ("inline code around", "Use `ModelNew` and `forward`:\n" + f(MODEL) + "Call `forward`.", MODEL),
    ("inline triple ticks in prose", "Write ```x``` not x.\n" + f(MODEL), MODEL),
    ("final end-of-text words", f(MODEL) + "<|im_end|>", MODEL),
    ("assistant prefix", "assistant\n" + f(MODEL), MODEL),
    # ── the word after the fence ────────────────────────────────────────────────────────────────────────────────
    ("no word", f(MODEL, ""), MODEL),
    ("py", f(MODEL, "py"), MODEL),
    ("python3", f(MODEL, "python3"), MODEL),
    ("Python in capitals", f(MODEL, "Python"), MODEL),
    ("cpp by mistake", f(MODEL, "cpp"), MODEL),
    ("c++ by mistake", f(MODEL, "c++"), MODEL),
    ("cuda by mistake", f(MODEL, "cuda"), MODEL),
    ("text by mistake", f(MODEL, "text"), MODEL),
    ("word after a space", f(MODEL, " python"), MODEL),
    ("attributes", f(MODEL, 'python title="model.py" linenums="1"'), MODEL),
    ("braces", f(MODEL, "{.python .numberLines}"), MODEL),
    ("file name", f(MODEL, "python:model_new.py"), MODEL),
    # ── other fences ────────────────────────────────────────────────────────────────────────────────────────────
    ("tildes", f(MODEL, mark="~~~"), MODEL),
    ("four ticks", f(MODEL, mark="````"), MODEL),
    ("four ticks around three", "````markdown\n" + f(MODEL) + "````\n", MODEL),
    ("end longer than its beginning", "```python\n" + MODEL + "`````\n", MODEL),
    ("end shorter than its beginning", "````python\n" + MODEL + "```\n", NO_BLOCK),
    ("tildes around ticks in the code", f(DOCUMENTED, mark="~~~"), DOCUMENTED),
    ("indented in a list", "1. So:\n\n" + indented(f(MODEL), "   "), MODEL),
    ("indented by a tab", indented(f(MODEL), "\t"), MODEL),
    ("quoted", indented(f(MODEL), "> "), MODEL),
    ("end glued to the code", f(MODEL).rstrip().removesuffix("\n```") + "```", MODEL),
    ("beginning glued to a word of prose", "Answer:```python\n" + MODEL + "```\n", NO_BLOCK),
    # ── fences in the code itself ───────────────────────────────────────────────────────────────────────────────
    ("fences in a docstring", f(DOCUMENTED), DOCUMENTED),
    ("labelled fences in a docstring", f(LABELLED), LABELLED),
    ("fences in a docstring, then another block", f(DOCUMENTED) + f(HELPER), DOCUMENTED),
    ("fence in a comment", f(MODEL + "# ``` not an end\n"), MODEL + "# ``` not an end\n"),
    ("a docstring block, then the model", f('"""Notes"""\n') + f(MODEL), MODEL),
    # ── several blocks ──────────────────────────────────────────────────────────────────────────────────────────
    ("helper first", f(HELPER) + f(MODEL), MODEL),
    ("helper last", f(MODEL) + f(HELPER), MODEL),
    ("shell last", f(MODEL) + f("python run.py\n", "bash"), MODEL),
    ("quoted problem first", f(QUOTED) + f(MODEL), MODEL),
    ("quoted problem last", f(MODEL) + f(QUOTED), MODEL),
    ("CUDA alone first", f("__global__ void run() {}\n", "cuda") + f(MODEL), MODEL),
    ("attempt, then improvement", "First:\n" + f(OLD) + "Better:\n" + f(MODEL), MODEL),
    ("three attempts", f(OLD) + f(OLD) + f(MODEL), MODEL),
    ("improvement without forward", f(MODEL) + f(NO_FORWARD), MODEL),
    ("improvement cut off", f(MODEL) + "```python\n" + OLD[:300], MODEL),
    ("output of a run last", f(MODEL) + f("ok 0.12 ms\n", "") + "Faster.", MODEL),
    ("usage last", f(MODEL) + f("model = ModelNew()\nmodel.forward(x)\n"), MODEL),
    ("ten blocks", f(HELPER) * 9 + f(MODEL), MODEL),
    ("broken, then mended", f(BROKEN) + f(MODEL), MODEL),
    ("different fences", f(OLD, mark="~~~") + f(MODEL), MODEL),
    ("blocks without a line between", f(OLD).rstrip() + "\n" + f(MODEL), MODEL),
    # ── two ModelNew ────────────────────────────────────────────────────────────────────────────────────────────
    ("two classes in one block", f(TWICE), TWICE),
    ("subclass of ModelNew too", f(MODEL + "class ModelNew2(ModelNew):\n    pass\n"),
     MODEL + "class ModelNew2(ModelNew):\n    pass\n"),
    ("only ModelNew2", f(MODEL.replace("ModelNew", "ModelNew2")), NO_MODEL),
    ("ModelNew without forward", f(NO_FORWARD), NO_MODEL),
    ("only Model", f(QUOTED), NO_MODEL),
    ("ModelNew in a comment", f("# class ModelNew\ndef forward(x):\n    return x\n"), NO_MODEL),
    ("ModelNew in a string", f('text = "class ModelNew: def forward"\n'), NO_MODEL),
    # ── tags ────────────────────────────────────────────────────────────────────────────────────────────────────
    ("tags", f"<KERNEL>\n{MODEL}</KERNEL>", MODEL),
    ("tags around a block", f"<KERNEL>\n{f(MODEL)}</KERNEL>", MODEL),
    ("tags before a block", f"<KERNEL>\n{MODEL}</KERNEL>\n" + f(OLD), MODEL),
    ("block before tags", f(OLD) + f"<KERNEL>\n{MODEL}</KERNEL>", MODEL),
    ("small letters in tags", f"<kernel>\n{MODEL}</kernel>", MODEL),
    ("two pairs of tags", f"<KERNEL>{OLD}</KERNEL> or <KERNEL>\n{MODEL}</KERNEL>", MODEL),
    ("tags not closed, block closed", "<KERNEL>\n" + f(MODEL), MODEL),
    ("tags named in prose", "I put it in <KERNEL></KERNEL> tags.\n" + f(MODEL), MODEL),
    ("tags around prose and block", f"<KERNEL>Here:\n{f(HELPER)}and\n{f(MODEL)}</KERNEL>", MODEL),
    ("tags cut off", "<KERNEL>\n" + MODEL[:300], NO_BLOCK),
    ("tags around nothing", "<KERNEL>\n</KERNEL>", NO_MODEL),
    # ── thoughts ────────────────────────────────────────────────────────────────────────────────────────────────
    ("thought", "<think>hm</think>\n" + f(MODEL), MODEL),
    ("code in the thought", "<think>\n" + f(OLD) + "</think>\n" + f(MODEL), MODEL),
    ("code in the thought only", "<think>\n" + f(MODEL) + "</think>\nDone.", NO_BLOCK),
    ("thought opened by the template", "hm\n" + f(OLD) + "</think>\n" + f(MODEL), MODEL),
    ("thought never closed", "<think>\n" + f(MODEL), "before its thought did"),
    ("thought cut off in its code", "<think>\n```python\n" + MODEL[:200], "before its thought did"),
    ("nothing after the thought", "<think>hm</think>\n", "before its thought did"),
    ("two thoughts", "<think>a</think>" + f(OLD) + "<think>b</think>" + f(MODEL), MODEL),
    ("a thought after the answer", f(MODEL) + "<think>\n" + f(OLD), MODEL),
    ("tags in the thought", f"<think><KERNEL>{OLD}</KERNEL></think><KERNEL>\n{MODEL}</KERNEL>", MODEL),
    ("thinking by another name", "<thinking>\n" + f(OLD) + "</thinking>\n" + f(MODEL), MODEL),
    ("capital thought", "<THINK>\n" + f(OLD) + "</THINK>\n" + f(MODEL), MODEL),
    ("fence cut by the thought's end", "<think>\n```python\n" + OLD[:90] + "</think>\n" + f(MODEL), MODEL),
    ("empty thought", "<think>\n\n</think>\n\n" + f(MODEL), MODEL),
    # ── characters ──────────────────────────────────────────────────────────────────────────────────────────────
    ("CRLF", f(MODEL).replace("\n", "\r\n"), MODEL),
    ("CR", f(MODEL).replace("\n", "\r"), MODEL),
    ("CRLF and thought", ("<think>hm</think>\n" + f(MODEL)).replace("\n", "\r\n"), MODEL),
    ("mixed line ends", f(MODEL).replace("\n", "\r\n", 5), MODEL),
    ("byte order mark", "\ufeff" + f(MODEL), MODEL),
    ("byte order mark inside", f("\ufeff" + MODEL), MODEL),
    ("zero-width space in the code", f(MODEL.replace("return", "\u200breturn")), MODEL),
    ("no-break spaces", f(NBSP), MODEL),
    ("unicode in comments", f(LAMBDA), LAMBDA),
    ("emoji around", "🚀🚀\n" + f(MODEL) + "✅", MODEL),
    ("escaped for HTML", f(ESCAPED), MODEL),
    ("escaped in tags", f"<KERNEL>\n{ESCAPED}</KERNEL>", MODEL),
    ("an entity in a text of the code", f(MODEL + 'LESS = "&lt;"\n'), MODEL + 'LESS = "&lt;"\n'),
    ("a NUL", "\0" + f(MODEL), MODEL),
    # ── no fence, no code, cut off ──────────────────────────────────────────────────────────────────────────────
    ("the bare file", MODEL, MODEL),
    ("the bare file after a thought", "<think>hm</think>\n" + MODEL, MODEL),
    ("the bare file with prose", "Here it is:\n" + MODEL, NO_BLOCK),
    ("the bare file cut off", MODEL[: MODEL.index("numel")], NO_BLOCK),
    ("nothing", "", NO_BLOCK),
    ("white space", " \n\n", NO_BLOCK),
    ("a refusal", "I'm sorry, I can't help with that.", NO_BLOCK),
    ("cut off in the code", "```python\n" + MODEL[:300], NO_BLOCK),
    ("cut off before the fence", "```python\n" + MODEL, NO_BLOCK),
    ("cut off at two ticks", "```python\n" + MODEL + "``", NO_BLOCK),
    ("only an opening fence", "```python\n", NO_BLOCK),
    ("an empty block", f(""), NO_MODEL),
    ("a diff", f(DIFF, "diff"), "is a diff"),
    ("a diff after the file", f(MODEL) + f(DIFF, "diff"), MODEL),
    ("a file name and dots", f("# model_new.py\n...\n"), NO_MODEL),
    ("code that does not parse", f(BROKEN), BROKEN),
    ("code as a JSON text", '{"code": "class ModelNew: def forward"}', NO_BLOCK),
    # ── launch plans ────────────────────────────────────────────────────────────────────────────────────────────
    ("a plan", f(PLAN), PLAN),
    ("a plan after prose", "The plan:\n" + f(PLAN) + "Done.", PLAN),
    ("a plan in tags", f"<KERNEL>\n{PLAN}</KERNEL>", PLAN),
    ("a module, then a plan", f(OLD) + f(PLAN), PLAN),
    ("half a plan", "```python\n" + PLAN[:60], NO_BLOCK),
]  # fmt: skip
